//! The mark by which one domain owns the directory of claims: a file in it that names the domain and its state, and that
//! is locked while the plugin runs, by both instances of a rolling update. Another domain, or one with another checkpoint,
//! would remove the directories as unknown.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::config::Config;
use crate::pools;

/// File name of the mark.
const MARK: &str = ".shmesh-owner";
/// Longer marks were not written by this program.
const MAX_BYTES: u64 = 8192;

/// The right to create and remove directories of claims, until it is dropped.
#[derive(Debug)]
pub(crate) struct DirectoryOwner {
    /// The lock ends with the descriptor.
    mark: File,
}

impl DirectoryOwner {
    /// Creates the directory of claims if there is none, and marks it.
    pub(crate) fn claim(config: &Config) -> Result<Self> {
        let directory = &config.dra.directory;
        let text = format!(
            "domain {} with dra.stateDirectory {}",
            config.domain,
            config.state_directory().display()
        );
        Self::mark(&config.seen(directory), &text)
            .with_context(|| format!("cannot use dra.directory {}", directory.display()))
    }

    /// Whether the mark was deleted, alone or with the directory.
    pub(crate) fn is_lost(&self) -> bool {
        self.mark.metadata().is_ok_and(|found| found.nlink() == 0)
    }

    fn mark(directory: &Path, text: &str) -> Result<Self> {
        pools::prepare_parent("claims", directory)?;
        let path = directory.join(MARK);
        let named = || format!("cannot open the mark of its owner, {MARK}");
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let mut mark = options.open(&path).with_context(named)?;
        let is_locked = match mark.try_lock() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(error).with_context(named),
        };
        ensure!(
            mark.metadata()?.len() <= MAX_BYTES,
            "{MARK} in it was not written by this program: remove it"
        );
        let mut owner = String::new();
        mark.read_to_string(&mut owner).with_context(named)?;
        if is_locked && owner != text {
            bail!("the plugin of {owner} uses it now: stop that plugin, or choose another dra.directory");
        }
        if !owner.is_empty() && owner != text {
            bail!(
                "it belongs to {owner}, and this is {text}: choose another dra.directory, or delete the directory when no pod of its owner is on this node"
            );
        }
        if owner.is_empty() {
            mark.write_all(text.as_bytes()).with_context(named)?;
        }
        // Starts come one after the other, because only the owner of the domain gets here.
        mark.try_lock_shared().with_context(|| format!("cannot lock the mark of its owner, {MARK}"))?;
        Ok(Self { mark })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_belongs_to_one_domain_and_one_state() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
        let claims = dir.path().join("claims");
        let config = |domain: &str, state: &str| Config {
            domain: domain.into(),
            dra: crate::config::Dra {
                directory: claims.clone(),
                state_directory: Some(state.into()),
                ..Default::default()
            },
            ..Config::default()
        };
        let own = config("shmesh.io", "/state");
        let refused = |config: &Config| format!("{:#}", DirectoryOwner::claim(config).expect_err("refused"));
        let owner = DirectoryOwner::claim(&own).expect("it is free");
        let next = DirectoryOwner::claim(&own).expect("a rolling update has two instances");
        drop(owner);
        let said = refused(&config("other.io", "/state"));
        assert!(
            said.contains("the plugin of domain shmesh.io with dra.stateDirectory /state uses it now"),
            "{said}"
        );
        drop(next);
        for other in [config("other.io", "/state"), config("shmesh.io", "/elsewhere")] {
            let said = refused(&other);
            assert!(said.contains("it belongs to domain shmesh.io with dra.stateDirectory /state"), "{said}");
            assert!(said.contains("choose another dra.directory"), "{said}");
        }
        let owner = DirectoryOwner::claim(&own).expect("its own after a restart");
        assert!(!owner.is_lost());
        std::fs::remove_dir_all(&claims).expect("removed, as a person does");
        assert!(owner.is_lost());
        drop(owner);
        DirectoryOwner::claim(&config("other.io", "/state")).expect("it is free again");
    }
}
