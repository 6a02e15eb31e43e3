//! One connection: packets in, packets out. The only place that waits for a participant, and never for long.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use shmesh_proto::broker::{self, Reply, Request, reply, request};
use shmesh_proto::limits::{ANSWER_MILLIS, MAX_FDS};
use shmesh_proto::packet;
use shmesh_sys::file::may_be_memory;
use shmesh_sys::socket::{self, Packet};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use crate::actor::ActorEvent;
use crate::broker::{Account, Reason, SessionId};
use crate::events::close_elsewhere;
use crate::identity::{Connector, Known};
use crate::shares::Share;

/// Bytes that wait to be read by participants, all together. One account has half of them at most: more than a death of the
/// exporter of all its imports takes, at 256 bytes for each.
pub(crate) const OUTGOING_BYTES_MAX: usize = 8 << 20;

/// Packets that wait to be read by a participant, at most: a death can mean an event for each of its keys. Who does not read
/// is dismissed long before, when one packet has waited for a second.
pub(crate) const OUTGOING_MAX: usize = 32_768;

/// Packets that a participant may send before it has answered a challenge, and descriptors with them.
const EARLY_MAX: usize = 16;
const EARLY_FDS_MAX: usize = MAX_FDS;

/// One packet to a participant.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
    /// Of the bytes that may wait; not of a challenge.
    pub(crate) _room: Option<Share<Account>>,
}

impl Outgoing {
    /// What a packet takes besides its bytes, in the queue and in the allocator.
    pub(crate) const OVERHEAD: usize = 128;
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// The participant closed it, or died.
    Closed,
    /// It sent what is no packet of the protocol.
    Malformed,
    /// It does not read.
    Slow,
    /// There are no descriptors left for those that it sent.
    Full,
    /// The actor ended it.
    Dismissed,
}

impl End {
    /// What is written down of it.
    pub(crate) fn reason(self) -> Option<Reason> {
        match self {
            Self::Malformed => Some(Reason::Malformed),
            Self::Slow => Some(Reason::Slow),
            Self::Full => Some(Reason::Descriptors),
            Self::Closed | Self::Dismissed => None,
        }
    }
}

/// A connection whose other end is known, or is known not to be.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) connection: AsyncFd<OwnedFd>,
    pub(crate) connector: Connector,
}

/// Before Linux 6.5: whether who made the connection still answers on it, and lives after that. What it has sent before is
/// kept in `early`. Waits for a first packet as long as it takes: nobody else reads challenges.
pub(crate) async fn proves(session: &Session, known: &Known, early: &mut Vec<Packet>) -> Result<bool, End> {
    let connection = &session.connection;
    early.push(next(connection).await?);
    let nonce = nonce().map_err(|_| End::Full)?;
    let challenge = reply::Result::Challenge(broker::Challenge { nonce: nonce.clone() });
    let challenge =
        Outgoing { bytes: packet::encode(&Reply::new(0, challenge)), fds: Vec::new(), _room: None };
    let answered = tokio::time::timeout(Duration::from_millis(ANSWER_MILLIS), async {
        write(connection, &challenge).await?;
        while early.len() < EARLY_MAX
            && early.iter().map(|packet| packet.fds.len()).sum::<usize>() <= EARLY_FDS_MAX
        {
            let packet = next(connection).await?;
            let said = packet::decode::<Request>(&packet.bytes).ok().and_then(|request| request.op);
            match said {
                Some(request::Op::Proof(proof)) if session.connector.has_sent(&packet) => {
                    return Ok(proof.nonce == nonce);
                }
                _ => early.push(packet),
            }
        }
        Ok(false)
    });
    let lives = || known.pidfd.as_ref().is_some_and(|pidfd| pidfd.has_ended().is_ok_and(|ended| !ended));
    Ok(answered.await.unwrap_or(Ok(false))? && lives())
}

async fn next(connection: &AsyncFd<OwnedFd>) -> Result<Packet, End> {
    whole(connection.async_io(Interest::READABLE, socket::receive_all).await).await
}

/// A packet, unless it is none: then what came with it is closed first.
async fn whole(received: io::Result<(Packet, io::Result<()>)>) -> Result<Packet, End> {
    let (packet, is_whole) = received.map_err(|_| End::Closed)?;
    match is_whole {
        Ok(()) if packet.bytes.is_empty() => {
            // The end, or an empty packet, with which something may come all the same.
            close_elsewhere(packet.fds).await;
            Err(End::Closed)
        }
        Ok(()) => Ok(packet),
        Err(error) => {
            close_elsewhere(packet.fds).await;
            Err(if error.kind() == io::ErrorKind::InvalidData { End::Malformed } else { End::Full })
        }
    }
}

fn nonce() -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 16];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(bytes)
}

/// Serves one connection until it ends.
pub(crate) async fn serve(
    session: &Session,
    early: Vec<Packet>,
    actor: &mpsc::Sender<ActorEvent>,
    outgoing: &mut mpsc::Receiver<Outgoing>,
) -> End {
    let mut early = early.into_iter();
    while let Some(packet) = early.next() {
        if let Err(end) = read(packet, session, actor).await {
            close_elsewhere(early.collect()).await;
            return end;
        }
    }
    let connection = &session.connection;
    loop {
        let end = tokio::select! {
            biased;
            packet = outgoing.recv() => match packet {
                Some(packet) => write(connection, &packet).await,
                None => Err(End::Dismissed),
            },
            received = connection.async_io(Interest::READABLE, socket::receive_all) => {
                match whole(received).await {
                    Ok(packet) => read(packet, session, actor).await,
                    Err(end) => Err(end),
                }
            }
        };
        if let Err(end) = end {
            return end;
        }
    }
}

async fn read(packet: Packet, session: &Session, actor: &mpsc::Sender<ActorEvent>) -> Result<(), End> {
    let is_connectors = session.connector.has_sent(&packet);
    let Packet { bytes, fds, .. } = packet;
    let Ok(request) = packet::decode(&bytes) else {
        close_elsewhere(fds).await;
        return Err(End::Malformed);
    };
    let (fds, strange): (Vec<_>, Vec<_>) = fds.into_iter().partition(may_be_memory);
    let (has_memory, is_strange) = (!fds.is_empty(), !strange.is_empty());
    let told = ActorEvent::Request { session: session.id, request, fds, is_strange, is_connectors };
    let read = actor.send(told).await.map_err(|_| End::Dismissed);
    if is_strange {
        // However long that takes: nobody who means well sends one.
        close_elsewhere(strange).await;
    } else if has_memory {
        // The actor looks at them first: what one connection sends must not pile up here.
        tokio::task::yield_now().await;
    }
    read
}

async fn write(connection: &AsyncFd<OwnedFd>, packet: &Outgoing) -> Result<(), End> {
    let fds: Vec<_> = packet.fds.iter().map(|fd| fd.as_fd()).collect();
    let sent = connection.async_io(Interest::WRITABLE, |fd| socket::send(fd, &packet.bytes, &fds));
    match tokio::time::timeout(Duration::from_millis(ANSWER_MILLIS), sent).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(End::Closed),
        Err(_) => Err(End::Slow),
    }
}
