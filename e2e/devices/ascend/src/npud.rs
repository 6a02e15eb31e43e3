//! The daemon: the kernel's part of the fake. It identifies processes without asking them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::code;
use crate::nodes::{Caller, Nodes};
use crate::wire::{self, Op, Packet};

/// A running daemon. It serves for the life of the process.
#[derive(Clone, Debug)]
pub struct Npud {
    nodes: Arc<Mutex<Nodes>>,
}

impl Npud {
    /// Listens on a socket at `path`, in threads of this process.
    ///
    /// # Errors
    /// The socket cannot be made there.
    pub fn start(path: &Path) -> io::Result<Self> {
        let listener = listen(path)?;
        let daemon = Self { nodes: Arc::default() };
        let ours = daemon.clone();
        std::thread::Builder::new().name("npud".into()).spawn(move || {
            let connections = AtomicUsize::new(1);
            loop {
                // SAFETY: the socket is open; the peer is identified below.
                let accepted = unsafe {
                    libc::accept4(
                        listener.as_raw_fd(),
                        std::ptr::null_mut(),
                        std::ptr::null_mut(),
                        libc::SOCK_CLOEXEC,
                    )
                };
                if accepted < 0 {
                    continue;
                }
                // SAFETY: it is new and has no other owner.
                let client = unsafe { OwnedFd::from_raw_fd(accepted) };
                let connection = connections.fetch_add(1, Ordering::Relaxed) as u64;
                let daemon = ours.clone();
                std::thread::spawn(move || daemon.serve(&client, connection));
            }
        })?;
        Ok(daemon)
    }

    /// How many keys there are, and how often they are open.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        self.nodes().count()
    }

    /// The processes on the list of any key, as in `/proc/svm_shmem` for root.
    #[must_use]
    pub fn listed(&self) -> Vec<i32> {
        self.nodes().listed()
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, client: &OwnedFd, connection: u64) {
        let socket = client.as_raw_fd();
        if let Ok(tgid) = peer(socket) {
            let caller = Caller { tgid, start_time: start_time(tgid).unwrap_or(u64::MAX), connection };
            while let Ok(Some((ask, fd))) = wire::receive(socket) {
                let (answer, fd) = match self.answer(caller, &ask, fd) {
                    Ok(answer) => answer,
                    Err(code) => (Packet::new(code), None),
                };
                if wire::send(socket, &answer, fd.as_ref().map(AsFd::as_fd)).is_err() {
                    break;
                }
            }
        }
        self.nodes().ended(connection);
    }

    fn answer(
        &self,
        caller: Caller,
        ask: &Packet,
        fd: Option<OwnedFd>,
    ) -> Result<(Packet, Option<OwnedFd>), i32> {
        let mut nodes = self.nodes();
        let is = |op: Op| ask.what == op as i32;
        if is(Op::Tgid) {
            let mut answer = Packet::new(0);
            answer.pids[0] = caller.tgid;
            Ok((answer, None))
        } else if is(Op::Export) {
            Ok((nodes.export(caller, ask, fd.ok_or(code::DRIVER)?)?, None))
        } else if is(Op::Admit) {
            Ok((nodes.admit(caller, ask, now())?, None))
        } else if is(Op::Import) {
            nodes.import(caller, ask).map(|(answer, fd)| (answer, Some(fd)))
        } else if is(Op::Close) {
            Ok((nodes.close(caller, ask)?, None))
        } else if is(Op::Free) {
            Ok((nodes.free(caller, ask.address), None))
        } else {
            Err(code::DRIVER)
        }
    }
}

fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    // SAFETY: all of it is numbers, of which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX.cast_unsigned().try_into().unwrap_or_default();
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    Ok(address)
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: it takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

const ADDRESS_BYTES: u32 = 110;

fn listen(path: &Path) -> io::Result<OwnedFd> {
    let (fd, address) = (socket()?, address(path)?);
    // SAFETY: the address lives until the call returns, and has this many bytes.
    let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), ADDRESS_BYTES) };
    // SAFETY: it takes numbers.
    if bound < 0 || unsafe { libc::listen(fd.as_raw_fd(), 128) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

pub(crate) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let (fd, address) = (socket()?, address(path)?);
    // SAFETY: as in `listen`.
    if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), ADDRESS_BYTES) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// The process at the other end, as numbered in this process's pid namespace.
fn peer(socket: RawFd) -> io::Result<i32> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = u32::try_from(size_of::<libc::ucred>()).unwrap_or_default();
    // SAFETY: there is room for the answer, and its length is said.
    let done = unsafe {
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut who).cast(), &raw mut len)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(who.pid) }
}

/// Field 22 of a process's `stat`.
fn start_time(tgid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{tgid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Hundredths of a second after the machine's start.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: there is room for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec.cast_unsigned() * 100 + time.tv_nsec.cast_unsigned() / 10_000_000
}
