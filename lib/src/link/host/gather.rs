//! Gathering: a new host gets the memory of a link from the processes that have it.
//!
//! Each process on the link connects to a new host and asks for the link. The host answers that it needs the memory, and
//! the process offers it. One offer is enough, so the host need not wait for a process that is stopped.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{Reply, Request, Wanted, reply, request};
use shmesh_proto::packet;
use shmesh_sys::file::is_size_sealed;
use shmesh_sys::{poll, socket};

use super::{HostListener, SESSIONS_MAX, discard, hang_up};
use crate::error::{Error, Result};

/// Interval at which to check whether a process is still on the link.
const LOOK: Duration = Duration::from_millis(10);

/// The result of gathering.
pub(in crate::link) enum GatherOutcome<T> {
    Memory(T),
    /// No process is on the link any more, so its memory is gone.
    NoProcess,
    /// Processes are on the link, but none has offered memory.
    NoOffer,
}

/// Waits until a process offers something that `accept` takes.
pub(in crate::link) fn gather<T>(
    listening: &HostListener,
    limit: Duration,
    is_anybody: impl Fn() -> Result<bool>,
    accept: impl Fn(Vec<File>) -> Result<Option<T>>,
) -> Result<GatherOutcome<T>> {
    let deadline = Instant::now() + limit;
    let (mut sessions, mut refused) = (Vec::<OwnedFd>::new(), None::<Error>);
    let end = |sessions: Vec<OwnedFd>| sessions.into_iter().for_each(hang_up);
    loop {
        let is_over = Instant::now() >= deadline;
        let gathered = match is_anybody() {
            Ok(true) if !is_over => None,
            Ok(true) => Some(refused.take().map_or(Ok(GatherOutcome::NoOffer), Err)),
            Ok(false) => Some(Ok(GatherOutcome::NoProcess)),
            Err(error) => Some(Err(error)),
        };
        if let Some(gathered) = gathered {
            end(sessions);
            return gathered;
        }
        wait(listening, &sessions);
        if let Ok(connection) = socket::accept_nonblocking(&listening.listener) {
            if sessions.len() == SESSIONS_MAX {
                // The session that has been silent for the longest time.
                hang_up(sessions.remove(0));
            }
            sessions.push(connection);
        }
        let mut i = 0;
        while i < sessions.len() {
            match read_session(&sessions[i]) {
                SessionMessage::None => i += 1,
                SessionMessage::Offer(fds) => match accept(fds) {
                    Ok(Some(memory)) => {
                        end(sessions);
                        return Ok(GatherOutcome::Memory(memory));
                    }
                    // Another process may have better memory.
                    Ok(None) => hang_up(sessions.remove(i)),
                    Err(error) => {
                        refused = Some(error);
                        hang_up(sessions.remove(i));
                    }
                },
                SessionMessage::End => hang_up(sessions.remove(i)),
            }
        }
    }
}

fn wait(listening: &HostListener, sessions: &[OwnedFd]) {
    let fds = std::iter::once(listening.listener.as_fd()).chain(sessions.iter().map(AsFd::as_fd));
    let fds: Vec<_> = fds.collect();
    let mut watches: Vec<_> = fds.iter().map(poll::Watch::readable).collect();
    if poll::wait_once(&mut watches, Some(LOOK))
        .is_err_and(|error| error.kind() != io::ErrorKind::Interrupted)
    {
        std::thread::sleep(LOOK);
    }
}

enum SessionMessage {
    None,
    Offer(Vec<File>),
    End,
}

fn read_session(session: &OwnedFd) -> SessionMessage {
    let packet = match socket::receive_now(session) {
        Ok(packet) => packet,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return SessionMessage::None,
        Err(_) => return SessionMessage::End,
    };
    let is_offer = |request: &Request| matches!(request.op, Some(request::Op::Offer(_)));
    match packet::decode::<Request>(&packet.bytes) {
        // No other descriptor is examined: what cannot be sealed may come from a hostile process, and block.
        Ok(request) if is_offer(&request) && packet.fds.iter().all(is_size_sealed) => {
            SessionMessage::Offer(packet.fds.into_iter().map(File::from).collect())
        }
        Ok(Request { id, op: Some(request::Op::Attach(_)), .. }) => {
            discard(packet.fds);
            let wanted = packet::encode(&Reply::new(id, reply::Result::Wanted(Wanted {})));
            if socket::send_now(session, &wanted, &[]).is_ok() {
                SessionMessage::None
            } else {
                SessionMessage::End
            }
        }
        _ => {
            discard(packet.fds);
            SessionMessage::End
        }
    }
}
