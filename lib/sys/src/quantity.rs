//! Numbers of bytes as Kubernetes writes them, for configurations, command lines, environment variables and messages.
//!
//! [`Bytes`] is parsed without an allocation, so the preload library may do so in a program that is being loaded.

use std::fmt;
use std::iter;
use std::str::FromStr;

const BINARY: [(&str, u32); 6] = [("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
const DECIMAL: [(&str, i64); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18), ("", 0)];

/// A number of bytes, parsed from any Kubernetes quantity that is not negative: `64Mi`, `64M`, `1.5Gi`, `1e9`, `67108864`. Parsing
/// rounds up to whole bytes, as Kubernetes does.
///
/// It is displayed as a whole number of the largest binary unit that is exact, so each number has one text, which parses back.
/// [`rounded`](Self::rounded) is for people.
///
/// ```
/// use shmesh_sys::quantity::{Bytes, QuantityError};
/// assert_eq!("64M".parse(), Ok(Bytes(64_000_000)));
/// assert_eq!("1.5Gi".parse(), Ok(Bytes(1536 << 20)));
/// assert_eq!("64MB".parse::<Bytes>(), Err(QuantityError::Malformed));
/// assert_eq!(Bytes(1536 << 20).to_string(), "1536Mi");
/// ```
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Bytes(pub u64);

/// The reason why a text is not a number of bytes. Reads well behind "`text` is".
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum QuantityError {
    /// The text is not a Kubernetes quantity, or it is negative.
    Malformed,
    /// The number does not fit 64 bits.
    TooLarge,
}

impl QuantityError {
    /// The message of [`Display`](fmt::Display), without an allocation.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "not a number of bytes; write 64Mi, 64M or 67108864",
            Self::TooLarge => "more bytes than 64 bits can count; write a smaller number",
        }
    }
}

impl fmt::Display for QuantityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::error::Error for QuantityError {}

impl FromStr for Bytes {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let value = parse(text).ok_or(QuantityError::Malformed)?;
        u64::try_from(value).map(Self).map_err(|_| QuantityError::TooLarge)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_exact = |(_, shift): &&(&str, u32)| self.0 != 0 && self.0.trailing_zeros() >= *shift;
        match BINARY.iter().find(is_exact) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => self.0.fmt(f),
        }
    }
}

impl Bytes {
    /// Formats the number for people: in the largest binary unit that it fills, with at most two digits after the point. Rounds up,
    /// so a size that is set as a message asks is large enough.
    ///
    /// ```
    /// use shmesh_sys::quantity::Bytes;
    /// assert_eq!(Bytes(64 << 20).rounded(), "64Mi");
    /// assert_eq!(Bytes((1 << 30) + 1).rounded(), "1.01Gi");
    /// assert_eq!(Bytes(1000).rounded(), "1000");
    /// ```
    #[must_use]
    pub fn rounded(self) -> String {
        let Some((unit, shift)) = BINARY.iter().find(|(_, shift)| self.0 >> shift > 0) else {
            return self.0.to_string();
        };
        let hundredths = (u128::from(self.0) * 100).div_ceil(1 << shift);
        let (whole, rest) = (hundredths / 100, hundredths % 100);
        match rest {
            0 => format!("{whole}{unit}"),
            _ if rest % 10 == 0 => format!("{whole}.{}{unit}", rest / 10),
            _ => format!("{whole}.{rest:02}{unit}"),
        }
    }
}

/// The value of a quantity, rounded up, whatever its number of digits; at least `u64::MAX + 1` for one that does not fit 64 bits.
/// `None`: the text is not a quantity.
fn parse(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (digits, fraction) = number.split_once('.').unwrap_or((number, ""));
    let count = digits.len() + fraction.len();
    if count == 0 || fraction.contains('.') {
        return None;
    }
    let (shift, exponent) = if let Some((_, shift)) = BINARY.iter().find(|(unit, _)| *unit == suffix) {
        (*shift, 0)
    } else if let Some((_, exponent)) = DECIMAL.iter().find(|(unit, _)| *unit == suffix) {
        (0, *exponent)
    } else {
        (0, suffix.strip_prefix(['e', 'E'])?.parse().ok()?)
    };
    // An exponent moves the point among the digits, or beyond them.
    let point = i64::try_from(digits.len()).ok()?.saturating_add(exponent);
    let before = usize::try_from(point.max(0)).map_or(count, |point| point.min(count));
    let values = digits.bytes().chain(fraction.bytes()).map(|digit| u128::from(digit - b'0'));
    let mut whole = values
        .clone()
        .take(before)
        .fold(0, |whole: u128, digit| whole.saturating_mul(10).saturating_add(digit));
    let mut zeros = point.saturating_sub(i64::try_from(count).ok()?);
    while zeros > 0 && whole != 0 && whole != u128::MAX {
        (whole, zeros) = (whole.saturating_mul(10), zeros - 1);
    }
    // From the last digit to the point: a tenth of a tenth, rounded down each time, is a hundredth rounded down.
    let (mut part, mut is_exact) = (0, true);
    // After 20 zeros nothing is left of a digit.
    let zeros = usize::try_from(point.min(0).unsigned_abs().min(20)).ok()?;
    for digit in values.rev().take(count - before).chain(iter::repeat_n(0, zeros)) {
        let sum = (digit << shift) + part;
        (part, is_exact) = (sum / 10, is_exact && sum % 10 == 0);
    }
    Some(whole.saturating_mul(1 << shift).saturating_add(part + u128::from(!is_exact)))
}

#[cfg(feature = "serde")]
pub use schema::{PATTERN, deserialize};

/// Quantities in configurations and their JSON schemas.
#[cfg(feature = "serde")]
mod schema {
    use std::borrow::Cow;
    use std::fmt::Display;
    use std::str::FromStr;

    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::Bytes;

    /// Regular expression for non-negative Kubernetes quantities, for schemas.
    pub const PATTERN: &str = r"\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?";

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
    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        let text = match RawQuantity::deserialize(from)? {
            RawQuantity::Number(number) => number.to_string(),
            RawQuantity::Float(number) => number.to_string(),
            RawQuantity::Text(text) => text,
        };
        text.parse().map_err(|error| de::Error::custom(format_args!("{text:?} is {error}")))
    }

    impl<'de> Deserialize<'de> for Bytes {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            deserialize(from)
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
        fn numbers_and_strings_are_deserialized() {
            for json in ["1e9", "\"1G\"", "1000000000", "1000000000.0"] {
                assert_eq!(serde_json::from_str::<Bytes>(json).ok(), Some(Bytes(1_000_000_000)), "{json}");
            }
            let error = serde_json::from_str::<Bytes>("\"64MB\"").unwrap_err().to_string();
            assert_eq!(error, "\"64MB\" is not a number of bytes; write 64Mi, 64M or 67108864");
        }
    }
}

#[cfg(test)]
mod tests {
    use shmesh_testing::LEGAL_QUANTITIES;

    use super::*;

    #[test]
    fn legal_quantities_are_parsed_and_their_display_parses_back() {
        for (text, bytes) in LEGAL_QUANTITIES {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
            assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn any_number_of_digits_is_rounded_up() {
        let zeros = "0".repeat(100);
        for (text, bytes) in [
            (format!("{zeros}64"), 64),
            (format!("64.{zeros}"), 64),
            (format!("64.{zeros}1"), 65),
            (format!("1.{zeros}1Ei"), (1 << 60) + 1),
            (format!("1{zeros}e-100"), 1),
            (format!("0.{zeros}3e101"), 3),
            ("1e-99".to_owned(), 1),
            ("0e99".to_owned(), 0),
            ("0e-9223372036854775808".to_owned(), 0),
            ("1e-9223372036854775808".to_owned(), 1),
            ("15.999999999999999999Ei".to_owned(), u64::MAX),
            ("0.3333333333333333333333333333Ki".to_owned(), 342),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn display_is_the_largest_exact_unit() {
        let shown = [0, 1, 1025, 68 << 10, 64 << 20, 2048 << 20, 5 << 60, u64::MAX]
            .map(|bytes| Bytes(bytes).to_string());
        assert_eq!(shown, ["0", "1", "1025", "68Ki", "64Mi", "2Gi", "5Ei", "18446744073709551615"]);
    }

    #[test]
    fn invalid_quantities_are_rejected() {
        for wrong in [
            "",
            "Mi",
            "-1",
            "1 Mi",
            "64mi",
            "1.2.3",
            "1e",
            "1e+-3",
            "0x10",
            "1MiB",
            "64MB",
            " 1",
            "1٣",
            "1e9223372036854775808",
        ] {
            assert_eq!(wrong.parse::<Bytes>(), Err(QuantityError::Malformed), "{wrong:?}");
        }
        for large in [
            "99Ei",
            "18446744073709551616",
            "18446744073709551615Ki",
            "99999999999999999999",
            "1e20",
            "1e99",
            "1e2147483648",
            "0.00001e25",
            "18446744073709551615.1",
            "15.99999999999999999999999999Ei",
            "100000000000000000000000000000000000000000000000000",
        ] {
            assert_eq!(large.parse::<Bytes>(), Err(QuantityError::TooLarge), "{large:?}");
        }
    }
}
