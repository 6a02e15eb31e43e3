//! Numbers of bytes in configurations of daemons, and in their schemas.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use shmesh::config::{exact_bytes, parse_bytes};

/// Regular expression for non-negative Kubernetes quantities, for schemas.
pub const PATTERN: &str = r"\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?";

/// A number of bytes, parsed from any Kubernetes quantity: `64Mi`, `64M`, `1.5Gi`, or a plain number.
/// Displayed in the largest binary unit that is exact, so each number has one text.
///
/// ```
/// use shmesh_daemon::bytes::Bytes;
/// assert_eq!("64Mi".parse(), Ok(Bytes(64 << 20)));
/// assert_eq!(Bytes(1536 << 20).to_string(), "1536Mi");
/// assert_eq!("64M".parse(), Ok(Bytes(64_000_000)));
/// ```
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_bytes(text).map(Self).map_err(|error| error.to_string())
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&exact_bytes(self.0))
    }
}

/// A quantity as a string or a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawQuantity {
    Number(u64),
    /// A number such as `1e9`, which YAML parses as a float.
    Float(f64),
    Text(String),
}

/// Deserializes a value from a string or a plain number.
///
/// # Errors
/// The text cannot be parsed as `T`.
pub fn deserialize_quantity<'de, T: FromStr<Err = String>, D: Deserializer<'de>>(
    from: D,
) -> Result<T, D::Error> {
    let text = match RawQuantity::deserialize(from)? {
        RawQuantity::Number(number) => number.to_string(),
        RawQuantity::Float(number) => number.to_string(),
        RawQuantity::Text(text) => text,
    };
    text.parse().map_err(de::Error::custom)
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        deserialize_quantity(from)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["string", "number"], "pattern": format!("^{PATTERN}$"), "minimum": 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_parse_round_trip() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("1025", 1025),
            ("68Ki", 68 << 10),
            ("64Mi", 64 << 20),
            ("3Ti", 3 << 40),
            ("5Ei", 5 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)));
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!("1.5Gi".parse(), Ok(Bytes(3 << 29)));
        for deserialize_quantity in ["1e9", "\"1G\"", "1000000000", "1000000000.0"] {
            assert_eq!(
                serde_json::from_str::<Bytes>(deserialize_quantity).ok(),
                Some(Bytes(1_000_000_000)),
                "{deserialize_quantity}"
            );
        }
        assert_eq!("2048Mi".parse::<Bytes>().map(|bytes| bytes.to_string()), Ok("2Gi".into()));
    }

    #[test]
    fn invalid_quantities_are_rejected() {
        for wrong in ["", "Mi", "-1", "64MB", "64mi", " 1", "18446744073709551615Ki", "99999999999999999999"]
        {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong:?}");
        }
    }
}
