//! Directories, groups and CDI specifications of prepared claims.
//!
//! | call | steps, each of which may be the last before a crash |
//! |---|---|
//! | prepare | lease a group in the checkpoint; create the directory; write the CDI specification |
//! | release | mark the claim as released in the checkpoint; remove the CDI specification; rename the directory |
//! | erase | remove the renamed directory, which may have a million files |
//! | forget | remove the claim from the checkpoint, if nothing is left of it |
//! | open | after a reboot: rename every directory; otherwise complete interrupted operations, and rename directories that the checkpoint does not name |
//!
//! All but `erase` take milliseconds; `erase` does not use the store and may take long.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use shmesh_sys::file::{Locked, open_lock_file};
use thiserror::Error;
use tracing::{error, info, warn};

use super::checkpoint::{Checkpoint, CheckpointError, ClaimEntry};
use super::claim_plan::{ClaimGrant, accelerator_suffix, pool_suffix};
use crate::cdi::{ClaimDirectory, ClaimEdits, Device, SpecFiles};
use crate::config::{Bytes, UserNamespaces};
use crate::pools;
use crate::resource::Pool;

/// File name of the checkpoint.
const CHECKPOINT: &str = "claims.checkpoint";
/// File that is locked while one process works on the claims.
const CHECKPOINT_LOCK: &str = "claims.lock";
/// Longest wait for that lock. The other process holds it for milliseconds unless it is stopped, and the kubelet gives up a call
/// after 45 s.
pub(super) const LOCK_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 3000 });
/// Interval at which the lock is tried.
const LOCK_RETRY: Duration = Duration::from_millis(5);
/// File name of a damaged checkpoint, which is kept for inspection.
const DAMAGED: &str = "claims.damaged";
/// File name of a checkpoint of another version of the plugin, which is kept for inspection.
const OTHER_VERSION: &str = "claims.other-version";
/// More than the header of a checkpoint has.
const HEADER_BYTES: u64 = 64;
/// File name extension of directories that are being erased. Names of claims never begin with a dot.
const GONE: &str = "gone";

/// A step after which a test can make the driver crash.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum CrashPoint {
    Staged,
    Leased,
    DirectoryCreated,
    SpecWritten,
    Released,
    SpecRemoved,
    DirectoryMoved,
    DirectoryRemoved,
    Forgotten,
}

/// Where the claims of a node are.
#[derive(Clone, Debug)]
pub(crate) struct StoreSettings {
    /// Parent of the directories, as a path of the node.
    pub(crate) directory: PathBuf,
    /// The same directory, as mounted in this process.
    pub(crate) seen_directory: PathBuf,
    /// Directory of the checkpoint.
    pub(crate) state_directory: PathBuf,
    /// The groups that claims lease.
    pub(crate) gids: Range<u32>,
    pub(crate) files: SpecFiles,
    /// Directory of the identity service, as a path of the node.
    pub(crate) agent: PathBuf,
    /// The same directory, as mounted in this process.
    pub(crate) seen_agent: PathBuf,
    /// The current boot of the node.
    pub(crate) boot_id: String,
}

/// Why a claim is not prepared or released.
#[derive(Debug, Error)]
pub(crate) enum StoreError {
    /// The uid would not be a file name.
    #[error("{0:?} is not the uid of a claim")]
    Uid(String),
    /// All groups are leased.
    #[error(
        "all {} groups from {} on are leased to other claims of this node: raise dra.gids.count, or delete claims{}",
        .gids.len(), .gids.start, unerased(.released, .directory)
    )]
    GidsExhausted { gids: Range<u32>, released: usize, directory: PathBuf },
    /// The file system of the directories is full.
    #[error("{} has {free} bytes free, and the claim has {}: remove files, enlarge the tmpfs, or lower dra.budget", .directory.display(), Bytes(*.bytes))]
    TmpfsFull { directory: PathBuf, free: u64, bytes: u64 },
    /// The directory cannot be created.
    #[error("{0:#}")]
    Directory(anyhow::Error),
    /// The directory of all claims was deleted.
    #[error("{}", deleted(.0))]
    Deleted(PathBuf),
    /// The CDI specification cannot be written or removed.
    #[error("{0:#}")]
    Cdi(anyhow::Error),
    /// The checkpoint cannot be written.
    #[error("cannot write the checkpoint {}: {error}", .path.display())]
    Checkpoint { path: PathBuf, error: io::Error },
    /// Another process has the lock.
    #[error("{}: another instance of the driver has locked it for {LOCK_PATIENCE:?}; if this persists, delete the older pod of the plugin on this node", .0.display())]
    Locked(PathBuf),
    /// The lock cannot be taken.
    #[error("cannot lock {}: {error}", .path.display())]
    Lock { path: PathBuf, error: io::Error },
    /// The checkpoint was replaced, and cannot be read or is of another version.
    #[error("cannot read the checkpoint {} again, and nothing is changed: {error}; restart the newer pod of the plugin on this node, or delete the older one", .path.display())]
    Unreadable { path: PathBuf, error: CheckpointError },
    /// A test lets the driver crash here.
    #[cfg(test)]
    #[error("crashed at {0:?}")]
    Crashed(CrashPoint),
}

impl StoreError {
    /// Returns the reason as one word for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Uid(_) => "uid",
            Self::GidsExhausted { .. } => "gids_exhausted",
            Self::TmpfsFull { .. } => "tmpfs_full",
            Self::Directory(_) | Self::Deleted(_) => "directory",
            Self::Cdi(_) => "cdi",
            Self::Checkpoint { .. } | Self::Unreadable { .. } => "checkpoint",
            Self::Locked(_) | Self::Lock { .. } => "locked",
            #[cfg(test)]
            Self::Crashed(_) => "crashed",
        }
    }
}

/// Names the directories that keep groups of claims that have ended.
fn unerased(released: &usize, directory: &Path) -> String {
    if *released == 0 {
        return String::new();
    }
    let left = directory.join(format!(".*.{GONE}"));
    format!(
        "; {released} of them belong to released claims, whose files cannot be removed or are being removed: {}",
        left.display()
    )
}

/// Describes a directory of all claims that was deleted or moved, and the remedy.
pub(super) fn deleted(directory: &Path) -> String {
    let directory = directory.display();
    format!(
        "{directory} was deleted or moved on the node, with the files of the pods that have claims: move it back, or restart the pod of \
         the plugin, which makes it again, and then those pods"
    )
}

/// Whether a directory has no name any more, only a mount.
pub(super) fn is_deleted(directory: &Path) -> bool {
    directory.metadata().is_ok_and(|found| found.nlink() == 0)
}

/// Owns everything that prepared claims have on this node. In a rolling update two processes have it: each locks the checkpoint
/// before it works, and reads what the other has changed.
#[derive(Debug)]
pub(crate) struct ClaimStore {
    settings: StoreSettings,
    checkpoint: Checkpoint,
    /// The file from which `checkpoint` is, or to which it was written.
    file: Option<CheckpointId>,
    /// The step at which to crash, and the number of times that it is passed before.
    #[cfg(test)]
    pub(super) crash: Option<(CrashPoint, u32)>,
}

/// Returns the CDI devices of a claim: that of its directory, and one for each pool and kind of accelerator.
fn cdi_devices(
    uid: &str,
    grant: &ClaimGrant,
    directory: &Path,
    gid: u32,
    agent: Option<&Path>,
) -> Vec<Device> {
    let mut edits = Vec::new();
    if let Some(domain) = &grant.domain {
        let user_namespaces =
            if domain.has_user_namespaces { UserNamespaces::Always } else { UserNamespaces::Never };
        let mut env = vec![
            format!("SHMESH_CLAIM={}/{}", grant.namespace, grant.name),
            format!("SHMESH_BYTES={}", domain.bytes),
        ];
        if !grant.suffix.is_empty() {
            // If a container has several claims, the variables without a suffix describe the last one.
            env.push(format!("SHMESH_DIR_{}={}", grant.suffix, domain.mount_path.display()));
            env.push(format!("SHMESH_BYTES_{}={}", grant.suffix, domain.bytes));
        }
        edits.push(ClaimEdits {
            name: uid.to_owned(),
            env,
            directory: Some(ClaimDirectory {
                directory,
                mount_path: &domain.mount_path,
                gid,
                user_namespaces,
            }),
            agent,
        });
    }
    for pool in &grant.pools {
        let Pool { name, directory, mount_path, gid, user_namespaces } = pool;
        edits.push(ClaimEdits {
            name: format!("{uid}{}", pool_suffix(name)),
            env: vec![format!("SHMESH_POOL={name}")],
            directory: Some(ClaimDirectory {
                directory,
                mount_path,
                gid: *gid,
                user_namespaces: *user_namespaces,
            }),
            agent,
        });
    }
    for (kind, ids) in grant.accelerators() {
        if !ids.is_empty() {
            edits.push(ClaimEdits {
                name: format!("{uid}{}", accelerator_suffix(kind)),
                env: vec![format!("{}={}", kind.variable(), ids.join(","))],
                directory: None,
                agent,
            });
        }
    }
    edits.into_iter().map(Device::from).collect()
}

/// Whether a uid may be a file name and part of the name of a CDI device.
fn is_safe(uid: &str) -> bool {
    let is_word = |c: u8| c.is_ascii_alphanumeric() || c == b'-';
    uid.len() <= 64 && uid.bytes().all(is_word) && uid.bytes().next().is_some_and(|c| c != b'-')
}

/// Whether a name has the form of the API server's uids. Only such names are removed at the start.
fn is_uuid(name: &str) -> bool {
    let lengths = name.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && name.bytes().all(|c| c.is_ascii_hexdigit() || c == b'-')
}

/// Device, inode number, time of change and first bytes of a file. A file that is replaced within one tick of the
/// file system's clock may get the same inode number and time; the first bytes contain a checksum of the content.
type CheckpointId = (u64, u64, i64, i64, Vec<u8>);

fn checkpoint_id(path: &Path) -> Option<CheckpointId> {
    let file = fs::File::open(path).ok()?;
    let found = file.metadata().ok()?;
    let mut header = Vec::new();
    file.take(HEADER_BYTES).read_to_end(&mut header).ok()?;
    Some((found.dev(), found.ino(), found.ctime(), found.ctime_nsec(), header))
}

/// Keeps a checkpoint that cannot be used under another name, for inspection. A further unusable checkpoint replaces it.
fn keep_aside(path: &Path, unusable: &CheckpointError) -> anyhow::Result<()> {
    let is_other = matches!(unusable, CheckpointError::OtherVersion(_));
    let kept = path.with_file_name(if is_other { OTHER_VERSION } else { DAMAGED });
    match fs::remove_file(&kept) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::hard_link(path, &kept),
    }
    .with_context(|| {
        let (path, kept) = (path.display(), kept.display());
        format!("cannot keep the checkpoint {path}, which cannot be used ({unusable}), as {kept}")
    })?;
    let (checkpoint, kept) = (path.display(), kept.display());
    if is_other {
        error!(
            %checkpoint, found = %unusable, %kept,
            "another version of the plugin wrote the checkpoint of claims; claims are recovered from their directories, and their \
             pods are unaffected: if this version is not the wanted one, install the other one again; then delete the kept file"
        );
    } else {
        error!(
            %checkpoint, found = %unusable, %kept,
            "the checkpoint of claims is damaged; claims are recovered from their directories, and their pods are unaffected: find what wrote \
             into the file, and then delete the kept file"
        );
    }
    Ok(())
}

/// Waits until no other process works on the claims, but not longer than `until`.
fn lock_checkpoint(state: &Path, until: Instant) -> Result<Locked, StoreError> {
    let path = state.join(CHECKPOINT_LOCK);
    let failed = |error| StoreError::Lock { path: path.clone(), error };
    let file = open_lock_file(&path, 0o600).map_err(failed)?;
    Locked::lock_until(file, until, LOCK_RETRY).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => StoreError::Locked(path.clone()),
        _ => failed(error),
    })
}

impl ClaimStore {
    /// Reads the checkpoint and repairs what a crash or a reboot left.
    pub(crate) fn open(settings: StoreSettings) -> anyhow::Result<Self> {
        let state = &settings.state_directory;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(state)
            .with_context(|| format!("cannot create the directory of the checkpoint {}", state.display()))?;
        let _lock = lock_checkpoint(state, Instant::now() + LOCK_PATIENCE)?;
        let path = state.join(CHECKPOINT);
        let (checkpoint, is_known) = match Checkpoint::load(&path) {
            Ok(Some(checkpoint)) => (checkpoint, true),
            Ok(None) => (Checkpoint::default(), false),
            Err(CheckpointError::Io(error)) => {
                return Err(error).with_context(|| format!("cannot read the checkpoint {}", path.display()));
            }
            Err(damage) => {
                keep_aside(&path, &damage)?;
                (Checkpoint::default(), false)
            }
        };
        let mut store = Self {
            settings,
            checkpoint,
            file: None,
            #[cfg(test)]
            crash: None,
        };
        store.start(is_known)?;
        Ok(store)
    }

    /// Locks the checkpoint, and reloads it if another process has changed it.
    ///
    /// # Errors
    /// The lock is not free before `until`, or the checkpoint cannot be read: then nothing must be written either.
    pub(crate) fn enter(&mut self, until: Instant) -> Result<Locked, StoreError> {
        let lock = lock_checkpoint(&self.settings.state_directory, until)?;
        let path = self.settings.state_directory.join(CHECKPOINT);
        let file = checkpoint_id(&path);
        if file.is_none() || file != self.file {
            match Checkpoint::load(&path) {
                Ok(Some(read)) => (self.checkpoint, self.file) = (read, file),
                Ok(None) => self.recover()?,
                Err(damage @ CheckpointError::Damaged(_)) => {
                    keep_aside(&path, &damage).map_err(|error| {
                        let error = CheckpointError::Io(io::Error::other(format!("{error:#}")));
                        StoreError::Unreadable { path, error }
                    })?;
                    self.recover()?;
                }
                Err(error) => return Err(StoreError::Unreadable { path, error }),
            }
        }
        Ok(lock)
    }

    /// Replaces a checkpoint that was damaged or removed under this process: by what is on the node, which another instance may have
    /// changed, and where that does not tell, by what this process remembers.
    fn recover(&mut self) -> Result<(), StoreError> {
        let mut next = self.recovered()?;
        next.boot_id.clone_from(&self.settings.boot_id);
        let mut leased = next.leased();
        for (uid, known) in &self.checkpoint.claims {
            let mut lease_again = || known.gid.filter(|gid| leased.insert(*gid));
            if let Some(found) = next.claims.get_mut(uid) {
                // Another instance may have prepared it again since this one released it: a pod may run with it.
                found.gid = found.gid.or_else(lease_again);
                // For another allocation, it has other devices.
                let is_torn = self.settings.files.claim_devices(uid).is_err();
                let is_known = |grant: &ClaimGrant| is_torn || self.is_described(uid, grant, found.gid);
                let grant = known.grant.as_ref().filter(|grant| !known.is_released && is_known(grant));
                found.grant = grant.cloned();
            } else if !self.remaining_paths(uid)?.is_empty() {
                let left = ClaimEntry { gid: lease_again(), is_released: true, ..known.clone() };
                next.claims.insert(uid.clone(), left);
            }
        }
        self.save(next)
    }

    fn start(&mut self, is_known: bool) -> anyhow::Result<()> {
        if !is_known {
            self.checkpoint = self.recovered()?;
        } else if self.checkpoint.boot_id != self.settings.boot_id {
            let claims = self.checkpoint.claims.len();
            info!(claims, "the node was rebooted; the kubelet prepares its claims again");
            self.checkpoint.claims.clear();
        }
        self.checkpoint.boot_id.clone_from(&self.settings.boot_id);
        self.remove_unnamed()?;
        self.save(self.checkpoint.clone())?;
        for (uid, entry) in self.checkpoint.claims.clone() {
            let repaired = match (entry.is_released, entry.grant, entry.gid) {
                (true, ..) => self.remove_spec_and_rename(&uid),
                (false, Some(grant), gid) => self.create(&uid, &grant, gid),
                (false, None, _) => Ok(()),
            };
            if let Err(error) = repaired {
                // The kubelet asks again for claims of running pods.
                warn!(claim = uid, %error, "cannot restore the directory or the CDI specification of the claim");
            }
        }
        Ok(())
    }

    /// Finds the claims by what they left on the node, without losing what running pods have.
    fn recovered(&self) -> Result<Checkpoint, StoreError> {
        let mut checkpoint = Checkpoint::default();
        let recovered = |gid| ClaimEntry { gid, grant: None, is_released: false };
        for uid in self.described()? {
            checkpoint.claims.insert(uid, recovered(None));
        }
        let mut leased = BTreeSet::new();
        for uid in self.directories()? {
            let found = self.settings.seen_directory.join(&uid).symlink_metadata();
            // A crash may have been before the directory got its group.
            let gid = found.ok().map(|found| found.gid());
            let gid = gid.filter(|gid| self.settings.gids.contains(gid) && leased.insert(*gid));
            checkpoint.claims.insert(uid, recovered(gid));
        }
        if !checkpoint.claims.is_empty() {
            let claims = checkpoint.claims.len();
            warn!(
                claims,
                "claims were recovered without a checkpoint; the kubelet releases those without pods"
            );
        }
        Ok(checkpoint)
    }

    /// Uids of claims that have a specification.
    fn described(&self) -> Result<BTreeSet<String>, StoreError> {
        let claims = self.settings.files.claims().context("cannot list the CDI specifications of claims");
        claims.map_err(StoreError::Cdi)
    }

    /// Whether the CDI specification of a claim lists exactly the devices of the grant.
    fn is_described(&self, uid: &str, grant: &ClaimGrant, gid: Option<u32>) -> bool {
        self.settings.files.has_claim(uid, &self.devices(uid, grant, gid))
    }

    /// Entries of the directory of all claims, none if it does not exist.
    fn entries(&self) -> Result<Vec<fs::DirEntry>, StoreError> {
        let listed = match fs::read_dir(&self.settings.seen_directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.and_then(Iterator::collect),
        };
        let listed = listed.with_context(|| format!("cannot list {}", self.settings.directory.display()));
        listed.map_err(StoreError::Directory)
    }

    /// Names of directories that have the form of a uid. The driver creates no symbolic links and no files, so it leaves them alone.
    fn directories(&self) -> Result<Vec<String>, StoreError> {
        let entries = self.entries()?.into_iter();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|found| found.is_dir()));
        let names = directories.filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter(|name| is_uuid(name)).collect())
    }

    /// Removes specifications and directories of claims that the checkpoint does not name.
    fn remove_unnamed(&self) -> Result<(), StoreError> {
        for uid in self.described()? {
            if !self.checkpoint.claims.contains_key(&uid)
                && let Err(error) = self.settings.files.remove_claim(&uid)
            {
                warn!(
                    claim = uid,
                    error = format!("{error:#}"),
                    "cannot remove the CDI specification of a claim that is gone"
                );
            }
        }
        for uid in self.directories()? {
            if !self.checkpoint.claims.contains_key(&uid) {
                info!(claim = uid, "removing the directory of a claim that is gone");
                self.move_away(&uid);
            }
        }
        Ok(())
    }

    /// Renames the directory of a claim, so that it can be erased while the claim is prepared again.
    fn move_away(&self, uid: &str) {
        let parent = &self.settings.seen_directory;
        let directory = parent.join(uid);
        // The driver creates no symbolic links and no files here, so it leaves them alone.
        if !directory.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            return;
        }
        let free = (0_u32..).map(|number| parent.join(format!(".{uid}.{number}.{GONE}")));
        let Some(gone) = free.into_iter().find(|name| name.symlink_metadata().is_err()) else { return };
        if let Err(error) = fs::rename(&directory, &gone) {
            warn!(claim = uid, %error, "cannot rename the directory of a claim that is gone");
        }
    }

    /// Returns the remaining directories of a released claim.
    fn remaining_paths(&self, uid: &str) -> Result<Vec<PathBuf>, StoreError> {
        let prefix = format!(".{uid}.");
        let mut left: Vec<_> =
            self.renamed_directories()?.into_iter().filter(|name| name.starts_with(&prefix)).collect();
        if self.settings.seen_directory.join(uid).symlink_metadata().is_ok() {
            left.push(uid.to_owned());
        }
        Ok(left.into_iter().map(|name| self.settings.seen_directory.join(name)).collect())
    }

    /// Names of directories that are being erased.
    fn renamed_directories(&self) -> Result<Vec<String>, StoreError> {
        let names = self.entries()?.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
        let uid = |name: &str| {
            let (uid, number) =
                name.strip_prefix('.')?.strip_suffix(GONE)?.strip_suffix('.')?.split_once('.')?;
            number.parse::<u32>().is_ok().then(|| is_safe(uid))
        };
        Ok(names.filter(|name| uid(name) == Some(true)).collect())
    }

    /// Prepares a claim, or repairs what is missing of it.
    pub(crate) fn prepare(&mut self, uid: &str, grant: &ClaimGrant) -> Result<(), StoreError> {
        if !is_safe(uid) {
            return Err(StoreError::Uid(uid.chars().take(64).collect()));
        }
        let before = self.checkpoint.claims.get(uid);
        let gid = match (&grant.domain, before.and_then(|entry| entry.gid)) {
            (None, before) => before,
            (Some(_), Some(leased)) => Some(leased),
            (Some(domain), None) => {
                self.check_room(domain.bytes)?;
                let range = self.settings.gids.clone();
                let Some(free) = self.checkpoint.free_gid(range.clone()) else {
                    let released = self.checkpoint.claims.values();
                    let released = released.filter(|entry| entry.is_released && entry.gid.is_some()).count();
                    let directory = self.settings.directory.clone();
                    return Err(StoreError::GidsExhausted { gids: range, released, directory });
                };
                Some(free)
            }
        };
        let entry = ClaimEntry { gid, grant: Some(grant.clone()), is_released: false };
        if before != Some(&entry) {
            let mut next = self.checkpoint.clone();
            next.claims.insert(uid.to_owned(), entry);
            self.save(next)?;
        }
        self.pass(CrashPoint::Leased)?;
        self.create(uid, grant, gid)
    }

    /// Refuses a claim larger than the free space of the file system.
    fn check_room(&self, bytes: u64) -> Result<(), StoreError> {
        let directory = &self.settings.seen_directory;
        // The directory may not exist yet.
        let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(directory);
        let free = pools::free(existing).map_err(StoreError::Directory)?;
        if free < bytes {
            return Err(StoreError::TmpfsFull { directory: self.settings.directory.clone(), free, bytes });
        }
        Ok(())
    }

    /// Creates the directory and the specification, or corrects them.
    fn create(&mut self, uid: &str, grant: &ClaimGrant, gid: Option<u32>) -> Result<(), StoreError> {
        if let (Some(_), Some(gid)) = (&grant.domain, gid) {
            pools::prepare("claim", &self.settings.seen_directory.join(uid), gid, true).map_err(|error| {
                if is_deleted(&self.settings.seen_directory) {
                    StoreError::Deleted(self.settings.directory.clone())
                } else {
                    StoreError::Directory(error)
                }
            })?;
        }
        self.pass(CrashPoint::DirectoryCreated)?;
        let devices = self.devices(uid, grant, gid);
        self.settings.files.write_claim(uid, &devices).map_err(StoreError::Cdi)?;
        self.pass(CrashPoint::SpecWritten)
    }

    /// Returns the CDI devices of a claim.
    fn devices(&self, uid: &str, grant: &ClaimGrant, gid: Option<u32>) -> Vec<Device> {
        let directory = self.settings.directory.join(uid);
        // A mount of a directory that does not exist would keep containers from starting.
        let agent = self.settings.seen_agent.is_dir().then_some(self.settings.agent.as_path());
        cdi_devices(uid, grant, &directory, gid.unwrap_or_default(), agent)
    }

    /// Releases a claim. A claim that is not known is released already.
    ///
    /// Returns what is to be erased before the claim can be [forgotten](Self::forget). The claim is released even if files of
    /// its pods cannot be removed: they keep the group until they can be.
    pub(crate) fn release(&mut self, uid: &str) -> Result<Vec<PathBuf>, StoreError> {
        let Some(entry) = self.checkpoint.claims.get(uid) else { return Ok(Vec::new()) };
        if !entry.is_released {
            let mut next = self.checkpoint.clone();
            if let Some(entry) = next.claims.get_mut(uid) {
                entry.is_released = true;
            }
            self.save(next)?;
        }
        self.pass(CrashPoint::Released)?;
        self.remove_spec_and_rename(uid)?;
        self.remaining_paths(uid)
    }

    /// Removes the specification of a released claim, and moves its directory out of the way.
    fn remove_spec_and_rename(&mut self, uid: &str) -> Result<(), StoreError> {
        self.settings.files.remove_claim(uid).map_err(StoreError::Cdi)?;
        self.pass(CrashPoint::SpecRemoved)?;
        self.move_away(uid);
        self.pass(CrashPoint::DirectoryMoved)
    }

    /// Gives back the group of a claim, if it is still released and nothing is left of it.
    pub(crate) fn forget(&mut self, uid: &str) -> Result<(), StoreError> {
        self.pass(CrashPoint::DirectoryRemoved)?;
        let is_released = self.checkpoint.claims.get(uid).is_some_and(|entry| entry.is_released);
        if is_released && self.remaining_paths(uid)?.is_empty() {
            let mut next = self.checkpoint.clone();
            next.claims.remove(uid);
            self.save(next)?;
            self.pass(CrashPoint::Forgotten)?;
        }
        Ok(())
    }

    /// Returns the uids of released claims, and of unknown ones, of which something is left.
    pub(crate) fn released(&self) -> BTreeSet<String> {
        let released = self.checkpoint.claims.iter().filter(|(_, entry)| entry.is_released);
        let known = released.map(|(uid, _)| uid.clone());
        // What cannot be listed now is found the next time.
        let gone = self.renamed_directories().unwrap_or_default().into_iter();
        let left = gone.filter_map(|name| name.split('.').nth(1).map(str::to_owned));
        known.chain(left).collect()
    }

    /// Returns what to erase of a claim for [`released`](Self::released).
    pub(crate) fn paths_to_erase(&mut self, uid: &str) -> Result<Vec<PathBuf>, StoreError> {
        match self.checkpoint.claims.get(uid) {
            Some(entry) if entry.is_released => self.release(uid),
            // Prepared again, or unknown: only what was moved.
            _ => {
                let directory = self.settings.seen_directory.join(uid);
                Ok(self.remaining_paths(uid)?.into_iter().filter(|path| *path != directory).collect())
            }
        }
    }

    /// Returns the names of the pools that a claim has.
    pub(crate) fn pools_of(&self, uid: &str, entry: &ClaimEntry) -> anyhow::Result<Vec<String>> {
        if let Some(grant) = &entry.grant {
            return Ok(grant.pools.iter().map(|pool| pool.name.clone()).collect());
        }
        // Recovered without a checkpoint: containers have what the specification says.
        let devices = self.settings.files.claim_devices(uid)?;
        let prefix = format!("{uid}{}", pool_suffix(""));
        Ok(devices.iter().filter_map(|name| Some(name.strip_prefix(&prefix)?.to_owned())).collect())
    }

    /// Returns the claims that hold something on this node.
    pub(crate) fn claims(&self) -> impl Iterator<Item = (&str, &ClaimEntry)> {
        self.checkpoint.claims.iter().map(|(uid, entry)| (uid.as_str(), entry))
    }

    /// Replaces the checkpoint on disk, then the one in memory.
    fn save(&mut self, next: Checkpoint) -> Result<(), StoreError> {
        let path = self.settings.state_directory.join(CHECKPOINT);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| StoreError::Checkpoint { path, error }
        };
        next.stage(&path).map_err(failed(&path))?;
        self.pass(CrashPoint::Staged)?;
        Checkpoint::commit(&path).map_err(failed(&path))?;
        self.file = checkpoint_id(&path);
        self.checkpoint = next;
        Ok(())
    }

    #[cfg(not(test))]
    #[expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "tests let the driver crash here")]
    fn pass(&self, _: CrashPoint) -> Result<(), StoreError> {
        Ok(())
    }

    #[cfg(test)]
    fn pass(&mut self, step: CrashPoint) -> Result<(), StoreError> {
        match &mut self.crash {
            Some((at, 0)) if *at == step => Err(StoreError::Crashed(step)),
            Some((at, passed)) if *at == step => {
                *passed -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
