//! One connection: receiving and sending packets. The only module that waits for a client, for at most a second.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use shmesh_proto::broker::{self, Reply, Request, reply, request};
use shmesh_proto::limits::{ANSWER_MILLIS, MAX_FDS};
use shmesh_proto::packet;
use shmesh_sys::file::may_be_memory;
use shmesh_sys::socket::{self, Packet};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use crate::actor::{ActorEvent, OutgoingPacket};
use crate::broker::{Reason, SessionId};
use crate::events::close_foreign;
use crate::identity::{Connector, KnownPeer};

/// Maximum number of bytes that wait for clients to read them. One account has at most half, which is more than the
/// death of the exporter of all its imports causes, at 256 bytes each.
pub(crate) const OUTGOING_BYTES_MAX: usize = 8 << 20;

/// Maximum number of packets that wait for one client: a death can cause an event for each of its keys. A client that
/// does not read is dismissed before that, when one packet has waited for a second.
pub(crate) const OUTGOING_MAX: usize = 32_768;

/// Maximum number of packets, and of their descriptors, that a participant may send before it has answered a challenge.
const EARLY_MAX: usize = 16;
const EARLY_FDS_MAX: usize = MAX_FDS;

/// The reason why a session ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// The participant closed it, or died.
    Closed,
    /// The client sent something that is not a packet of the protocol.
    Malformed,
    /// The client does not read its packets.
    Slow,
    /// This process has no room for the descriptors that the client sent.
    Full,
    /// The actor ended the session.
    Dismissed,
}

impl End {
    /// The reason for the audit record, if there is one.
    pub(crate) fn reason(self) -> Option<Reason> {
        match self {
            Self::Malformed => Some(Reason::Malformed),
            Self::Slow => Some(Reason::Slow),
            Self::Full => Some(Reason::Descriptors),
            Self::Closed | Self::Dismissed => None,
        }
    }
}

/// A connection of a client, identified or not.
#[derive(Debug)]
pub(crate) struct ClientConnection {
    pub(crate) id: SessionId,
    pub(crate) connection: AsyncFd<OwnedFd>,
    pub(crate) connector: Connector,
}

/// Whether the process that made the connection answers a challenge on it and is alive after that (before Linux 6.5).
/// Earlier packets are kept in `early`. Waits for a first packet without a limit, as only clients that send one read
/// challenges.
pub(crate) async fn answers_challenge(
    session: &ClientConnection,
    known: &KnownPeer,
    early: &mut Vec<Packet>,
) -> Result<bool, End> {
    let connection = &session.connection;
    early.push(next_packet(connection).await?);
    let nonce = nonce().map_err(|_| End::Full)?;
    let challenge = reply::Result::Challenge(broker::Challenge { nonce: nonce.clone() });
    let challenge =
        OutgoingPacket { bytes: packet::encode(&Reply::new(0, challenge)), fds: Vec::new(), _room: None };
    let answered = tokio::time::timeout(Duration::from_millis(ANSWER_MILLIS), async {
        write(connection, &challenge).await?;
        while early.len() < EARLY_MAX
            && early.iter().map(|packet| packet.fds.len()).sum::<usize>() <= EARLY_FDS_MAX
        {
            let packet = next_packet(connection).await?;
            let operation = packet::decode::<Request>(&packet.bytes).ok().and_then(|request| request.op);
            match operation {
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

async fn next_packet(connection: &AsyncFd<OwnedFd>) -> Result<Packet, End> {
    checked(connection.async_io(Interest::READABLE, socket::receive_all).await).await
}

/// Checks a received packet. Descriptors of an invalid one are closed first.
async fn checked(received: io::Result<(Packet, io::Result<()>)>) -> Result<Packet, End> {
    let (packet, is_whole) = received.map_err(|_| End::Closed)?;
    match is_whole {
        Ok(()) if packet.bytes.is_empty() => {
            // The end of the connection, or an empty packet, which may carry descriptors.
            close_foreign(packet.fds).await;
            Err(End::Closed)
        }
        Ok(()) => Ok(packet),
        Err(error) => {
            close_foreign(packet.fds).await;
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
    session: &ClientConnection,
    early: Vec<Packet>,
    actor: &mpsc::Sender<ActorEvent>,
    outgoing: &mut mpsc::Receiver<OutgoingPacket>,
) -> End {
    let mut early = early.into_iter();
    while let Some(packet) = early.next() {
        if let Err(end) = forward(packet, session, actor).await {
            close_foreign(early.flat_map(|packet| packet.fds).collect::<Vec<_>>()).await;
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
                match checked(received).await {
                    Ok(packet) => forward(packet, session, actor).await,
                    Err(end) => Err(end),
                }
            }
        };
        if let Err(end) = end {
            return end;
        }
    }
}

/// Passes one packet to the actor as a request.
async fn forward(
    packet: Packet,
    session: &ClientConnection,
    actor: &mpsc::Sender<ActorEvent>,
) -> Result<(), End> {
    let is_connectors = session.connector.has_sent(&packet);
    let Packet { bytes, fds, .. } = packet;
    let Ok(request) = packet::decode(&bytes) else {
        close_foreign(fds).await;
        return Err(End::Malformed);
    };
    let (fds, foreign): (Vec<_>, Vec<_>) = fds.into_iter().partition(may_be_memory);
    let (has_memory, is_strange) = (!fds.is_empty(), !foreign.is_empty());
    let event = ActorEvent::Request { session: session.id, request, fds, is_strange, is_connectors };
    let sent = actor.send(event).await.map_err(|_| End::Dismissed);
    if is_strange {
        // The session waits for the close: a correct client never sends such a descriptor.
        close_foreign(foreign).await;
    } else if has_memory {
        // The actor handles the descriptors first, so that packets of one connection do not pile up here.
        tokio::task::yield_now().await;
    }
    sent
}

async fn write(connection: &AsyncFd<OwnedFd>, packet: &OutgoingPacket) -> Result<(), End> {
    let fds: Vec<_> = packet.fds.iter().map(|fd| fd.as_fd()).collect();
    let sent = connection.async_io(Interest::WRITABLE, |fd| socket::send(fd, &packet.bytes, &fds));
    match tokio::time::timeout(Duration::from_millis(ANSWER_MILLIS), sent).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(End::Closed),
        Err(_) => Err(End::Slow),
    }
}
