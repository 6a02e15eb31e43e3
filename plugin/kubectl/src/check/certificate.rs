//! The validity of X.509 certificates in PEM.

use x509_parser::pem::Pem;

/// When each certificate of a PEM text ends, in seconds since 1970.
///
/// # Errors
/// The text has no certificate, or something that is not one.
pub(super) fn ends(pem: &str) -> Result<Vec<u64>, String> {
    let end = |block: Result<Pem, x509_parser::error::PEMError>| {
        let block = block.map_err(|error| format!("it is not PEM: {error}"))?;
        let certificate =
            block.parse_x509().map_err(|error| format!("it is not an X.509 certificate: {error}"))?;
        Ok::<_, String>(u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0))
    };
    let ends = Pem::iter_from_buffer(pem.as_bytes()).map(end).collect::<Result<Vec<_>, _>>()?;
    if ends.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(ends) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use shmesh_injector::certificate::make;

    use super::*;

    fn pem(end: u64) -> String {
        let now = UNIX_EPOCH + Duration::from_secs(end - 86_400);
        make(&["a".to_owned()], Duration::from_secs(86_400), now, None).unwrap().authorities
    }

    #[test]
    fn end_of_each_certificate_is_read() {
        // The last is beyond the years that certificates write with two digits.
        for end in [1_000_000_000, 2_524_608_000] {
            assert_eq!(ends(&pem(end)), Ok(vec![end]));
        }
        assert_eq!(ends(&(pem(1_000_000_000) + &pem(2_000_000_000))), Ok(vec![1_000_000_000, 2_000_000_000]));
    }

    #[test]
    fn damaged_certificates_are_errors() {
        assert!(ends("").is_err() && ends("-----BEGIN CERTIFICATE-----\n?").is_err());
        let whole = pem(1_000_000_000);
        let cut = whole.lines().enumerate().filter(|(at, _)| *at != 2).map(|(_, line)| format!("{line}\n"));
        assert!(ends(&cut.collect::<String>()).is_err());
    }
}
