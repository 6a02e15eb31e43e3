//! Kubernetes' quantities.

use serde_json::Value;

const BINARY: [(&str, u32); 6] = [("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18), ("", 0)];

/// A quantity of a pod, rounded up to whole ones as Kubernetes does; `None` when it is none.
///
/// ```
/// use serde_json::json;
/// use shmesh_injector::bytes_of;
/// assert_eq!(bytes_of(&json!("1.5Gi")), Some(3 << 29));
/// assert_eq!(bytes_of(&json!("8388608k")), Some(8_388_608_000));
/// assert_eq!(bytes_of(&json!(4096)), Some(4096));
/// assert_eq!(bytes_of(&json!("a lot")), None);
/// ```
#[must_use]
pub fn bytes_of(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => whole(&number.to_string()),
        Value::String(text) => whole(text),
        _ => None,
    }
}

/// Digits, perhaps with a point, times what the suffix says. Too large for 64 bits is as large as 64 bits go.
fn whole(text: &str) -> Option<u64> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (digits, fraction) = number.split_once('.').unwrap_or((number, ""));
    // 18 digits after the point are more than anybody can mean.
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
    let value = match scaled {
        None => u128::MAX,
        Some(scaled) if power >= 0 => scaled.saturating_mul(ten),
        Some(scaled) => scaled.div_ceil(ten),
    };
    Some(u64::try_from(value).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn as_kubernetes_reads_them() {
        for (text, bytes) in [
            ("0", 0),
            ("100663296", 96 << 20),
            ("96Mi", 96 << 20),
            ("0.5Gi", 1 << 29),
            (".5Ki", 512),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("128974848000m", 128_974_848),
            ("1m", 1),
            ("2k", 2000),
            ("+1Ki", 1024),
            ("99Ei", u64::MAX),
        ] {
            assert_eq!(bytes_of(&json!(text)), Some(bytes), "{text}");
        }
        for wrong in ["", "Mi", "-1", "1 Mi", "64mi", "1.2.3", "1e", "1e+-3", "0x10", "1MiB", "1e99"] {
            assert_eq!(bytes_of(&json!(wrong)), None, "{wrong:?}");
        }
        assert_eq!(bytes_of(&json!({})), None);
    }
}
