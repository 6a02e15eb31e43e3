//! Numbers of bytes as Kubernetes writes them: parsing and formatting for the library, the daemons and the injector.

const BINARY: [(&str, u32); 6] = [("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18), ("", 0)];

/// Why a text is not a number of bytes.
///
/// ```
/// use shmesh::config::{QuantityError, parse_bytes};
/// let error = parse_bytes("64 MB").unwrap_err();
/// assert_eq!(error.to_string(), "\"64 MB\" is not a number of bytes; write 64Mi, 64M or 67108864");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text is not a quantity of Kubernetes, or it is below zero.
    #[error("{0:?} is not a number of bytes; write 64Mi, 64M or 67108864")]
    Malformed(String),
    /// The number does not fit 64 bits.
    #[error("{0:?} does not fit 64 bits; give a smaller number of bytes")]
    TooLarge(String),
}

/// Reads a number of bytes in any form that Kubernetes accepts as a quantity: `64Mi`, `64M`, `1.5Gi`, `1e9`, `67108864`. Rounds
/// up to whole bytes, as Kubernetes does.
///
/// # Errors
/// [`QuantityError`], with the text.
///
/// ```
/// use shmesh::config::parse_bytes;
/// assert_eq!(parse_bytes("64Mi"), Ok(67_108_864));
/// assert_eq!(parse_bytes("64M"), Ok(64_000_000));
/// assert_eq!(parse_bytes("1.5Gi"), Ok(3 << 29));
/// assert!(parse_bytes("a lot").is_err());
/// ```
pub fn parse_bytes(text: &str) -> Result<u64, QuantityError> {
    let value = whole(text).ok_or_else(|| QuantityError::Malformed(text.to_owned()))?;
    u64::try_from(value).map_err(|_| QuantityError::TooLarge(text.to_owned()))
}

/// Writes a number of bytes for people: in the largest unit of 1,024 that it fills, with at most two digits after the point and
/// rounded up, so that a size that is set as a message asks is large enough. [`exact_bytes`] is for programs.
///
/// ```
/// use shmesh::config::format_bytes;
/// assert_eq!(format_bytes(64 << 20), "64Mi");
/// assert_eq!(format_bytes((1 << 30) + 1), "1.01Gi");
/// assert_eq!(format_bytes(1000), "1000");
/// ```
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let Some((unit, shift)) = BINARY.iter().find(|(_, shift)| bytes >> shift > 0) else {
        return bytes.to_string();
    };
    let hundredths = (u128::from(bytes) * 100).div_ceil(1 << shift);
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    match rest {
        0 => format!("{whole}{unit}"),
        _ if rest % 10 == 0 => format!("{whole}.{}{unit}", rest / 10),
        _ => format!("{whole}.{rest:02}{unit}"),
    }
}

/// Writes a number of bytes for programs: as a whole number of the largest unit of 1,024 that is exact, so that each number has
/// one text, which [`parse_bytes`] reads. [`format_bytes`] is for people.
///
/// ```
/// use shmesh::config::{exact_bytes, parse_bytes};
/// assert_eq!(exact_bytes(64 << 20), "64Mi");
/// assert_eq!(exact_bytes(1536 << 20), "1536Mi");
/// assert_eq!(exact_bytes((1 << 30) + 1), "1073741825");
/// assert_eq!(parse_bytes(&exact_bytes(1025)), Ok(1025));
/// ```
#[must_use]
pub fn exact_bytes(bytes: u64) -> String {
    let is_exact = |(_, shift): &&(&str, u32)| bytes != 0 && bytes.trailing_zeros() >= *shift;
    match BINARY.iter().find(is_exact) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Digits, perhaps with a point, times what the suffix stands for. What passes 128 bits is as large as those go.
fn whole(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (digits, fraction) = number.split_once('.').unwrap_or((number, ""));
    // More than 18 digits after the point cannot change a number of bytes that fits 64 bits.
    if digits.len() + fraction.len() == 0
        || fraction.contains('.')
        || digits.len() > 20
        || fraction.len() > 18
    {
        return None;
    }
    let mantissa: u128 = format!("{digits}{fraction}").parse().ok()?;
    let point = i32::try_from(fraction.len()).ok()?;
    let (shift, exponent) = if let Some((_, shift)) = BINARY.iter().find(|(unit, _)| *unit == suffix) {
        (*shift, 0)
    } else if let Some((_, exponent)) = DECIMAL.iter().find(|(unit, _)| *unit == suffix) {
        (0, *exponent)
    } else {
        let power = suffix.strip_prefix(['e', 'E'])?;
        let is_number = power.trim_start_matches(['+', '-']).bytes().all(|byte| byte.is_ascii_digit());
        (0, power.parse::<i32>().ok().filter(|power| is_number && power.abs() <= 18)?)
    };
    let scaled = mantissa.checked_shl(shift).filter(|scaled| scaled >> shift == mantissa);
    let power = exponent - point;
    let ten = 10_u128.checked_pow(power.unsigned_abs())?;
    Some(match scaled {
        None => u128::MAX,
        Some(scaled) if power >= 0 => scaled.saturating_mul(ten),
        Some(scaled) => scaled.div_ceil(ten),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_parsed_like_kubernetes() {
        for (text, bytes) in [
            ("0", 0),
            ("100663296", 96 << 20),
            ("96Mi", 96 << 20),
            ("64M", 64_000_000),
            ("1G", 1_000_000_000),
            ("0.5Gi", 1 << 29),
            (".5Ki", 512),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1e+09", 1_000_000_000),
            ("1E", 1_000_000_000_000_000_000),
            ("128974848000m", 128_974_848),
            ("1m", 1),
            ("2k", 2000),
            ("+1Ki", 1024),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for wrong in
            ["", "Mi", "-1", "1 Mi", "64mi", "1.2.3", "1e", "1e+-3", "0x10", "1MiB", "64MB", "1e99", " 1"]
        {
            assert!(matches!(parse_bytes(wrong), Err(QuantityError::Malformed(_))), "{wrong:?}");
        }
        for large in ["99Ei", "18446744073709551616", "18446744073709551615Ki", "99999999999999999999"] {
            assert!(matches!(parse_bytes(large), Err(QuantityError::TooLarge(_))), "{large:?}");
        }
    }
}
