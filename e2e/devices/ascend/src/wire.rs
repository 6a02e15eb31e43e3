//! The protocol between library and daemon: packets of one size, with a descriptor where memory travels.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

pub(crate) const KEY_BYTES: usize = 65;
/// Process ids in one call.
pub(crate) const PIDS_PER_CALL: usize = 31;

/// The operation that is requested.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Op {
    Tgid = 1,
    Export,
    Admit,
    Import,
    Close,
    Free,
}

/// A question, or its answer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    /// The question's [`Op`], or the answer's error number.
    pub(crate) what: i32,
    pub(crate) device: i32,
    pub(crate) flags: u64,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    /// Which memory it is, in the eyes of the process that has it.
    pub(crate) address: u64,
    pub(crate) count: u32,
    pub(crate) pids: [i32; PIDS_PER_CALL],
    pub(crate) key: [u8; KEY_BYTES],
}

impl Packet {
    pub(crate) fn new(what: i32) -> Self {
        Self {
            what,
            device: 0,
            flags: 0,
            offset: 0,
            size: 0,
            address: 0,
            count: 0,
            pids: [0; PIDS_PER_CALL],
            key: [0; KEY_BYTES],
        }
    }
}

const PACKET: usize = size_of::<Packet>();
const CONTROL: usize = 64;

/// Room for ancillary data, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

pub(crate) fn send(socket: RawFd, packet: &Packet, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut part = libc::iovec { iov_base: std::ptr::from_ref(packet).cast_mut().cast(), iov_len: PACKET };
    let mut control = Control([0; CONTROL]);
    // SAFETY: all of it is numbers and pointers, of which zero is a value.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: these only count.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as _;
        // SAFETY: there is room for one header with one descriptor behind it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd.as_raw_fd());
        }
    }
    // SAFETY: everything that the message points at lives until the call returns.
    if unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// `None`: the other end has gone.
pub(crate) fn receive(socket: RawFd) -> io::Result<Option<(Packet, Option<OwnedFd>)>> {
    let mut packet = Packet::new(0);
    let mut part = libc::iovec { iov_base: (&raw mut packet).cast(), iov_len: PACKET };
    let mut control = Control([0; CONTROL]);
    // SAFETY: as in `send`.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL as _;
    let got = loop {
        // SAFETY: everything that the message points at lives until the call returns.
        let got = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if got >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break got;
        }
    };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled in what there is.
    let fd = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            None
        } else {
            Some(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
        }
    };
    if got.cast_unsigned() != PACKET {
        return Ok(None);
    }
    Ok(Some((packet, fd)))
}
