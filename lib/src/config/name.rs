//! The name of a link.

use std::fmt;
use std::str::FromStr;

use super::show::shown;

/// Longest link name in bytes: NVIPC's `prefix` field holds 32 with its NUL.
pub const MAX_LINK_NAME_BYTES: usize = 31;

/// The name of a link: 1 to 31 ASCII letters, digits, `_`, `.` or `-`, and no `.` at the start.
///
/// The name becomes the first part of file names (`<link>_shm`) in a directory that other pods may share, so
/// the alphabet has neither slash nor NUL, and a name cannot be `..` or begin with a dot.
///
/// ```
/// use shmesh::config::LinkName;
///
/// let name: LinkName = "fronthaul-0".parse()?;
/// assert_eq!(name.as_str(), "fronthaul-0");
/// assert!("../etc".parse::<LinkName>().is_err());
/// # Ok::<(), shmesh::config::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkName(String);

impl LinkName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for LinkName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for LinkName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::try_from(text.to_owned())
    }
}

impl TryFrom<&str> for LinkName {
    type Error = NameError;

    fn try_from(text: &str) -> Result<Self, NameError> {
        text.parse()
    }
}

impl TryFrom<String> for LinkName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.len() > MAX_LINK_NAME_BYTES {
            return Err(NameError::TooLong { len: text.len(), name: shown(&text) });
        }
        if text.starts_with('.') {
            return Err(NameError::LeadingDot { name: shown(&text) });
        }
        let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-".contains(byte);
        match text.bytes().enumerate().find(|(_, byte)| !allowed(byte)) {
            Some((at, byte)) => Err(NameError::BadByte { name: shown(&text), byte, at }),
            None => Ok(Self(text)),
        }
    }
}

/// Why a text is not a [`LinkName`].
///
/// The names in it are escaped and shortened, so they can be printed.
///
/// ```
/// use shmesh::config::{LinkName, NameError};
/// let refused = "front/haul".parse::<LinkName>().unwrap_err();
/// assert_eq!(refused, NameError::BadByte { name: "\"front/haul\"".into(), byte: b'/', at: 5 });
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error(
        "a link name must not be empty; give 1 to {MAX_LINK_NAME_BYTES} letters, digits, '_', '.' or '-'"
    )]
    Empty,
    /// More than [`MAX_LINK_NAME_BYTES`] bytes.
    #[error("link name {name} has {len} bytes, the limit is {MAX_LINK_NAME_BYTES}; shorten it")]
    TooLong {
        /// The rejected text, quoted.
        name: String,
        /// Its length in bytes.
        len: usize,
    },
    /// A byte outside `[A-Za-z0-9_.-]`.
    #[error(
        "link name {name} has byte 0x{byte:02x} at position {at}; use only ASCII letters, digits, '_', '.' and '-'"
    )]
    BadByte {
        /// The rejected text, quoted.
        name: String,
        /// The first byte that is not allowed.
        byte: u8,
        /// Its position, from 0.
        at: usize,
    },
    /// The first character is a dot, which would make a hidden file or a parent directory.
    #[error("link name {name} starts with '.'; start it with a letter, a digit, '_' or '-'")]
    LeadingDot {
        /// The rejected text, quoted.
        name: String,
    },
}
