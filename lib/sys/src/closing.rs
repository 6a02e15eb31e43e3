//! Closing descriptors that an untrusted peer has sent, without blocking.
//!
//! A close can block for as long as the peer wants: a socket with `SO_LINGER` and unsent data, or a connection that has
//! such a socket in its queue. The kernel does not linger for a process that exits. So a child process takes copies,
//! this process closes its own descriptors, which are then not the last ones, and the child is killed.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::socket::Unread;

/// Time limit for the child to empty the queues of connections. Beyond that, their peers get a reset.
const DRAIN_LIMIT: Duration = Duration::from_millis(20);
const DRAIN_STEP: Duration = Duration::from_micros(500);

/// Descriptors whose close may block. Dropping them leaks them; [`Lingering::close`] closes them.
///
/// ```
/// use shmesh_sys::closing::Lingering;
/// let (reader, _writer) = std::io::pipe()?;
/// let mut lingering = Lingering::from(vec![reader.into()]);
/// lingering.close()?;
/// assert!(lingering.is_empty());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Default)]
#[must_use = "dropping it leaks the descriptors"]
pub struct Lingering {
    fds: ManuallyDrop<Vec<OwnedFd>>,
    /// Connections that are over. Their queues are emptied first, so that their peers can read the last packets that
    /// were sent to them.
    connections: ManuallyDrop<Vec<OwnedFd>>,
}

impl From<Vec<OwnedFd>> for Lingering {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self { fds: ManuallyDrop::new(fds), ..Self::default() }
    }
}

impl From<Unread> for Lingering {
    fn from(unread: Unread) -> Self {
        Self {
            connections: ManuallyDrop::new(unread.into_connection().into_iter().collect()),
            ..Self::default()
        }
    }
}

impl Lingering {
    /// Whether there are no descriptors to close.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fds.is_empty() && self.connections.is_empty()
    }

    /// Closes all descriptors, within about 20 ms.
    ///
    /// # Errors
    /// No child process can be created (`EAGAIN`, `ENOMEM`). Then nothing is closed.
    pub fn close(&mut self) -> io::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let child = Pid::from_raw(fork_holder(&self.connections)?);
        if !self.connections.is_empty() {
            until_stopped(child);
        }
        self.fds.clear();
        self.connections.clear();
        // The child has the last copies now. It is killed in any case, so the results do not matter.
        let _ = kill(child, Signal::SIGKILL);
        while waitpid(child, None) == Err(nix::errno::Errno::EINTR) {}
        Ok(())
    }
}

/// Waits until the child has emptied the queues and stopped, up to the limit: closing descriptors from the queues may
/// linger.
fn until_stopped(child: Pid) {
    for _ in 0..DRAIN_LIMIT.as_micros() / DRAIN_STEP.as_micros() {
        match waitpid(child, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::StillAlive) => std::thread::sleep(DRAIN_STEP),
            _ => return,
        }
    }
}

/// Creates a child process that has copies of all descriptors, empties the queues of `connections` and then stops
/// itself. It ends when it is killed, or with the calling thread. Returns its process id.
#[expect(unsafe_code, reason = "nix has no fork without handlers")]
fn fork_holder(connections: &[OwnedFd]) -> io::Result<i32> {
    // SAFETY: the call does not access memory.
    let parent = unsafe { libc::getpid() };
    // SAFETY: as fork(2): the child has copies of everything and one thread. It makes system calls only, on its own stack, and never
    // returns. Not `fork(3)`, whose handlers are for children that continue.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    match i32::try_from(child) {
        Ok(0) => {
            // SAFETY: system calls with local values.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != parent {
                    libc::_exit(1);
                }
                for connection in connections {
                    drain(connection.as_raw_fd());
                }
                loop {
                    libc::kill(libc::getpid(), libc::SIGSTOP);
                }
            }
        }
        Ok(child) if child > 0 => Ok(child),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Discards all packets of a queue. Without room for their descriptors, the kernel closes these.
///
/// # Safety
/// None: it makes one system call on a number. It is `unsafe` because it is called in children of a process with
/// threads.
#[expect(unsafe_code, reason = "only calls that are safe after a fork")]
unsafe fn drain(connection: i32) {
    loop {
        let mut byte = 0_u8;
        let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // SAFETY: all zeroes are a message header: no name, no buffers.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        // SAFETY: one part of one byte, which lives until the call returns.
        let len = unsafe { libc::recvmsg(connection, &raw mut message, libc::MSG_DONTWAIT) };
        // With SO_PASSCRED, which `hang_up` sets, even an empty packet has something that was left out.
        if len < 0 || (len == 0 && message.msg_flags & libc::MSG_CTRUNC == 0) {
            return;
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use nix::sys::socket::{setsockopt, sockopt};
    use shmesh_testing::{own_process, until};

    use super::*;
    use crate::socket::{hang_up, pair, receive, send};

    /// A socket with unsent data, whose close waits ten minutes for them.
    fn stubborn() -> (TcpStream, TcpListener, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        setsockopt(&listener, sockopt::RcvBuf, &4096).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = listener.accept().unwrap().0;
        setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 600 }).unwrap();
        stream.set_nonblocking(true).unwrap();
        while io::Write::write(&mut &stream, &[0; 65_536]).is_ok() {}
        (stream, listener, other)
    }

    /// The test hangs for ten minutes if one close lingers. In a process of its own: a child that another test starts has copies of
    /// all descriptors for a moment, and would hang instead if its copy is the last.
    #[test]
    fn no_close_lingers() {
        own_process(|| {
            let (stream, _listener, _other) = stubborn();
            let mut lingering = Lingering::from(vec![stream.into()]);
            lingering.close().unwrap();
            assert!(lingering.is_empty());
        });
    }

    #[test]
    fn no_close_of_a_queue_lingers() {
        own_process(|| {
            let (stream, _listener, _other) = stubborn();
            // In a queue in a queue.
            let (inner, outer) = pair().unwrap();
            send(&outer, b"", &[stream.as_fd()]).unwrap();
            drop((stream, outer));
            let (ours, theirs) = pair().unwrap();
            send(&theirs, b"", &[inner.as_fd()]).unwrap();
            drop(inner);
            let mut lingering = Lingering::from(hang_up(ours).unwrap());
            lingering.close().unwrap();
            assert!(lingering.is_empty());
        });
    }

    /// Where the child does not run within the limit, the queue stays as it is and the peer gets a reset: another connection may
    /// have more luck.
    #[test]
    fn peer_reads_its_last_packet() {
        own_process(|| {
            until("a peer reads its last packet", || {
                let (ours, theirs) = pair().unwrap();
                send(&theirs, b"plain", &[]).unwrap();
                send(&ours, b"the last word", &[]).unwrap();
                Lingering::from(hang_up(ours).unwrap()).close().unwrap();
                match receive(&theirs) {
                    Ok((bytes, _)) => assert_eq!(bytes, b"the last word"),
                    Err(error) => {
                        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                        return false;
                    }
                }
                assert!(receive(&theirs).unwrap().0.is_empty());
                true
            });
        });
    }
}
