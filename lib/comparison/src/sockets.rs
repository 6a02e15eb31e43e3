//! Transports of the kernel: Unix sockets and pipes. Every message is copied in and out.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use anyhow::{Context, Result};

use crate::harness::{self, Meet, checked};
use crate::measure::{Ctx, Dist, Rx, Tx};
use crate::payload::{BULK, SMALL, fill, read};
use crate::report::{Case, Group, Kind};

/// The size of a pipe for 64 KiB messages: room for 16, like every other ring here. Unprivileged users may ask for this.
const PIPE_SIZE: libc::c_int = 1 << 20;

macro_rules! family {
    ($what:ident: $rtt:literal, $poll:literal, $oneway:literal, $bulk:literal) => {
        [
            Case::new($rtt, Group::Peer, Kind::RoundTrip, 64, |ctx| rtt(ctx, Transport::$what, false))
                .note("blocking"),
            Case::new($poll, Group::Peer, Kind::RoundTrip, 64, |ctx| rtt(ctx, Transport::$what, true))
                .note("non-blocking, polled"),
            Case::new($oneway, Group::Peer, Kind::OneWay, 64, |ctx| {
                oneway::<SMALL>(ctx, Transport::$what, 1024)
            })
            .note("blocking"),
            Case::new($bulk, Group::Peer, Kind::Bulk, 65536, |ctx| oneway::<BULK>(ctx, Transport::$what, 16))
                .note("blocking"),
        ]
    };
}

pub(crate) const CASES: &[Case] = [
    family!(SeqPacket: "seqpacket-rtt", "seqpacket-rtt-poll", "seqpacket-oneway", "seqpacket-oneway-64k"),
    family!(Stream: "stream-rtt", "stream-rtt-poll", "stream-oneway", "stream-oneway-64k"),
    family!(Pipe: "pipe-rtt", "pipe-rtt-poll", "pipe-oneway", "pipe-oneway-64k"),
]
.as_flattened();

#[derive(Clone, Copy, PartialEq, Eq)]
enum Transport {
    SeqPacket,
    Stream,
    Pipe,
}

/// A channel from its first end to its second: {write here, read there}.
struct Channel {
    tx: OwnedFd,
    rx: OwnedFd,
}

impl Channel {
    fn open(what: Transport, poll: bool, bulk: bool) -> Result<Self> {
        let mut fds: [RawFd; 2] = [0; 2];
        let kind = match what {
            Transport::SeqPacket => libc::SOCK_SEQPACKET,
            Transport::Stream => libc::SOCK_STREAM,
            Transport::Pipe => 0,
        };
        // SAFETY: `fds` is a valid place for two descriptors, in both calls.
        let rc = unsafe {
            match what {
                Transport::Pipe => libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC),
                _ => libc::socketpair(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()),
            }
        };
        checked(rc).context("opening a channel")?;
        // SAFETY: both descriptors are new and have no other owner. A pipe reads at its first.
        let (rx, tx) = unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) };
        if what == Transport::Pipe && bulk {
            // SAFETY: takes plain numbers only.
            checked(unsafe { libc::fcntl(tx.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_SIZE) })
                .context("enlarging a pipe")?;
        }
        if poll {
            for fd in [&tx, &rx] {
                // SAFETY: takes plain numbers only.
                checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })
                    .context("fcntl")?;
            }
        }
        Ok(Self { tx, rx })
    }
}

/// One end of a channel with its message buffer of `W` words.
struct End<const W: usize> {
    fd: RawFd,
    buffer: Box<[u64; W]>,
}

impl<const W: usize> End<W> {
    fn new(fd: &OwnedFd) -> Self {
        Self { fd: fd.as_raw_fd(), buffer: Box::new([1; W]) }
    }

    /// Calls `transfer` with the rest of the buffer until it has moved all of it, or polls while it would block.
    #[inline(always)]
    fn all(&mut self, transfer: impl Fn(RawFd, *mut libc::c_void, usize) -> isize) {
        let base: *mut u8 = self.buffer.as_mut_ptr().cast();
        let mut done = 0;
        while done < W * 8 {
            // SAFETY: `done` is below the length of the buffer.
            let n = transfer(self.fd, unsafe { base.add(done) }.cast(), W * 8 - done);
            match usize::try_from(n) {
                Ok(0) => panic!("the peer closed the channel"),
                Ok(n) => done += n,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    assert!(error.kind() == io::ErrorKind::WouldBlock, "transferring a message: {error}");
                }
            }
        }
    }
}

impl<const W: usize> Tx for End<W> {
    #[inline(always)]
    fn send(&mut self, word: u64) {
        // SAFETY: our own buffer of W words.
        unsafe { fill(self.buffer.as_mut_ptr(), W, word) };
        // SAFETY: `all` passes a part of the buffer.
        self.all(|fd, at, len| unsafe { libc::write(fd, at, len) });
    }
}

impl<const W: usize> Rx for End<W> {
    #[inline(always)]
    fn recv(&mut self) -> u64 {
        // SAFETY: `all` passes a part of the buffer.
        self.all(|fd, at, len| unsafe { libc::read(fd, at, len) });
        // SAFETY: our own buffer of W words.
        unsafe { read(self.buffer.as_ptr(), W) }
    }
}

fn rtt(ctx: &Ctx, what: Transport, poll: bool) -> Result<Dist> {
    let (there, back) = (Channel::open(what, poll, false)?, Channel::open(what, poll, false)?);
    harness::pair(
        ctx,
        |meet: &Meet<'_>| {
            meet.wait();
            Some(ctx.ping(&mut End::<SMALL>::new(&there.tx), &mut End::<SMALL>::new(&back.rx)))
        },
        |meet| {
            meet.wait();
            ctx.echo(&mut End::<SMALL>::new(&back.tx), &mut End::<SMALL>::new(&there.rx));
            None
        },
    )
}

fn oneway<const W: usize>(ctx: &Ctx, what: Transport, batch: u64) -> Result<Dist> {
    let channel = Channel::open(what, false, W == BULK)?;
    harness::pair(
        ctx,
        |meet| {
            meet.wait();
            ctx.produce(&mut End::<W>::new(&channel.tx), batch);
            None
        },
        |meet| {
            meet.wait();
            Some(ctx.consume(&mut End::<W>::new(&channel.rx), batch))
        },
    )
}
