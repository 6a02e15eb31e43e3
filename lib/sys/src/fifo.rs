//! Named pipes that only wake: each byte in the pipe is one signal.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Makes a named pipe, with this mode whatever the umask is.
///
/// # Errors
/// Something with that name exists (`AlreadyExists`), or the directory cannot be written.
pub fn make(path: &Path, mode: u32) -> io::Result<()> {
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR)?;
    // By descriptor: the name could lead elsewhere by now.
    open_ringer(path)?.0.set_permissions(PermissionsExt::from_mode(mode))
}

/// Opens a named pipe for both ringing and waiting; never blocks, never creates.
///
/// It is open for reading and writing at once, so that opening never waits for the other side, a ring without a reader is not
/// lost, and no `SIGPIPE` is raised.
///
/// # Errors
/// There is no such file; it is not a named pipe (`InvalidInput`); a symbolic link is refused.
pub fn open_ringer(path: &Path) -> io::Result<Ringer> {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let pipe = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    if !pipe.metadata()?.file_type().is_fifo() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a named pipe"));
    }
    Ok(Ringer(pipe))
}

/// An open named pipe.
///
/// ```
/// use shmesh_sys::{fifo, poll};
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("bell");
/// fifo::make(&path, 0o600)?;
/// let (ours, theirs) = (fifo::open_ringer(&path)?, fifo::open_ringer(&path)?);
/// theirs.ring()?;
/// assert!(poll::is_readable(&ours)?);
/// assert!(ours.take()?);
/// assert!(!poll::is_readable(&ours)?);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Ringer(File);

impl Ringer {
    /// Makes the pipe readable. A full pipe is readable already, so that is a success.
    ///
    /// # Errors
    /// None in normal use.
    pub fn ring(&self) -> io::Result<()> {
        loop {
            match (&self.0).write(&[1]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                done => return done.map(drop),
            }
        }
    }

    /// Takes one ring; `false` if there is none.
    ///
    /// # Errors
    /// None in normal use.
    pub fn take(&self) -> io::Result<bool> {
        match (&self.0).read(&mut [0]) {
            Ok(taken) => Ok(taken > 0),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Ringer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::poll;

    #[test]
    fn each_ring_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        make(&path, 0o660).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660, "whatever the umask");
        let (bell, ringer) = (open_ringer(&path).unwrap(), open_ringer(&path).unwrap());
        assert!(!bell.take().unwrap());
        ringer.ring().unwrap();
        ringer.ring().unwrap();
        assert!(bell.take().unwrap() && poll::is_readable(&bell).unwrap());
        assert!(bell.take().unwrap() && !bell.take().unwrap());
    }

    #[test]
    fn full_pipe_does_not_block_a_ringer_whatever_others_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        make(&path, 0o600).unwrap();
        let (bell, ringer) = (open_ringer(&path).unwrap(), open_ringer(&path).unwrap());
        let hostile = open_ringer(&path).unwrap();
        while (&hostile.0).write(&[0; 4096]).is_ok() {}
        nix::fcntl::fcntl(&hostile.0, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
        ringer.ring().unwrap();
        assert!(bell.take().unwrap());
    }

    #[test]
    fn a_ring_stays_without_a_reader() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        make(&path, 0o600).unwrap();
        let keeper = open_ringer(&path).unwrap();
        open_ringer(&path).unwrap().ring().unwrap();
        assert!(keeper.take().unwrap());
    }

    #[test]
    fn only_a_named_pipe_is_opened_and_none_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        assert_eq!(open_ringer(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!path.exists());
        std::fs::write(&path, "").unwrap();
        assert_eq!(open_ringer(&path).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(make(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::remove_file(&path).unwrap();
        make(&path, 0o600).unwrap();
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(open_ringer(&dir.path().join("link")).is_err());
    }
}
