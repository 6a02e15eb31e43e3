//! Reading YAML with positions: single values, and maps that may hold unknown keys.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::error::{ConfigError, Position};
use super::link::{LinkConfig, PoolPlaces};
use super::pool::PoolId;
use super::show::shown;
use shmesh_sys::quantity::{Bytes, QuantityError};

impl Position {
    /// Where a value is written; for an alias, where the anchored value is.
    pub(super) fn of<T>(value: &Spanned<T>) -> Self {
        Self::at(value.defined.line(), value.defined.column())
    }
}

/// One value as the file writes it, so that an error about its type can show it.
#[derive(Debug)]
pub(super) enum Leaf {
    Int(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Null,
    List,
    /// Not a leaf. Its keys are kept to report those that are ignored.
    Map(Vec<Spanned<String>>),
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            // Debug keeps the point or exponent that makes it no whole number: 8192.0, 1e23.
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Text(text) => f.write_str(&shown(text)),
            Self::Null => f.write_str("nothing"),
            Self::List => f.write_str("a list"),
            Self::Map(_) => f.write_str("a map"),
        }
    }
}

impl<'de> Deserialize<'de> for Leaf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LeafVisitor)
    }
}

struct LeafVisitor;

impl<'de> Visitor<'de> for LeafVisitor {
    type Value = Leaf;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_i64<E>(self, value: i64) -> Result<Leaf, E> {
        Ok(Leaf::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Leaf, E> {
        Ok(Leaf::Int(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Leaf, E> {
        Ok(Leaf::Float(value))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Leaf, E> {
        Ok(Leaf::Bool(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Leaf, E> {
        Ok(Leaf::Text(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Leaf, E> {
        Ok(Leaf::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Leaf, A::Error> {
        while let Some(IgnoredAny) = seq.next_element()? {}
        Ok(Leaf::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Leaf, A::Error> {
        let mut keys = Vec::new();
        while let Some((key, IgnoredAny)) = map.next_entry()? {
            keys.push(key);
        }
        Ok(Leaf::Map(keys))
    }
}

const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;

/// A value that may be left out. An explicit null is not the same: it goes to `T` and is refused like a wrong
/// type.
#[derive(Debug, Clone)]
pub(super) struct SpannedOption<T>(pub(super) Option<Spanned<T>>);

impl<T> Default for SpannedOption<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for SpannedOption<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Spanned::deserialize(deserializer).map(|value| Self(Some(value)))
    }
}

impl SpannedOption<Leaf> {
    /// Returns the value as a whole number from 0 up, with its place.
    pub(super) fn whole(&self, field: impl fmt::Display) -> Result<Option<(u64, Position)>, ConfigError> {
        let Some(given) = &self.0 else { return Ok(None) };
        let place = Position::of(given);
        match &given.value {
            Leaf::Int(value) => match u64::try_from(*value) {
                Ok(value) => Ok(Some((value, place))),
                Err(_) => Err(ConfigError::Negative { field: field.to_string(), value: *value, place }),
            },
            // The parser gives integers beyond 64 bits as floats.
            Leaf::Float(value) if value.abs() >= TWO_TO_63 => {
                let found = given.value.to_string();
                Err(ConfigError::NumberTooLarge { field: field.to_string(), found, place })
            }
            other => Err(wrong_type(field, "a whole number without quotes or leading zeros", other, place)),
        }
    }

    /// Returns the value as a number of bytes, with its place: a whole number, or a quantity as Kubernetes writes it.
    pub(super) fn bytes(&self, field: impl fmt::Display) -> Result<Option<(u64, Position)>, ConfigError> {
        let Some(given) = &self.0 else { return Ok(None) };
        let text = match &given.value {
            Leaf::Text(text) => text.as_str(),
            // Without quotes the parser makes 10 of 010, which is 8 for other readers; so these are refused.
            Leaf::Float(value) if value.abs() < TWO_TO_63 => "",
            _ => return self.whole(field),
        };
        let place = Position::of(given);
        match text.parse() {
            Ok(Bytes(value)) => Ok(Some((value, place))),
            Err(QuantityError::TooLarge) => {
                let found = text.to_owned();
                Err(ConfigError::NumberTooLarge { field: field.to_string(), found, place })
            }
            Err(QuantityError::Malformed) => {
                let expected = "a number of bytes such as 65536, 64Ki or 64k; put it in quotes if it has a point or an exponent";
                Err(wrong_type(field, expected, &given.value, place))
            }
        }
    }

    /// Stores the value as a boolean, if it was given.
    pub(super) fn flag_into(&self, field: impl fmt::Display, target: &mut bool) -> Result<(), ConfigError> {
        match self.0.as_ref().map(|given| (&given.value, Position::of(given))) {
            None => Ok(()),
            Some((Leaf::Bool(value), _)) => {
                *target = *value;
                Ok(())
            }
            Some((other, place)) => Err(wrong_type(field, "true or false", other, place)),
        }
    }

    /// Stores the value that the word stands for, if one was given, and returns its place.
    pub(super) fn word_into<T: Copy>(
        &self,
        field: &str,
        expected: &'static str,
        words: &[(&str, T)],
        target: &mut T,
    ) -> Result<Option<Position>, ConfigError> {
        let Some(given) = &self.0 else { return Ok(None) };
        let place = Position::of(given);
        let found = match &given.value {
            Leaf::Text(text) => words.iter().find(|(word, _)| word == text),
            _ => None,
        };
        let (_, value) = found.ok_or_else(|| wrong_type(field, expected, &given.value, place))?;
        *target = *value;
        Ok(Some(place))
    }
}

fn wrong_type(
    field: impl fmt::Display,
    expected: &'static str,
    found: &Leaf,
    place: Position,
) -> ConfigError {
    ConfigError::WrongType { field: field.to_string(), expected, found: found.to_string(), place }
}

/// The two numbers of a pool, as both forms write them.
#[derive(Debug, Default)]
pub(super) struct PoolLeaves {
    pub(super) buf_size: SpannedOption<Leaf>,
    pub(super) pool_len: SpannedOption<Leaf>,
}

impl PoolLeaves {
    /// Replaces the link's defaults by the numbers that are given. `field` is the pool's path, for messages.
    pub(super) fn overlay(
        &self,
        (field, size_key): (&str, &str),
        pool: PoolId,
        link: &mut LinkConfig,
        places: &mut PoolPlaces,
    ) -> Result<(), ConfigError> {
        let size = &mut link.pools[pool.index()];
        let name = format_args!("{field}.{pool}.{size_key}");
        // NVIPC reads whole numbers alone, and its files are read as it reads them.
        let given =
            if size_key == "buf_size" { self.buf_size.whole(name) } else { self.buf_size.bytes(name) };
        if let Some((value, place)) = given? {
            places.buf_size = place;
            size.buf_size_bytes = u32::try_from(value).map_err(|_| {
                let link = link.name.clone();
                ConfigError::BufSizeTooLarge { link, pool, value, place }
            })?;
        }
        if let Some((value, place)) = self.pool_len.whole(format_args!("{field}.{pool}.pool_len"))? {
            places.pool_len = place;
            size.pool_len = u32::try_from(value).map_err(|_| {
                let link = link.name.clone();
                ConfigError::PoolLenTooLarge { link, pool, value, place }
            })?;
        }
        Ok(())
    }
}

/// A map of which only some keys have a meaning.
pub(super) trait KnownKeys<'de>: Default {
    /// Reads the value of `key` if the key is known, else leaves the value unread and returns `false`.
    fn read<A: MapAccess<'de>>(&mut self, key: &Spanned<String>, map: &mut A) -> Result<bool, A::Error>;
}

/// A map whose unknown keys are kept with their places instead of refused.
///
/// serde's own way, `flatten`, loses every position.
#[derive(Debug, Default)]
pub(super) struct OpenMap<T> {
    pub(super) known: T,
    pub(super) unknown: Vec<Spanned<String>>,
}

impl<'de, T: KnownKeys<'de>> Deserialize<'de> for OpenMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OpenVisitor(PhantomData))
    }
}

pub(super) struct OpenVisitor<T>(pub(super) PhantomData<T>);

impl<'de, T: KnownKeys<'de>> Visitor<'de> for OpenVisitor<T> {
    type Value = OpenMap<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OpenMap<T>, A::Error> {
        let mut open = OpenMap { known: T::default(), unknown: Vec::new() };
        let mut seen = BTreeSet::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            if !open.known.read(&key, &mut map)? {
                map.next_value::<IgnoredAny>()?;
                open.unknown.push(key);
            } else if !seen.insert(key.value.clone()) {
                // Reached only if the parser accepts duplicate keys.
                return Err(serde::de::Error::custom(format_args!("duplicate key {}", shown(&key.value))));
            }
        }
        Ok(open)
    }
}
