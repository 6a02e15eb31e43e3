//! Kubernetes quantities in the JSON of pods.

use serde_json::Value;
use shmesh_sys::quantity::{Bytes, QuantityError};

/// Parses a quantity, rounded up to an integer as in Kubernetes. Returns `None` if it is invalid.
#[must_use]
pub fn bytes_of(value: &Value) -> Option<u64> {
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        _ => return None,
    };
    match text.parse() {
        Ok(Bytes(bytes)) => Some(bytes),
        // Saturates at 64 bits.
        Err(QuantityError::TooLarge) => Some(u64::MAX),
        Err(QuantityError::Malformed) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantities_are_parsed() {
        for (value, bytes) in [
            (json!("0.5Gi"), Some(1 << 29)),
            (json!(1e3), Some(1000)),
            (json!(4096), Some(4096)),
            (json!("99Ei"), Some(u64::MAX)),
            (json!(1e19), Some(10_000_000_000_000_000_000)),
            (json!("1e99"), Some(u64::MAX)),
            (json!("1MiB"), None),
            (json!({}), None),
        ] {
            assert_eq!(bytes_of(&value), bytes, "{value}");
        }
        for (text, bytes) in shmesh_testing::LEGAL_QUANTITIES {
            assert_eq!(bytes_of(&json!(text)), Some(bytes), "{text}");
        }
    }
}
