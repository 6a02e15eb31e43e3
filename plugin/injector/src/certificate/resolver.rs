//! The certificate that the server presents, replaceable at run time.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};

use super::{Bundle, seconds};

/// Resolves the certificate for new TLS connections. Without a certificate they are refused.
#[derive(Clone, Default)]
pub struct CertResolver(Arc<RwLock<Option<Arc<CertifiedKey>>>>);

impl fmt::Debug for CertResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CertResolver").field(&self.is_loaded()).finish()
    }
}

impl CertResolver {
    /// Presents this certificate from now on.
    ///
    /// # Errors
    /// The PEM is invalid, or the key does not match; the previous certificate stays in use.
    pub fn present(&self, bundle: &Bundle) -> Result<()> {
        let certified = certified(&bundle.certificate, &bundle.key)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(certified));
        Ok(())
    }

    /// Whether a certificate is loaded.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.now().is_some()
    }

    fn now(&self) -> Option<Arc<CertifiedKey>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a TLS configuration that presents the certificate.
    ///
    /// # Errors
    /// The crypto provider does not support the TLS versions.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .context("the crypto provider does not support TLS")?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(self.clone()));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for CertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.now()
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn chain(certificate: &str) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(certificate.as_bytes())
        .collect::<Result<_, _>>()
        .context("the certificate is not valid PEM")
}

/// Parses a certificate and its key; fails if they do not match.
pub(super) fn certified(certificate: &str, key: &str) -> Result<CertifiedKey> {
    let chain = chain(certificate)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).context("the key is not valid PEM")?;
    CertifiedKey::from_der(chain, key, &provider()).context("the certificate and its key cannot be used")
}

/// Whether a client that trusts the authorities accepts the certificate for all its names.
pub(super) fn is_accepted(bundle: &Bundle, now: SystemTime) -> bool {
    accepted(bundle, now).is_ok()
}

fn accepted(bundle: &Bundle, now: SystemTime) -> Result<()> {
    certified(&bundle.certificate, &bundle.key)?;
    verify(&bundle.authorities, &bundle.certificate, &bundle.terms.names, now)
}

/// Checks that a client that trusts the authorities accepts a certificate chain for all names. Both are in PEM.
///
/// # Errors
/// The client refuses it, or a text is not PEM.
pub fn verify(authorities: &str, certificate: &str, names: &[String], now: SystemTime) -> Result<()> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
        roots.add(authority?)?;
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build()?;
    let chain = chain(certificate)?;
    let (certificate, between) = chain.split_first().context("no certificate")?;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds(now)));
    for name in names {
        let name = ServerName::try_from(name.as_str())?;
        verifier.verify_server_cert(certificate, between, &name, &[], now)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, KeyPair};

    use super::*;

    /// As cert-manager's issuer `selfSigned` makes it: without an authority and without a subject.
    #[test]
    fn self_signed_certificate_is_verified_by_itself() {
        let names = ["a.b.svc".to_owned()];
        let mut params = CertificateParams::new(names.clone()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        let pem = || params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
        let (ours, other) = (pem(), pem());
        verify(&ours, &ours, &names, SystemTime::now()).unwrap();
        verify(&other, &ours, &names, SystemTime::now()).unwrap_err();
        verify(&ours, &ours, &["c.b.svc".to_owned()], SystemTime::now()).unwrap_err();
    }
}
