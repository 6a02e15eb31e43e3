//! Descriptors that never block: ours, and those of strangers, which are closed where nobody waits.
//!
//! A close may take as long as the maker of the descriptor likes: a socket that lingers, a file of a file system of their own,
//! and any connection in whose queue there is one of these.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{MsgFlags, Shutdown, UnixCredentials, recvmsg, shutdown};
use shmesh::sys::socket;
use tokio::sync::oneshot;

const STACK_BYTES: usize = 64 * 1024;

/// Makes reads and writes of it return at once.
pub(crate) fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Whether a descriptor can be memory: one that has seals, or a device. Such a one is closed at once, and it is found out
/// without asking any file system.
pub(crate) fn may_be_memory(fd: &OwnedFd) -> bool {
    fcntl(fd, FcntlArg::F_GET_SEALS).is_ok() || is_device(fd.as_fd())
}

#[expect(unsafe_code, reason = "nix has no statx, and fstat asks the file system")]
fn is_device(fd: BorrowedFd<'_>) -> bool {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is empty and ends with a zero; `stat` is as large as what the kernel fills, and lives until then.
    let done =
        unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, stat.as_mut_ptr()) };
    // SAFETY: all zeroes are a value, and what the kernel fills are numbers.
    let mode = u32::from(unsafe { stat.assume_init() }.stx_mode);
    done == 0 && mode & libc::S_IFMT == libc::S_IFCHR
}

/// Closes what a stranger has sent, in a thread of its own. Returns when it is closed.
pub(crate) async fn close_elsewhere<T: Send + 'static>(strange: Vec<T>) {
    if strange.is_empty() {
        return;
    }
    let (done, closed) = oneshot::channel();
    let thread = std::thread::Builder::new().name("close".into()).stack_size(STACK_BYTES).spawn(move || {
        drop(strange);
        let _ = done.send(());
    });
    match thread {
        Ok(_) => drop(closed.await),
        // It was closed here instead.
        Err(error) => tracing::warn!(%error, "no thread to close descriptors"),
    }
}

/// A connection that is over, and in whose queue something waits. It is emptied before it is closed: otherwise the other end
/// would hear of a reset, and not what was last said to it.
#[derive(Debug)]
pub(crate) struct Unread(OwnedFd);

impl Drop for Unread {
    fn drop(&mut self) {
        while is_unread(&self.0) && socket::receive_all(&self.0).is_ok() {}
    }
}

/// Ends a connection. If nothing waits in its queue it is closed; otherwise it is for [`close_elsewhere`].
pub(crate) fn hang_up(connection: OwnedFd) -> Option<Unread> {
    // Nothing more comes in from now on.
    let _ = shutdown(connection.as_raw_fd(), Shutdown::Read);
    if !is_unread(&connection) {
        return None;
    }
    // The other end need not wait for the close.
    let _ = shutdown(connection.as_raw_fd(), Shutdown::Write);
    Some(Unread(connection))
}

/// Whether there is a packet. One may have no bytes, as the end has; but who sent it is said.
fn is_unread(connection: &OwnedFd) -> bool {
    let mut space = nix::cmsg_space!(UnixCredentials);
    let mut byte = [0];
    let mut packet = [IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    recvmsg::<()>(connection.as_raw_fd(), &mut packet, Some(&mut space), flags).is_ok_and(|seen| {
        seen.bytes > 0
            || seen.flags.contains(MsgFlags::MSG_CTRUNC)
            || seen.cmsgs().is_ok_and(|mut control| control.next().is_some())
    })
}
