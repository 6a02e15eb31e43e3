//! Shares of the node's memory.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shmesh_sys::quantity::{self, Bytes, PATTERN, QuantityError};

/// An amount of the node's memory: bytes, or a share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Budget {
    /// An absolute number of bytes.
    Bytes(Bytes),
    /// A percentage, written `50%`.
    Percent(u8),
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_suffix('%') {
            None => text.parse().map(Self::Bytes).map_err(|error: QuantityError| error.to_string()),
            Some(share) => match share.parse() {
                Ok(share @ 0..=100) => Ok(Self::Percent(share)),
                _ => Err("not a share of the node's memory; write 0% to 100%".to_owned()),
            },
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::Percent(share) => write!(f, "{share}%"),
        }
    }
}

impl Budget {
    /// Returns the number of bytes on a node with `node` bytes of memory.
    pub(crate) fn of(self, node: u64) -> u64 {
        match self {
            Self::Bytes(Bytes(bytes)) => bytes,
            Self::Percent(share) => u64::try_from(u128::from(node) * u128::from(share) / 100).unwrap_or(node),
        }
    }
}

impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        quantity::deserialize(from)
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl JsonSchema for Budget {
    fn schema_name() -> Cow<'static, str> {
        "Budget".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let pattern = format!("^({PATTERN}|[0-9]{{1,3}}%)$");
        json_schema!({ "type": ["string", "number"], "pattern": pattern, "minimum": 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legal_quantities_are_budgets() {
        for (text, bytes) in shmesh_testing::LEGAL_QUANTITIES {
            assert_eq!(text.parse(), Ok(Budget::Bytes(Bytes(bytes))), "{text}");
        }
    }

    #[test]
    fn invalid_shares_are_rejected() {
        for wrong in ["%", "101%", "-1%", "1.5%", "x%"] {
            assert!(wrong.parse::<Budget>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn share_is_relative_to_the_node() {
        assert_eq!("50%".parse::<Budget>().unwrap().of(1000), 500);
        assert_eq!("1Ki".parse::<Budget>().unwrap().of(1), 1024);
    }
}
