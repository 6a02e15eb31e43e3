//! The layout of a link: shmesh's or NVIPC's.

use crate::backend::Failure;

/// `nvipc` or `shmesh`. Takes precedence over a configuration file.
const LAYOUT_VARIABLE: &str = "SHMESH_NVIPC_LAYOUT";

/// The layout of shared memory, or the format of datagrams.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum NvipcLayout {
    /// The layout of shmesh.
    #[default]
    Shmesh,
    /// The layout of NVIPC, for an unmodified peer.
    Nvipc,
}

impl NvipcLayout {
    pub(crate) fn of(name: &str) -> Option<Self> {
        match name {
            "shmesh" => Some(Self::Shmesh),
            "nvipc" => Some(Self::Nvipc),
            _ => None,
        }
    }

    /// The layout named by the environment, else by the file, else shmesh's.
    pub(crate) fn chosen(of_file: Option<Self>) -> Result<Self, Failure> {
        match std::env::var(LAYOUT_VARIABLE) {
            Ok(name) if !name.is_empty() => Self::of(&name).ok_or_else(|| {
                Failure::Refused(format!("{LAYOUT_VARIABLE} is {name:?}; set it to nvipc or shmesh"))
            }),
            _ => Ok(of_file.unwrap_or_default()),
        }
    }
}
