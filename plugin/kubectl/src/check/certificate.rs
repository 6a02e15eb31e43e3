//! The validity of X.509 certificates in PEM, read from DER without anything else of them.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

/// When each certificate of a PEM text ends, in seconds since 1970.
///
/// # Errors
/// The text has no certificate, or something that is not one.
pub(super) fn ends(pem: &str) -> Result<Vec<u64>, String> {
    let blocks = pem.split("-----BEGIN CERTIFICATE-----").skip(1);
    let end = |block: &str| {
        let base64: String = block.split("-----END").next().unwrap_or_default().split_whitespace().collect();
        let der = BASE64_STANDARD.decode(base64).map_err(|error| format!("it is not base64: {error}"))?;
        end_of(&der).ok_or_else(|| "it is not an X.509 certificate".to_owned())
    };
    let ends = blocks.map(end).collect::<Result<Vec<_>, _>>()?;
    if ends.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(ends) }
}

/// The end of the validity of a certificate: RFC 5280, section 4.1.
fn end_of(der: &[u8]) -> Option<u64> {
    let (_, certificate, _) = element(der)?;
    let (_, mut fields, _) = element(certificate)?;
    // The version is optional; then serial number, algorithm and issuer.
    let (tag, _, rest) = element(fields)?;
    if tag == 0xa0 {
        fields = rest;
    }
    for _ in 0..3 {
        fields = element(fields)?.2;
    }
    let (_, validity, _) = element(fields)?;
    let (_, _, rest) = element(validity)?;
    let (tag, time, _) = element(rest)?;
    let text = std::str::from_utf8(time).ok()?.strip_suffix('Z')?;
    let (year, text) = match tag {
        0x17 => {
            let year: u64 = text.get(..2)?.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, text.get(2..)?)
        }
        0x18 => (text.get(..4)?.parse().ok()?, text.get(4..)?),
        _ => return None,
    };
    let pair = |at: usize| text.get(at..at + 2)?.parse::<u64>().ok();
    let (month, day) = (pair(0)?, pair(2)?);
    let days = days_since_1970(year, month, day)?;
    Some(days * 86_400 + pair(4)? * 3600 + pair(6)? * 60 + pair(8)?)
}

/// Tag and content of the first DER element, and what follows it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
        let len =
            bytes.iter().try_fold(0_usize, |len, byte| len.checked_mul(256)?.checked_add(usize::from(*byte)));
        (len?, rest)
    };
    let (content, rest) = rest.split_at_checked(len)?;
    Some((tag, content, rest))
}

fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    const BEFORE: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let before = *BEFORE.get(usize::try_from(month.checked_sub(1)?).ok()?)?;
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    let years = year.checked_sub(1970)?;
    let is_leap = leaps(year) != leaps(year - 1);
    let leap_day = u64::from(is_leap && month > 2);
    Some(years * 365 + leaps(year - 1) - leaps(1969) + before + leap_day + day.checked_sub(1)?)
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
    fn end_of_a_certificate_is_read_from_der() {
        // Before and after leap days, in a year that is divisible by 100, and beyond the years that have two digits.
        for end in [
            951_782_399,
            951_782_400,
            1_709_164_800,
            1_709_251_200,
            4_107_542_400,
            2_524_607_999,
            2_524_608_000,
        ] {
            assert_eq!(ends(&pem(end)), Ok(vec![end]));
        }
        assert_eq!(ends(&(pem(1_000_000_000) + &pem(2_000_000_000))), Ok(vec![1_000_000_000, 2_000_000_000]));
    }

    #[test]
    fn damaged_certificates_are_errors() {
        assert!(ends("").is_err() && ends("-----BEGIN CERTIFICATE-----\n?").is_err());
        let whole = pem(1_000_000_000);
        let base64: String = whole.lines().filter(|line| !line.starts_with('-')).collect();
        let der = BASE64_STANDARD.decode(base64).unwrap();
        // The validity is in the first half; no prefix that ends before it panics.
        assert!((0..der.len() / 4).all(|len| end_of(&der[..len]).is_none()));
        assert_eq!(end_of(&[0x30, 0xff, 0xff]), None);
    }
}
