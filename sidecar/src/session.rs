//! One connection: packets in, packets out. The only place that waits for a participant, and never for long.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use shmesh::sys::socket::{self, Packet};
use shmesh_proto::broker::{self, Reply, Request, reply, request};
use shmesh_proto::limits::ANSWER_MILLIS;
use shmesh_proto::packet;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use crate::broker::SessionId;
use crate::hub::ToHub;
use crate::identity::{Connector, Known};

/// Packets that wait to be read by a participant, at most: a death can mean an event for each of its keys. Who does not read
/// is dismissed long before, when one packet has waited for a second.
pub(crate) const OUTGOING_MAX: usize = 32_768;

/// Packets that a participant may send before it has answered a challenge.
const EARLY_MAX: usize = 16;

/// One packet to a participant.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
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
    /// The hub ended it.
    Dismissed,
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
pub(crate) async fn proves(session: &Session, known: &Known, early: &mut Vec<Packet>) -> io::Result<bool> {
    let next = || session.connection.async_io(Interest::READABLE, socket::receive_from);
    early.push(next().await?);
    let nonce = nonce()?;
    let challenge = reply::Result::Challenge(broker::Challenge { nonce: nonce.clone() });
    let challenge = Outgoing { bytes: packet::encode(&Reply::new(0, challenge)), fds: Vec::new() };
    let answered = tokio::time::timeout(Duration::from_millis(ANSWER_MILLIS), async {
        if write(&session.connection, &challenge).await.is_err() {
            return Ok(false);
        }
        while early.len() < EARLY_MAX {
            let packet = next().await?;
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
    Ok(answered.await.unwrap_or(io::Result::Ok(false))? && lives())
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
    hub: &mpsc::Sender<ToHub>,
    outgoing: &mut mpsc::Receiver<Outgoing>,
) -> End {
    for packet in early {
        if let Err(end) = read(Ok(packet), session, hub).await {
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
            received = connection.async_io(Interest::READABLE, socket::receive_from) => {
                read(received, session, hub).await
            }
        };
        if let Err(end) = end {
            return end;
        }
    }
}

async fn read(received: io::Result<Packet>, session: &Session, hub: &mpsc::Sender<ToHub>) -> Result<(), End> {
    let packet = received.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => End::Malformed,
        _ if error.raw_os_error() == Some(libc::EMFILE) => End::Full,
        _ => End::Closed,
    })?;
    if packet.bytes.is_empty() {
        return Err(End::Closed);
    }
    let request: Request = packet::decode(&packet.bytes).map_err(|_| End::Malformed)?;
    let is_connectors = session.connector.has_sent(&packet);
    let Packet { fds, .. } = packet;
    let has_descriptors = !fds.is_empty();
    let told = ToHub::Request { session: session.id, request, fds, is_connectors };
    hub.send(told).await.map_err(|_| End::Dismissed)?;
    if has_descriptors {
        // The hub looks at them first: what one connection sends must not pile up here.
        tokio::task::yield_now().await;
    }
    Ok(())
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
