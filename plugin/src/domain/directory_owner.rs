//! The mark by which one domain owns the directory of claims: a file in it that names the domain and its state, and that
//! is locked while the plugin runs, by both instances of a rolling update. Another domain, or one with another checkpoint,
//! would remove the directories as unknown.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use shmesh_sys::mountinfo;
use shmesh_sys::procfs::field;

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
    /// The directory that the mount with the mark shows, as a path in its file system.
    mounted: Option<String>,
}

/// Returns the directory that the mount of a file shows. The kernel knows its present name, also after it was moved below the mount.
fn mounted(file: &File) -> Option<String> {
    // Tests have threads with a mount namespace of their own. Elsewhere it is the namespace of the process.
    let info = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_raw_fd())).ok()?;
    let id: u64 = field(&info, "mnt_id")?.parse().ok()?;
    let mounts = mountinfo::parse(&fs::read_to_string("/proc/thread-self/mountinfo").ok()?);
    mounts.into_iter().find(|mount| mount.id == id).map(|mount| mount.root)
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

    /// Whether the directory has another name on the node than it had, although the mount shows it as before.
    pub(crate) fn is_moved(&self) -> bool {
        // The kernel's list can lack a mount while others come and go: then nothing is known.
        matches!((&self.mounted, mounted(&self.mark)), (Some(then), Some(now)) if *then != now)
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
        let mounted = mounted(&mark);
        Ok(Self { mark, mounted })
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
        fs::remove_dir_all(&claims).expect("removed, as a person does");
        assert!(owner.is_lost());
        drop(owner);
        DirectoryOwner::claim(&config("other.io", "/state")).expect("it is free again");
    }

    #[test]
    fn directory_that_is_moved_under_its_mount_is_noticed() {
        use nix::mount::{MsFlags, mount};
        use nix::sched::{CloneFlags, unshare};
        let dir = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
        let (claims, seen) = (dir.path().join("claims"), dir.path().join("seen"));
        fs::create_dir(&claims).expect("it is new");
        fs::create_dir(&seen).expect("it is new");
        // A thread has mounts of its own, as a container has, and the test's other threads have none of them.
        let owner = std::thread::scope(|scope| {
            let owner = scope.spawn(|| {
                if unshare(CloneFlags::CLONE_NEWNS).is_err() {
                    eprintln!("skipped: mounts require root");
                    return;
                }
                let (none, private) = (None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE);
                mount(none, "/", none, private, none).expect("mounts are private");
                mount(Some(&claims), &seen, none, MsFlags::MS_BIND, none).expect("it is mounted");
                let owner = DirectoryOwner::mark(&seen, "it").expect("it is free");
                assert!(!owner.is_moved());
                let away = dir.path().join("away");
                fs::rename(&claims, &away).expect("as a person does");
                assert!(owner.is_moved() && !owner.is_lost() && seen.join(MARK).exists());
                fs::rename(&away, &claims).expect("and back");
                assert!(!owner.is_moved());
                fs::remove_dir_all(&claims).expect("removed");
                assert!(owner.is_moved() && owner.is_lost());
            });
            owner.join()
        });
        owner.expect("it does not panic");
    }
}
