//! FIFOs with a name, as bells: readable while it has been rung.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use nix::sys::stat::Mode;

/// One process's own opening of a FIFO: its flags are not shared with any other process, so no peer can make it block.
#[derive(Debug)]
pub(crate) struct Fifo(File);

impl Fifo {
    /// Creates the FIFO at `path`, and opens it for reading.
    ///
    /// # Errors
    /// There is something at `path` already, the directory is not writable, or there are no descriptors left.
    pub(crate) fn create(path: &Path, mode: u32) -> io::Result<Self> {
        nix::unistd::mkfifo(path, Mode::from_bits_truncate(mode & 0o600))?;
        let made = Self::open(path).and_then(|fifo| super::file::set_mode(&fifo.0, mode).map(|()| fifo));
        if made.is_err() {
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Opens the FIFO at `path` to ring it.
    ///
    /// # Errors
    /// There is none, or it is not accessible to this process.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // For reading as well: so the open never waits for a reader, and a write never raises SIGPIPE.
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let file = File::options().read(true).write(true).custom_flags(flags).open(path)?;
        if file.metadata()?.file_type().is_fifo() {
            Ok(Self(file))
        } else {
            Err(io::Error::other("not a FIFO"))
        }
    }

    /// Makes the FIFO readable. Never blocks: a full one is readable already.
    ///
    /// # Errors
    /// None in normal use.
    pub(crate) fn ring(&self) -> io::Result<()> {
        match (&self.0).write(&[1]) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes one signal; `false` when there is none.
    ///
    /// # Errors
    /// None in normal use.
    pub(crate) fn take(&self) -> io::Result<bool> {
        match (&self.0).read(&mut [0]) {
            Ok(taken) => Ok(taken > 0),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Fifo {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Fifo {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;

    #[test]
    fn each_ring_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        let bell = Fifo::create(&path, 0o660).unwrap();
        assert_eq!(super::super::file::mode_of(&bell.0).unwrap(), 0o660, "whatever the umask is");
        let ringer = Fifo::open(&path).unwrap();
        assert!(!bell.take().unwrap());
        ringer.ring().unwrap();
        ringer.ring().unwrap();
        assert!(bell.take().unwrap() && bell.take().unwrap() && !bell.take().unwrap());
    }

    #[test]
    fn a_full_one_does_not_block_a_ringer_whatever_others_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        let bell = Fifo::create(&path, 0o600).unwrap();
        let (hostile, ringer) = (Fifo::open(&path).unwrap(), Fifo::open(&path).unwrap());
        while (&hostile.0).write(&[0; 4096]).is_ok() {}
        let flags = nix::fcntl::fcntl(&hostile.0, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty()));
        flags.unwrap();
        ringer.ring().unwrap();
        assert!(bell.take().unwrap());
    }

    #[test]
    fn anything_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(Fifo::open(&file).is_err() && Fifo::create(&file, 0o600).is_err());
        assert!(file.exists(), "and left alone");
        let fifo = dir.path().join("fifo");
        Fifo::create(&fifo, 0o600).unwrap();
        std::os::unix::fs::symlink(&fifo, dir.path().join("link")).unwrap();
        assert!(Fifo::open(&dir.path().join("link")).is_err());
        assert!(Fifo::open(&dir.path().join("none")).is_err());
    }
}
