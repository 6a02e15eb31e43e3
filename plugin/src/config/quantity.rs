//! Bytes, and shares of the node's memory.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

const UNITS: [(&str, u32); 5] = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10), ("", 0)];

/// A number of bytes: `64Mi`, `1Gi`, or a plain number.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Bytes(pub(crate) u64);

/// How much of the node's memory: bytes, or a share of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Budget {
    /// So much.
    Bytes(Bytes),
    /// `50%`: so many hundredths.
    Percent(u8),
}

/// In the largest unit that is exact: no two numbers have one text.
pub(crate) fn exact(bytes: u64) -> String {
    let fits = |&(_, shift): &(&str, u32)| bytes != 0 && bytes.trailing_zeros() >= shift;
    let (suffix, shift) = UNITS.into_iter().find(|unit| fits(unit)).unwrap_or(("", 0));
    format!("{}{suffix}", bytes >> shift)
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (suffix, shift) = UNITS.into_iter().find(|(suffix, _)| text.ends_with(suffix)).unwrap_or(("", 0));
        let digits = text.strip_suffix(suffix).unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.parse::<u64>().ok().filter(|_| is_number);
        let number =
            number.ok_or_else(|| format!("{text:?} is no number of bytes; write 64Mi or 67108864"))?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(|| format!("{text:?} is more than 64 bits can count"))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&exact(self.0))
    }
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_suffix('%') {
            None => text.parse().map(Self::Bytes),
            Some(share) => match share.parse() {
                Ok(share @ 0..=100) => Ok(Self::Percent(share)),
                _ => Err(format!("{text:?} is no share; write 0% to 100%")),
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
    /// In bytes, on a node with so much memory.
    pub(crate) fn of(self, node: u64) -> u64 {
        match self {
            Self::Bytes(Bytes(bytes)) => bytes,
            Self::Percent(share) => u64::try_from(u128::from(node) * u128::from(share) / 100).unwrap_or(node),
        }
    }
}

/// Text or a number, as people write it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(String),
}

fn parsed<'de, T: FromStr<Err = String>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    let text = match Written::deserialize(from)? {
        Written::Number(number) => number.to_string(),
        Written::Text(text) => text,
    };
    text.parse().map_err(de::Error::custom)
}

macro_rules! quantity {
    ($name:ident, $title:literal, $pattern:literal) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                parsed(from)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                $title.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": ["string", "integer"], "pattern": $pattern, "minimum": 0 })
            }
        }
    };
}

quantity!(Bytes, "Bytes", "^[0-9]+(Ki|Mi|Gi|Ti)?$");
quantity!(Budget, "Budget", "^([0-9]+(Ki|Mi|Gi|Ti)?|[0-9]{1,3}%)$");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_read_again() {
        for (text, bytes) in
            [("0", 0), ("1", 1), ("1025", 1025), ("68Ki", 68 << 10), ("64Mi", 64 << 20), ("3Ti", 3 << 40)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)));
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(exact(128 << 20), "128Mi");
        assert_eq!(exact(1024 << 20), "1Gi");
        assert_eq!("2048Mi".parse::<Bytes>().unwrap().to_string(), "2Gi");
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for wrong in [
            "",
            "Mi",
            "-1",
            "+1",
            "1.5Gi",
            "64M",
            "64mi",
            " 1",
            "18446744073709551615Ki",
            "99999999999999999999",
        ] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong:?}");
        }
        for wrong in ["%", "101%", "-1%", "1.5%", "x%"] {
            assert!(wrong.parse::<Budget>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn shares_are_of_the_node() {
        assert_eq!("50%".parse::<Budget>().unwrap().of(1000), 500);
        assert_eq!("1Ki".parse::<Budget>().unwrap().of(1), 1024);
    }
}
