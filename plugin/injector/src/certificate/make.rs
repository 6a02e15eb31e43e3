//! Issues a new certificate.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};

use super::{Bundle, Terms, first, seconds};

/// Tolerance for clock differences between nodes.
const SKEW: Duration = Duration::from_secs(3600);

/// Issues a certificate for these names, signed by an authority of its own. The previous authority stays in
/// the bundle.
///
/// # Errors
/// A name is invalid for certificates, or there are no random numbers.
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
    // Distinct names, so that a client with both authorities selects the right one.
    authority.distinguished_name = common(&format!("shmesh injector {from}"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    (authority.not_before, authority.not_after) = (at(from), at(until));
    let authority_key = KeyPair::generate().context("cannot generate a key")?;
    let signed = authority.self_signed(&authority_key).context("cannot sign an authority")?;

    let mut server = CertificateParams::new(names).context("invalid name for a certificate")?;
    server.distinguished_name = common(names.first().map_or("shmesh", String::as_str));
    server.use_authority_key_identifier_extension = true;
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    (server.not_before, server.not_after) = (at(from), at(until));
    let key = KeyPair::generate().context("cannot generate a key")?;
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
