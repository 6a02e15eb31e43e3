//! The lock file of a link.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use shmesh_sys::file::{
    self, ByteLock, is_byte_locked, is_byte_locked_exclusively, locked_from, remove_exactly, try_lock_byte,
    try_lock_range, unlock_byte, unlock_range,
};
use shmesh_sys::fork::NotInherited;

/// Byte of the lock file that the process with the host role locks while it creates, serves or removes the link.
const HOST_ROLE: u32 = 0;
/// Byte of the lock file that all attached processes lock in shared mode.
const ATTACHED: u32 = 1;
/// First byte of the lock file for seats: the participant in seat 0 locks it; the bytes of the other seats follow.
const SEATS: u32 = 2;
/// Byte of the lock file that a process locks while it completes the removal of a link for a process that was stopped.
const COMPLETION: u32 = 66;
/// First byte of the lock file for sockets: a process locks the byte of each number that it uses for a socket.
const SOCKETS: u64 = 1 << 32;
/// Number of socket numbers: a user id, and a byte to distinguish the sockets of one user.
const SOCKETS_MAX: u64 = 1 << 40;
const SOCKETS_PER_USER: u64 = 1 << 8;

/// Device and inode of the file at a path, which tell it from another of the same name.
pub(crate) fn inode_of(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The kinds of hosts. The lock of a host begins at the number of its socket and reaches to the end of the range, so
/// only one process of each kind has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Host {
    /// A sidecar; preferred to a participant.
    Sidecar,
    /// A process that created the link.
    Participant,
}

impl Host {
    fn range(self) -> Range<u64> {
        let start = if self == Self::Sidecar { 1 << 48 } else { 1 << 49 };
        start..start + SOCKETS_MAX
    }
}

/// The lock file of a link. The kernel releases locks in it when their last descriptor is closed, whatever the reason
/// and the pid namespace. The locks are the host role, which one process has; the attachment lock, which all attached
/// processes share; one for each seat; and one for the number of each host's socket. A forked child has none of them. The module
/// [`removal`](crate::link::removal) says which of them keep the file.
#[derive(Debug)]
pub(crate) struct Lock {
    file: NotInherited,
    path: PathBuf,
    number: u64,
    /// The begin of the host's lock of this opening: the kernel reports only the locks of other openings.
    published: Mutex<Option<u64>>,
}

impl Lock {
    fn of(file: File, path: &Path) -> io::Result<Self> {
        let metadata = file.metadata()?;
        // Inodes of two file systems may be equal: a tmpfs counts its own from the start.
        let number = metadata.ino() ^ metadata.dev().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Self {
            file: NotInherited::new(file),
            path: path.to_path_buf(),
            number,
            published: Mutex::new(None),
        })
    }

    /// Opens the lock file. `None` if it does not exist.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        match file::open(path, true) {
            Ok(file) => Self::of(file, path).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the lock file only to query locks, which requires permission to read it.
    pub(crate) fn open_for_reading(path: &Path) -> io::Result<Self> {
        Self::of(file::open(path, false)?, path)
    }

    /// Opens the lock file, and creates it if it does not exist.
    pub(crate) fn open_or_make(path: &Path, mode: u32) -> io::Result<Option<Self>> {
        if let Some(lock) = Self::open(path)? {
            return Ok(Some(lock));
        }
        let file = file::unnamed(path.parent().unwrap_or(Path::new(".")), mode)?;
        match file::publish(&file, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::open(path),
            made => made.and_then(|()| Self::of(file, path)).map(Some),
        }
    }

    /// Whether the file still has its name: locks in a removed file mean nothing.
    pub(crate) fn is_named(&self) -> bool {
        self.is_at(&self.path)
    }

    /// Whether the file is the one at a path.
    fn is_at(&self, path: &Path) -> bool {
        self.file.metadata().is_ok_and(|ours| inode_of(path) == Some((ours.dev(), ours.ino())))
    }

    /// Takes the lock for creating, serving or removing the link. Returns `false` if another process has it.
    pub(crate) fn try_take_host_role(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, HOST_ROLE, ByteLock::Exclusive)
    }

    /// Gives the host role up.
    pub(crate) fn leave_host_role(&self) {
        unlock_byte(&self.file, HOST_ROLE);
    }

    /// Takes the attachment lock, because this process has the descriptors of the link or is about to ask for them.
    /// Returns `false` if the link is being removed.
    pub(crate) fn try_join(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, ATTACHED, ByteLock::Shared)
    }

    /// Releases the attachment lock.
    pub(crate) fn leave(&self) {
        unlock_byte(&self.file, ATTACHED);
    }

    /// Whether another process has the attachment lock.
    pub(crate) fn others_joined(&self) -> io::Result<bool> {
        is_byte_locked(&self.file, ATTACHED)
    }

    /// Whether another process is a host, or is about to become one: it may not have joined yet.
    pub(crate) fn others_host(&self) -> io::Result<bool> {
        Ok(locked_from(&self.file, &(SOCKETS..i64::MAX.cast_unsigned()))?.is_some())
    }

    /// Whether a lock that this process has taken counts: no process removes the link, and the file has its name. Must be
    /// called after the lock was taken.
    pub(crate) fn is_open(&self) -> io::Result<bool> {
        Ok(!self.is_closed()? && !is_byte_locked(&self.file, COMPLETION)? && self.is_named())
    }

    /// Takes the lock for completing the removal that a stopped process began. Returns `false` if another process has it.
    pub(crate) fn try_complete(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, COMPLETION, ByteLock::Exclusive)
    }

    /// Releases the lock for completing a removal.
    pub(crate) fn leave_completion(&self) {
        unlock_byte(&self.file, COMPLETION);
    }

    /// Whether another opening of the file has any lock: a participant's, a host's, or that of a process that creates or removes
    /// the link.
    pub(crate) fn is_used(&self) -> io::Result<bool> {
        Ok(locked_from(&self.file, &(0..i64::MAX.cast_unsigned()))?.is_some())
    }

    /// Releases all locks except those of seats, as closing the file would.
    pub(crate) fn release(&self) {
        self.leave();
        self.leave_host_role();
    }

    /// Identifies the lock file: locks in another one mean nothing here, even if it has the same name.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Takes the lock of a seat. Returns `false` if another process has it, such as a forked child of an earlier
    /// participant.
    pub(crate) fn try_take_seat(&self, seat: u8) -> io::Result<bool> {
        try_lock_byte(&self.file, SEATS + u32::from(seat), ByteLock::Exclusive)
    }

    /// Releases the lock of a seat.
    pub(crate) fn leave_seat(&self, seat: u8) {
        unlock_byte(&self.file, SEATS + u32::from(seat));
    }

    /// Whether another process, or another opening of the file in this one, has the lock of a seat.
    pub(crate) fn is_seat_taken(&self, seat: u8) -> io::Result<bool> {
        is_byte_locked(&self.file, SEATS + u32::from(seat))
    }

    /// Takes a number for a socket of `user`, exclusively until this opening is closed. `None` if all are taken.
    pub(crate) fn take_socket(&self, user: u32, from: u64) -> io::Result<Option<u64>> {
        for number in (from..SOCKETS_PER_USER).map(|k| u64::from(user) * SOCKETS_PER_USER + k) {
            if try_lock_range(&self.file, &(SOCKETS + number..SOCKETS + number + 1))? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Releases the number of a socket.
    pub(crate) fn leave_socket(&self, number: u64) {
        unlock_range(&self.file, &(SOCKETS + number..SOCKETS + number + 1));
    }

    /// Publishes the number of the host's socket, in one step. Returns `false` if another host of this kind has
    /// published one.
    pub(crate) fn try_publish(&self, host: Host, socket: u64) -> io::Result<bool> {
        let Range { start, end } = host.range();
        let is_ours = try_lock_range(&self.file, &(start + socket..end))?;
        if is_ours {
            *self.ours() = Some(start + socket);
        }
        Ok(is_ours)
    }

    fn ours(&self) -> MutexGuard<'_, Option<u64>> {
        // The kernel replaces a lock as a whole.
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Withdraws the published number. Returns `false` if this opening has not published one.
    pub(crate) fn withdraw(&self) -> bool {
        let was_published = self.ours().take().is_some();
        if was_published {
            for host in [Host::Sidecar, Host::Participant] {
                unlock_range(&self.file, &host.range());
            }
        }
        was_published
    }

    /// User, group and mode of the file, which decide who may use the link.
    pub(crate) fn owner(&self) -> io::Result<(u32, u32, u32)> {
        let metadata = self.file.metadata()?;
        Ok((metadata.uid(), metadata.gid(), metadata.mode()))
    }

    /// The number of the socket of this kind of host, if one is alive.
    pub(crate) fn published(&self, host: Host) -> io::Result<Option<u64>> {
        let range = host.range();
        let ours = self.ours().filter(|at| range.contains(at));
        let at = ours.map_or_else(|| locked_from(&self.file, &range), |at| Ok(Some(at)))?;
        Ok(at.map(|at| at.saturating_sub(range.start)))
    }

    /// The number of the host's socket.
    pub(crate) fn host(&self) -> io::Result<Option<(Host, u64)>> {
        for host in [Host::Sidecar, Host::Participant] {
            if let Some(number) = self.published(host)? {
                return Ok(Some((host, number)));
            }
        }
        Ok(None)
    }

    /// Removes the file, if it still has its name. A process that has it open notices by [`is_named`](Self::is_named).
    pub(crate) fn remove(&self) -> io::Result<bool> {
        remove_exactly(&self.path, |path| self.is_at(path))
    }

    /// Whether another process prevents joining because it removes the link.
    pub(crate) fn is_closed(&self) -> io::Result<bool> {
        is_byte_locked_exclusively(&self.file, ATTACHED)
    }

    /// Prevents further processes from joining. Returns `false` if another process has joined.
    pub(crate) fn try_close(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, ATTACHED, ByteLock::Exclusive)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn host_is_found_by_its_lock(path: &Path, b: &Lock) -> bool {
        let open = || Lock::open(path).unwrap().unwrap();
        let (a, sidecar) = (open(), open());
        let (first, second) = (a.take_socket(7, 0).unwrap(), b.take_socket(7, 0).unwrap());
        assert_eq!((first, second), (Some(7 << 8), Some((7 << 8) + 1)));
        assert_eq!(b.host().unwrap(), None);
        assert!(a.try_publish(Host::Participant, 7 << 8).unwrap());
        assert!(
            !b.try_publish(Host::Participant, 3).unwrap()
                && !b.try_publish(Host::Participant, 9 << 8).unwrap()
        );
        let found = Some((Host::Participant, 7 << 8));
        assert_eq!((a.host().unwrap(), b.host().unwrap()), (found, found), "its own, too");
        let most = (u64::from(u32::MAX) << 8) + 255;
        assert!(sidecar.try_publish(Host::Sidecar, most).unwrap());
        assert_eq!(b.host().unwrap(), Some((Host::Sidecar, most)));
        sidecar.withdraw();
        drop(a);
        b.host().unwrap().is_none() && b.take_socket(7, 0).unwrap() == Some(7 << 8)
    }

    #[test]
    fn one_process_is_host_and_all_share_the_attachment_lock() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("link.lock");
        assert!(Lock::open(&path).unwrap().is_none());
        let a = Lock::open_or_make(&path, 0o640).unwrap().unwrap();
        let b = Lock::open_or_make(&path, 0o600).unwrap().unwrap();
        assert_eq!(file::mode_of(&b.file).unwrap(), 0o640, "the first one's");

        assert!(
            a.try_take_host_role().unwrap()
                && a.try_take_host_role().unwrap()
                && !b.try_take_host_role().unwrap()
        );
        a.leave_host_role();
        assert!(b.try_take_host_role().unwrap());

        assert!(a.try_join().unwrap() && !a.others_joined().unwrap() && b.others_joined().unwrap());
        assert!(b.try_join().unwrap() && a.others_joined().unwrap() && !a.try_close().unwrap());
        b.leave();
        assert!(a.try_close().unwrap() && !b.try_join().unwrap() && b.others_joined().unwrap());
        assert!(a.try_take_seat(7).unwrap() && b.is_seat_taken(7).unwrap() && !b.try_take_seat(7).unwrap());
        assert!(!b.is_seat_taken(6).unwrap() && b.try_take_seat(6).unwrap());
        a.leave_seat(7);
        assert!(!b.is_seat_taken(7).unwrap() && a.try_take_seat(7).unwrap());
        drop(a);
        assert!(!b.is_seat_taken(7).unwrap(), "closing the file gives its locks up");
        assert!(b.try_join().unwrap(), "closing the file gives its locks up");

        assert!(host_is_found_by_its_lock(&path, &b));
        assert!(b.is_named());
        std::fs::remove_file(&path).unwrap();
        assert!(!b.is_named());
        let c = Lock::open_or_make(&path, 0o600).unwrap().unwrap();
        assert!(!b.is_named() && c.is_named() && c.try_take_host_role().unwrap());
    }
}
