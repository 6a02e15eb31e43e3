//! The system calls of this crate: files of NVIPC, its stream socket that carries one eventfd each way, and eventfds.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    accept4, bind, connect, listen, recv, recvmsg, send, sendmsg, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

/// How long the other end of a connection may take for its half of the exchange. NVIPC has no limit, and a primary serves
/// one at a time, so a silent one must not keep the others for ever.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);

/// Makes a file that must not be there, of `bytes` that are reserved at once.
pub(crate) fn create(path: &Path, mode: u32, bytes: u64) -> io::Result<File> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)?;
    let fill = || {
        file.set_permissions(PermissionsExt::from_mode(mode))?;
        file.set_len(bytes)?;
        shmesh::sys::reserve(&file, bytes)
    };
    if let Err(error) = fill() {
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(file)
}

/// Opens a file that is there. A symbolic link is refused: it could lead anywhere.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    std::fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// Maps a whole file, shared and writable.
pub(crate) fn map(file: &File) -> io::Result<memmap2::MmapRaw> {
    memmap2::MmapOptions::new().map_raw(file)
}

/// Holds off others of us who would create in the same directory.
pub(crate) fn lock_dir(dir: &Path, limit: Duration) -> io::Result<nix::fcntl::Flock<File>> {
    use nix::fcntl::{Flock, FlockArg};
    let mut file = File::open(dir)?;
    let start = Instant::now();
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, Errno::EAGAIN | Errno::EINTR)) if start.elapsed() < limit => file = back,
            Err((_, errno)) => return Err(errno.into()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn stream() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Listens where no file is.
pub(crate) fn listen_on(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let fd = stream()?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode))?;
    listen(&fd, Backlog::new(20)?)?;
    Ok(fd)
}

/// Whether a process has a socket at `path`. Connecting would tell, and a primary of NVIPC would wipe its link for it. A socket
/// of another kind cannot connect, and is told so only if there is one.
pub(crate) fn is_served(path: &Path) -> io::Result<bool> {
    let probe = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ENOENT | Errno::ECONNREFUSED) => Ok(false),
        Ok(()) | Err(Errno::EPROTOTYPE) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// Connects; what it then sends and receives may take [`EXCHANGE_LIMIT`].
pub(crate) fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let fd = stream()?;
    limit_wait(&fd, EXCHANGE_LIMIT)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// The next connection.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let fd = own(accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?);
    limit_wait(&fd, EXCHANGE_LIMIT)?;
    Ok(fd)
}

fn limit_wait(fd: &OwnedFd, limit: Duration) -> io::Result<()> {
    let limit = TimeVal::new(limit.as_secs().cast_signed(), i64::from(limit.subsec_micros()));
    setsockopt(fd, sockopt::ReceiveTimeout, &limit)?;
    setsockopt(fd, sockopt::SendTimeout, &limit)?;
    Ok(())
}

/// Sends a descriptor: two bytes, "nothing" and "well", and the descriptor beside them.
pub(crate) fn send_fd(to: &OwnedFd, fd: BorrowedFd<'_>) -> io::Result<()> {
    let rights = [fd.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&rights)];
    let bytes = [IoSlice::new(&[0, 0])];
    sendmsg::<UnixAddr>(to.as_raw_fd(), &bytes, &control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives what [`send_fd`] sends, and nothing but an eventfd.
pub(crate) fn receive_eventfd(from: &OwnedFd) -> io::Result<OwnedFd> {
    let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut bytes = [0xff_u8; 2];
    let (mut read, mut fds) = (0, Vec::new());
    while read < bytes.len() {
        let mut space = nix::cmsg_space!([RawFd; 8]);
        let mut parts = [IoSliceMut::new(&mut bytes[read..])];
        let message =
            recvmsg::<UnixAddr>(from.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = control {
                fds.extend(raw.into_iter().map(own));
            }
        }
        if message.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read += message.bytes;
    }
    if bytes != [0, 0] {
        return Err(bad("the peer has no eventfd to give"));
    }
    let fd = fds.pop().ok_or_else(|| bad("no descriptor came with it"))?;
    // Writing to anything else could block, or end us with a signal.
    let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if what.as_os_str() != "anon_inode:[eventfd]" {
        return Err(bad("what the peer gave is no eventfd"));
    }
    Ok(fd)
}

/// Sends one byte, if it can be sent at once.
pub(crate) fn say(to: &OwnedFd, byte: u8) -> io::Result<()> {
    send(to.as_raw_fd(), &[byte], MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT)?;
    Ok(())
}

/// Receives one byte, if there is one. An error when there will be none.
pub(crate) fn hear(from: &OwnedFd) -> io::Result<Option<u8>> {
    let mut byte = [0];
    match recv(from.as_raw_fd(), &mut byte, MsgFlags::MSG_DONTWAIT) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(Some(byte[0])),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether the other end of a connection is closed.
pub(crate) fn has_hung_up(fd: &OwnedFd) -> bool {
    // It is told without being asked for.
    is_ready(fd.as_fd(), PollFlags::empty()).unwrap_or(false)
}

/// Takes over a descriptor that the kernel has just made.
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: nobody else knows of it yet.
    #[expect(unsafe_code, reason = "nix returns some new descriptors as numbers")]
    unsafe {
        OwnedFd::from_raw_fd(fd)
    }
}

/// An eventfd as theirs: it counts, each read takes one, and reading blocks.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    Ok(EventFd::from_value_and_flags(0, EfdFlags::EFD_SEMAPHORE | EfdFlags::EFD_CLOEXEC)?.into())
}

/// Whether one can be added without waiting.
pub(crate) fn has_room(fd: &OwnedFd) -> io::Result<bool> {
    is_ready(fd.as_fd(), PollFlags::POLLOUT)
}

/// Adds one. Waits while the counter is full, unless somebody made it an eventfd that does not wait.
pub(crate) fn post(fd: &OwnedFd) -> io::Result<()> {
    // No kernel has a write to an eventfd that does not wait for the one call alone, as `take` has for reading.
    loop {
        match nix::unistd::write(fd, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::EAGAIN) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Takes one without waiting; `false`: there is none. The eventfd blocks, and threads may race for the last one.
pub(crate) fn take(fd: &OwnedFd) -> io::Result<bool> {
    let mut value = [0_u8; 8];
    let part = libc::iovec { iov_base: value.as_mut_ptr().cast(), iov_len: value.len() };
    // SAFETY: one part of 8 bytes that lives until the call returns; an offset of -1 means the place of the file.
    #[expect(unsafe_code, reason = "nix has no preadv2")]
    let read = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
    match Errno::result(read) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn is_ready(fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<bool> {
    Ok(wait_for(&mut [PollFd::new(fd, flags)], Some(Instant::now()))? > 0)
}

/// Polls until something is ready; 0: the time is over.
pub(crate) fn wait_for(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<i32> {
    loop {
        let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
            // Rounded up: polling with 0 until the deadline would spin through its last millisecond.
            let millis = deadline.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
            PollTimeout::try_from(i32::try_from(millis).unwrap_or(i32::MAX)).unwrap_or(PollTimeout::MAX)
        });
        match poll(fds, timeout) {
            Ok(0) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {}
            Ok(ready) => return Ok(ready),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Seconds and nanoseconds since 1970.
pub(crate) fn now() -> (u64, u64) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_secs(), u64::from(now.subsec_nanos()))
}

/// 32 random bits from the kernel.
pub(crate) fn random() -> io::Result<u32> {
    use std::io::Read;
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}
