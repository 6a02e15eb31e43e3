//! The identity socket: made, accepted from, and one packet in or out. All ancillary-data arithmetic is here.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind,
    connect, listen, recv, sendmsg, shutdown, socket,
};
use shmesh_proto::limits::MAX_PACKET_BYTES;
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::limits::{BACKLOG, MAX_RECEIVED_FDS};

const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

/// How long another service may take between its lock and its socket. Who has the lock for longer serves nobody.
const STARTING: Duration = Duration::from_secs(2);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(20);

/// The socket cannot be made.
#[derive(Debug, Error)]
pub(crate) enum ListenError {
    /// Somebody answers there.
    #[error("another service answers on {0}")]
    Taken(PathBuf),
    /// It is a file or directory, which is not ours to remove.
    #[error("{0} exists and is no socket")]
    NoSocket(PathBuf),
    /// The system says no.
    #[error("cannot {0} {1}")]
    System(&'static str, PathBuf, #[source] io::Error),
}

/// A listening socket with a name, which it takes away when dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode: by then the name may be another service's.
    file: (u64, u64),
    /// As long as the service lives.
    _lock: Option<Flock<File>>,
}

impl Listener {
    /// Listens on `path`. A socket there that nobody listens on any more is replaced.
    pub(crate) fn bind(path: &Path, mode: u32) -> Result<Self, ListenError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |error: io::Error| ListenError::System(what, path, error)
        };
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(failed("make the directory", dir))?;
        }
        // Two that start at once would each find a socket that nobody listens on, and replace it.
        let lock = locked(path)?;
        if is_socket(path)? && answers(path).map_err(failed("try", path))? {
            return Err(ListenError::Taken(path.to_owned()));
        }
        // Made under another name and renamed: whoever sees the name can connect, and with the right mode.
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let new = PathBuf::from(name);
        if is_socket(&new)? {
            fs::remove_file(&new).map_err(failed("remove", &new))?;
        }
        let listening = || {
            let fd = socket(AddressFamily::Unix, SockType::SeqPacket, FLAGS, None)?;
            bind(fd.as_raw_fd(), &UnixAddr::new(&new)?)?;
            fs::set_permissions(&new, Permissions::from_mode(mode))?;
            listen(&fd, Backlog::new(BACKLOG)?)?;
            let file = fs::symlink_metadata(&new)?;
            fs::rename(&new, path)?;
            Ok((fd, (file.dev(), file.ino())))
        };
        let (fd, file) = listening().map_err(failed("listen on", path))?;
        Ok(Self { fd, path: path.to_owned(), file, _lock: lock })
    }

    /// The next connection, if there is one.
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        let fd = accept4(self.fd.as_raw_fd(), FLAGS)?;
        Ok(own(fd))
    }

    /// Lets the runtime say when somebody wants to connect.
    #[expect(unsafe_code, reason = "tokio cannot see that a descriptor stays what it is")]
    pub(crate) fn watched(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: it is the descriptor of the field `fd`, which is closed with self and never replaced.
        unsafe { Ok(AsyncFd::register_with_interest(self, Interest::READABLE)?) }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let still_ours =
            fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if still_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket's name stays");
        }
    }
}

/// Takes the lock beside the socket. Without it when who has it serves nobody: pods see this directory, and root in one of
/// them could hold the lock for ever.
fn locked(path: &Path) -> Result<Option<Flock<File>>, ListenError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let failed = |error| ListenError::System("lock", lock.clone(), error);
    let opened = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&lock);
    let mut file = opened.map_err(failed)?;
    let until = Instant::now() + STARTING;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => return Ok(Some(held)),
            Err((back, Errno::EWOULDBLOCK)) => file = back,
            Err((_, error)) => return Err(failed(error.into())),
        }
        if is_socket(path)?
            && answers(path).map_err(|error| ListenError::System("try", path.to_owned(), error))?
        {
            return Err(ListenError::Taken(path.to_owned()));
        }
        if Instant::now() >= until {
            tracing::warn!(lock = %lock.display(), "somebody holds the lock and serves nobody; not waited for");
            return Ok(None);
        }
        sleep(LOOK);
    }
}

fn is_socket(path: &Path) -> Result<bool, ListenError> {
    match fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => Ok(true),
        Ok(_) => Err(ListenError::NoSocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(ListenError::System("look at", path.to_owned(), error)),
    }
}

/// Whether somebody listens on the socket at `path`.
pub(crate) fn answers(path: &Path) -> io::Result<bool> {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, FLAGS, None)?;
    match connect(fd.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ECONNREFUSED) => Ok(false),
        // Connected; or so many wait that we would have to; or it is a socket of another type, but somebody's.
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// One packet as it came.
#[derive(Debug)]
pub(crate) struct Received {
    /// Its bytes: no more than a packet has.
    pub(crate) bytes: Vec<u8>,
    /// All descriptors that the kernel made for us.
    pub(crate) fds: Vec<OwnedFd>,
    /// There were more bytes.
    pub(crate) bytes_cut: bool,
    /// There were more descriptors than the kernel could make.
    pub(crate) fds_cut: bool,
}

/// A multiple of the alignment that control messages need.
#[repr(align(8))]
struct Control([u8; control_bytes(MAX_RECEIVED_FDS)]);

const fn control_bytes(fds: usize) -> usize {
    (size_of::<libc::cmsghdr>() + fds * size_of::<RawFd>()).next_multiple_of(8)
}

/// Whether there is a packet, or the other end is closed; `WouldBlock` if neither. What comes with it stays where it is.
pub(crate) fn has_packet(fd: BorrowedFd<'_>) -> io::Result<()> {
    recv(fd.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)?;
    Ok(())
}

/// Ends a connection, for which nothing more comes in from then on. If something waits in its queue it comes back: in that may
/// be what does not let itself be closed.
pub(crate) fn hang_up(fd: OwnedFd) -> Option<OwnedFd> {
    let _ = shutdown(fd.as_raw_fd(), Shutdown::Read);
    let waiting = recv(fd.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT);
    if !waiting.is_ok_and(|bytes| bytes > 0) {
        return None;
    }
    // The other end need not wait for the close.
    let _ = shutdown(fd.as_raw_fd(), Shutdown::Write);
    Some(fd)
}

/// Takes one packet, without waiting. No bytes at all mean that the other end is closed.
///
/// Not by nix: where descriptors are cut off (`MSG_CTRUNC`), it does not give out those that the kernel has already made.
pub(crate) fn receive(fd: BorrowedFd<'_>) -> io::Result<Received> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut control = Control([0; _]);
    let (len, fds, flags) = receive_into(fd, &mut bytes, &mut control)?;
    bytes.truncate(len);
    let flags = MsgFlags::from_bits_retain(flags);
    Ok(Received {
        bytes,
        fds,
        bytes_cut: flags.contains(MsgFlags::MSG_TRUNC),
        fds_cut: flags.contains(MsgFlags::MSG_CTRUNC),
    })
}

#[expect(unsafe_code, reason = "recvmsg and its control messages, as the kernel lays them out")]
fn receive_into(
    fd: BorrowedFd<'_>,
    bytes: &mut [u8],
    control: &mut Control,
) -> io::Result<(usize, Vec<OwnedFd>, i32)> {
    let mut slice = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all fields are numbers or pointers, for which zero is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut slice;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len() as _;
    let len = loop {
        // SAFETY: header points to one slice and one control buffer, both with their lengths; all live for the call.
        let result = unsafe {
            libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT)
        };
        match Errno::result(result) {
            Err(Errno::EINTR) => {}
            done => break usize::try_from(done?).map_err(io::Error::other)?,
        }
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled the control buffer that header points to, and said in header how far.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !next.is_null() {
        // SAFETY: next is a control message that lies whole in the buffer, as CMSG_FIRSTHDR and CMSG_NXTHDR make sure.
        let message = unsafe { next.read_unaligned() };
        if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as above.
            let data = unsafe { libc::CMSG_DATA(next) }.cast::<RawFd>();
            // SAFETY: CMSG_LEN only computes.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (message.cmsg_len as usize).saturating_sub(head) / size_of::<RawFd>();
            for at in 0..count {
                // SAFETY: the message is so long; it may lie at any address.
                fds.push(own(unsafe { data.add(at).read_unaligned() }));
            }
        }
        // SAFETY: header and next are as above.
        next = unsafe { libc::CMSG_NXTHDR(&raw const header, next) };
    }
    Ok((len, fds, header.msg_flags))
}

/// Sends one packet, with a descriptor or without, and without waiting.
pub(crate) fn send(fd: BorrowedFd<'_>, bytes: &[u8], with: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let raw = with.map(|with| [with.as_raw_fd()]);
    let control: Vec<_> = raw.iter().map(|raw| ControlMessage::ScmRights(raw)).collect();
    sendmsg::<UnixAddr>(fd.as_fd().as_raw_fd(), &[IoSlice::new(bytes)], &control, flags, None)?;
    Ok(())
}

#[expect(unsafe_code, reason = "the kernel hands out raw descriptors here")]
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::socketpair;

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, FLAGS).unwrap()
    }

    fn send_with(fd: &OwnedFd, bytes: &[u8], fds: &[RawFd]) {
        sendmsg::<UnixAddr>(
            fd.as_raw_fd(),
            &[IoSlice::new(bytes)],
            &[ControlMessage::ScmRights(fds)],
            MsgFlags::empty(),
            None,
        )
        .unwrap();
    }

    #[test]
    fn all_descriptors_that_can_be_sent_are_taken_and_owned() {
        let (ours, theirs) = pair();
        for count in [1, 2, MAX_RECEIVED_FDS] {
            send_with(&theirs, b"x", &vec![theirs.as_raw_fd(); count]);
            let received = receive(ours.as_fd()).unwrap();
            assert_eq!((received.fds.len(), received.fds_cut, received.bytes_cut), (count, false, false));
            for fd in &received.fds {
                let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
                assert_eq!(flags, libc::FD_CLOEXEC);
            }
        }
        assert_eq!(receive(ours.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn too_long_a_packet_is_cut_and_said_to_be() {
        let (ours, theirs) = pair();
        send_with(&theirs, &[7; MAX_PACKET_BYTES], &[0]);
        send_with(&theirs, &[7; MAX_PACKET_BYTES + 1], &[0]);
        assert!(!receive(ours.as_fd()).unwrap().bytes_cut);
        let cut = receive(ours.as_fd()).unwrap();
        assert!(cut.bytes_cut);
        assert_eq!((cut.bytes.len(), cut.fds.len()), (MAX_PACKET_BYTES, 1));
        drop(theirs);
        assert!(receive(ours.as_fd()).unwrap().bytes.is_empty());
    }

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent/agent.sock");
        let first = Listener::bind(&path, 0o666).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::Taken(_))));
        // As after a crash: the name is left behind.
        let inode = fs::metadata(&path).unwrap().ino();
        crash(first);
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        let second = Listener::bind(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(second);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::NoSocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_name_that_is_another_services_by_now_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let old = Listener::bind(&path, 0o666).unwrap();
        fs::remove_file(&path).unwrap();
        let _new = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(old);
        assert!(path.exists());
    }

    #[test]
    fn of_many_that_start_at_once_one_serves() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        for _ in 0..20 {
            // As after a crash: a name that nobody listens on.
            crash(Listener::bind(&path, 0o666).unwrap());
            let barrier = std::sync::Barrier::new(8);
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    barrier.wait();
                    Listener::bind(&path, 0o666)
                };
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let serving: Vec<_> = outcomes.iter().flatten().collect();
            assert_eq!(serving.len(), 1);
            let file = fs::symlink_metadata(&path).unwrap();
            assert_eq!(serving[0].file, (file.dev(), file.ino()), "and at the name is its socket");
            for refused in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
                assert!(matches!(refused, ListenError::Taken(_)), "{refused}");
            }
        }
    }

    #[test]
    fn a_lock_that_serves_nobody_keeps_nobody_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        drop(Listener::bind(&path, 0o666).unwrap());
        // As root in a pod could, through a mount that is read-only.
        let held = Flock::lock(File::open(dir.path().join("agent.sock.lock")).unwrap(), FlockArg::LockShared);
        let _listener = Listener::bind(&path, 0o666).unwrap();
        assert!(answers(&path).unwrap());
        drop(held);
    }

    /// Ends a listener without its drop.
    fn crash(mut listener: Listener) {
        listener.file = (0, 0);
    }
}
