//! The prepared claims on disk: one line with version and checksum, one line of JSON. The file is replaced as a whole, so that a
//! process that is killed leaves the old one or the new one.
//!
//! Nothing is synchronised with the disk, which takes longer than all of Prepare. Only a failure of the node could lose what the
//! kernel has, and after it there is another boot, in which the content is void: the directories were in memory, and the kubelet
//! prepares the claims of its pods again. An older content has an older boot id, and a torn one is
//! [damaged](CheckpointError::Damaged).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::claim_plan::ClaimGrant;

/// First word of the file.
const MAGIC: &str = "shmesh-claims";
/// Version of the format.
const VERSION: &str = "1";
/// Larger files are damaged: 256 claims take less than 1 MiB.
const MAX_BYTES: u64 = 64 << 20;

/// One claim that holds something on this node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ClaimEntry {
    /// Group of the claim's directory, leased until the directory is gone.
    pub(crate) gid: Option<u32>,
    /// The grant to containers; `None` if the entry was recovered from the files on disk.
    pub(crate) grant: Option<ClaimGrant>,
    /// Whether the kubelet released the claim. What is left of it is being removed.
    pub(crate) is_released: bool,
}

/// All claims of one boot of the node.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Checkpoint {
    /// The boot in which the claims were prepared.
    pub(crate) boot_id: String,
    /// The claims by uid.
    pub(crate) claims: BTreeMap<String, ClaimEntry>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, Error)]
pub(crate) enum CheckpointError {
    /// The file cannot be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Another version of the program wrote it.
    #[error("it has version {0}, and this program reads {VERSION}")]
    OtherVersion(String),
    /// The content is not what was written.
    #[error("it is damaged: {0}")]
    Damaged(String),
}

/// FNV-1a with 64 bits, against torn and edited files.
fn checksum(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Checkpoint {
    /// Reads the file; `None` if there is no file.
    pub(crate) fn load(path: &Path) -> Result<Option<Self>, CheckpointError> {
        let damaged = |what: &str| CheckpointError::Damaged(what.to_owned());
        let bytes = match fs::metadata(path).map(|found| found.len()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Ok(bytes) if bytes > MAX_BYTES => return Err(damaged("it is too large")),
            Ok(_) => fs::read(path)?,
            Err(error) => return Err(error.into()),
        };
        let text = String::from_utf8(bytes).map_err(|_| damaged("it is not UTF-8"))?;
        let (header, body) = text.split_once('\n').ok_or_else(|| damaged("it has no header"))?;
        let words: Vec<_> = header.split(' ').collect();
        let [MAGIC, version, sum] = words[..] else { return Err(damaged("its header is not ours")) };
        if version != VERSION {
            return Err(CheckpointError::OtherVersion(version.to_owned()));
        }
        if sum != format!("{:016x}", checksum(body)) {
            return Err(damaged("its checksum does not match"));
        }
        let read: Self = serde_json::from_str(body).map_err(|error| damaged(&error.to_string()))?;
        Ok(Some(read))
    }

    /// Returns what the file contains.
    fn text(&self) -> io::Result<String> {
        let body = serde_json::to_string(self)?;
        Ok(format!("{MAGIC} {VERSION} {:016x}\n{body}", checksum(&body)))
    }

    /// Writes the new content beside the file, where nothing reads it.
    pub(crate) fn stage(&self, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path.with_extension("new"))?;
        file.write_all(self.text()?.as_bytes())
    }

    /// Replaces the file by what was staged.
    pub(crate) fn commit(path: &Path) -> io::Result<()> {
        fs::rename(path.with_extension("new"), path)
    }

    /// Returns the groups that claims have.
    pub(crate) fn leased(&self) -> BTreeSet<u32> {
        self.claims.values().filter_map(|entry| entry.gid).collect()
    }

    /// Returns the lowest group of the range that no claim has.
    pub(crate) fn free_gid(&self, range: std::ops::Range<u32>) -> Option<u32> {
        let leased = self.leased();
        range.into_iter().find(|gid| !leased.contains(gid))
    }
}
