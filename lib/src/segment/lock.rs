//! The lock file of a link.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use shmesh_sys::file::{self, ByteLock, is_byte_locked, try_lock_byte, unlock_byte};
use shmesh_sys::fork::NotInherited;

/// Byte of the lock file that whoever creates, serves or removes the link has for itself.
const DUTY: u32 = 0;
/// Byte of the lock file that all processes of the link share.
const PRESENCE: u32 = 1;
/// Byte of the lock file that whoever sits in seat 0 has for itself; the other seats' bytes follow.
const SEATS: u32 = 2;

/// The lock file of a link, with locks in it that the kernel gives up when their last descriptor is closed, however that
/// happens and in whatever pid namespace: the duty, which one has, the presence, which all share, and one for each seat. A
/// forked child has none of them.
#[derive(Debug)]
pub(crate) struct Lock {
    file: NotInherited,
    path: PathBuf,
    number: u64,
}

impl Lock {
    fn of(file: File, path: &Path) -> io::Result<Self> {
        let metadata = file.metadata()?;
        // Inodes of two file systems may be the same: those of a tmpfs are counted from its beginning.
        let number = metadata.ino() ^ metadata.dev().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Self { file: NotInherited::new(file), path: path.to_path_buf(), number })
    }

    /// Opens the lock file. `None`: there is none.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        match file::open(path, true) {
            Ok(file) => Self::of(file, path).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the lock file for asking who has which lock, which takes only the right to read it.
    pub(crate) fn open_for_reading(path: &Path) -> io::Result<Self> {
        Self::of(file::open(path, false)?, path)
    }

    /// Opens the lock file, and makes it where there is none.
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

    /// Whether the file still has its name: a lock on one that was removed says nothing.
    pub(crate) fn is_named(&self) -> bool {
        let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        match (self.file.metadata(), std::fs::symlink_metadata(&self.path)) {
            (Ok(ours), Ok(named)) => inode(ours) == inode(named),
            _ => false,
        }
    }

    /// Takes the duty. `false`: somebody has it.
    pub(crate) fn try_take_duty(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, DUTY, ByteLock::Exclusive)
    }

    /// Gives the duty up.
    pub(crate) fn leave_duty(&self) {
        unlock_byte(&self.file, DUTY);
    }

    /// Says that this process has, or is just asking for, the descriptors of the link. `false`: the link is being removed.
    pub(crate) fn try_join(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, PRESENCE, ByteLock::Shared)
    }

    /// Takes that back.
    pub(crate) fn leave(&self) {
        unlock_byte(&self.file, PRESENCE);
    }

    /// Whether somebody else has joined.
    pub(crate) fn others_joined(&self) -> io::Result<bool> {
        is_byte_locked(&self.file, PRESENCE)
    }

    /// Gives up everything but the seats, as closing the file would.
    pub(crate) fn release(&self) {
        self.leave();
        self.leave_duty();
    }

    /// Which lock file this is: locks in another one say nothing here, even if it has the same name.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Takes the lock of a seat. `false`: somebody has it, a child perhaps that was forked from who sat there before.
    pub(crate) fn try_take_seat(&self, seat: u8) -> io::Result<bool> {
        try_lock_byte(&self.file, SEATS + u32::from(seat), ByteLock::Exclusive)
    }

    /// Gives it up.
    pub(crate) fn leave_seat(&self, seat: u8) {
        unlock_byte(&self.file, SEATS + u32::from(seat));
    }

    /// Whether another process, or another opening of the file in this one, has the lock of a seat.
    pub(crate) fn is_seat_taken(&self, seat: u8) -> io::Result<bool> {
        is_byte_locked(&self.file, SEATS + u32::from(seat))
    }

    /// Lets nobody join any more. `false`: somebody has.
    pub(crate) fn try_close(&self) -> io::Result<bool> {
        try_lock_byte(&self.file, PRESENCE, ByteLock::Exclusive)
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn one_has_the_duty_and_all_share_the_presence() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("link.lock");
        assert!(Lock::open(&path).unwrap().is_none());
        let a = Lock::open_or_make(&path, 0o640).unwrap().unwrap();
        let b = Lock::open_or_make(&path, 0o600).unwrap().unwrap();
        assert_eq!(file::mode_of(&b.file).unwrap(), 0o640, "the first one's");

        assert!(a.try_take_duty().unwrap() && a.try_take_duty().unwrap() && !b.try_take_duty().unwrap());
        a.leave_duty();
        assert!(b.try_take_duty().unwrap());

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

        assert!(b.is_named());
        std::fs::remove_file(&path).unwrap();
        assert!(!b.is_named());
        let c = Lock::open_or_make(&path, 0o600).unwrap().unwrap();
        assert!(!b.is_named() && c.is_named() && c.try_take_duty().unwrap());
    }
}
