//! One connection: packets in, packets out. The only place that waits for a participant, and never for long.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use shmesh::sys::socket;
use shmesh_proto::broker::Request;
use shmesh_proto::limits::ANSWER_MILLIS;
use shmesh_proto::packet;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use crate::broker::SessionId;
use crate::hub::ToHub;

/// Packets that wait to be read by a participant, at most: a death can mean an event for each of its keys. Who does not read
/// is dismissed long before, when one packet has waited for a second.
pub(crate) const OUTGOING_MAX: usize = 32_768;

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

/// Serves one connection until it ends.
pub(crate) async fn serve(
    connection: &AsyncFd<OwnedFd>,
    session: SessionId,
    hub: &mpsc::Sender<ToHub>,
    outgoing: &mut mpsc::Receiver<Outgoing>,
) -> End {
    loop {
        let end = tokio::select! {
            biased;
            packet = outgoing.recv() => match packet {
                Some(packet) => write(connection, &packet).await,
                None => Err(End::Dismissed),
            },
            received = connection.async_io(Interest::READABLE, socket::receive) => {
                read(received, session, hub).await
            }
        };
        if let Err(end) = end {
            return end;
        }
    }
}

async fn read(
    received: io::Result<(Vec<u8>, Vec<OwnedFd>)>,
    session: SessionId,
    hub: &mpsc::Sender<ToHub>,
) -> Result<(), End> {
    let (bytes, fds) = received.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => End::Malformed,
        _ if error.raw_os_error() == Some(libc::EMFILE) => End::Full,
        _ => End::Closed,
    })?;
    if bytes.is_empty() {
        return Err(End::Closed);
    }
    let request: Request = packet::decode(&bytes).map_err(|_| End::Malformed)?;
    let has_descriptors = !fds.is_empty();
    hub.send(ToHub::Request { session, request, fds }).await.map_err(|_| End::Dismissed)?;
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
