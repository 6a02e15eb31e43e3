//! A new certificate.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};

use super::{Bundle, Terms, first, seconds};

/// Clocks of nodes differ.
const SKEW: Duration = Duration::from_secs(3600);

/// A certificate for these names, signed by an authority of its own. `previous` was what clients have been told of.
///
/// # Errors
/// A name that no certificate can have; no random numbers.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use shmesh_injector::certificate::{CertResolver, make};
/// let bundle = make(&["a.b.svc".to_owned()], Duration::from_secs(86_400), SystemTime::now(), None)?;
/// CertResolver::default().present(&bundle)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub fn make(
    names: &[String],
    lifetime: Duration,
    now: SystemTime,
    previous: Option<&Bundle>,
) -> Result<Bundle> {
    let from = seconds(now.checked_sub(SKEW).unwrap_or(now));
    let until = seconds(now) + lifetime.as_secs();
    let common = |name: &str| {
        let mut distinguished = DistinguishedName::new();
        distinguished.push(DnType::CommonName, name);
        distinguished
    };
    let at = |seconds| date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);

    let mut authority = CertificateParams::default();
    // A client that knows two authorities of one name would have to try both.
    authority.distinguished_name = common(&format!("shmesh injector {from}"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    (authority.not_before, authority.not_after) = (at(from), at(until));
    let authority_key = KeyPair::generate().context("cannot make a key")?;
    let signed = authority.self_signed(&authority_key).context("cannot sign an authority")?;

    let mut server = CertificateParams::new(names).context("a name that no certificate can have")?;
    server.distinguished_name = common(names.first().map_or("shmesh", String::as_str));
    server.use_authority_key_identifier_extension = true;
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    (server.not_before, server.not_after) = (at(from), at(until));
    let key = KeyPair::generate().context("cannot make a key")?;
    let issuer = Issuer::from_params(&authority, &authority_key);
    let certificate = server.signed_by(&key, &issuer).context("cannot sign the certificate")?;

    let mut authorities = signed.pem();
    if let Some(previous) =
        previous.map(|previous| first(&previous.authorities)).filter(|pem| !pem.is_empty())
    {
        authorities.push_str(previous);
        authorities.push('\n');
    }
    let terms = Terms { names: names.to_vec(), from, until };
    Ok(Bundle { authorities, certificate: certificate.pem(), key: key.serialize_pem(), terms })
}
