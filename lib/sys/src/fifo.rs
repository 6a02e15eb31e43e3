//! Named pipes that only wake: a byte in the pipe says that there is something to look at elsewhere.

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
/// assert!(ours.drain()?);
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

    /// Takes what was rung so far; `false` if nothing was. Look at what the rings are about after this, not before. Reads at most
    /// what a pipe holds, so that a flood cannot keep the caller: the pipe may still be readable afterwards.
    ///
    /// # Errors
    /// None in normal use.
    pub fn drain(&self) -> io::Result<bool> {
        const ROUNDS: usize = 16;
        let (mut bytes, mut was_rung) = ([0; 4096], false);
        for _ in 0..ROUNDS {
            match (&self.0).read(&mut bytes) {
                Ok(len) => {
                    was_rung |= len > 0;
                    if len < bytes.len() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(was_rung)
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
    fn full_pipe_counts_as_rung_and_drains() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        make(&path, 0o660).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660, "whatever the umask");
        let bell = open_ringer(&path).unwrap();
        assert!(!bell.drain().unwrap());
        // More than a pipe of the largest default holds.
        for _ in 0..70_000 {
            bell.ring().unwrap();
        }
        assert!(poll::is_readable(&bell).unwrap());
        assert!(bell.drain().unwrap());
        assert!(!poll::is_readable(&bell).unwrap() && !bell.drain().unwrap());
    }

    #[test]
    fn a_ring_stays_without_a_reader() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bell");
        make(&path, 0o600).unwrap();
        let keeper = open_ringer(&path).unwrap();
        open_ringer(&path).unwrap().ring().unwrap();
        assert!(keeper.drain().unwrap());
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
