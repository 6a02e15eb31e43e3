//! Lists for the operator: processes and their seats.
//!
//! An operator is a process in this pid namespace that runs as the sidecar's user or as root, such as one that `kubectl
//! exec` starts in the sidecar's container. Another pod that shares the socket is in another pid namespace.

use shmesh::{MAX_SEATS, Participant, SeatIndex, Side};
use shmesh_proto::broker::{self, Process, Processes, Seat};
use shmesh_proto::identity::PeerIdentity;
use shmesh_proto::limits::MAX_PACKET_BYTES;
use shmesh_proto::packet;

use crate::broker::{Credentials, Holdings};

/// Maximum bytes of a reply besides processes: its own frame, the counts, and unclaimed seats.
const REST_BYTES: usize = 64 + MAX_SEATS * 24;

/// Whether the process behind a connection is an operator. `me` is this process's effective user id.
pub(crate) fn is_operator(peer: Option<Credentials>, me: u32) -> bool {
    peer.is_some_and(|peer| peer.pid != 0 && (peer.uid == 0 || peer.uid == me))
}

/// One page of processes: as many as fit into a packet, at least one.
pub(crate) fn page(all: impl Iterator<Item = Process>) -> Vec<Process> {
    let mut left = MAX_PACKET_BYTES - REST_BYTES;
    let mut page = Vec::new();
    for mut process in all {
        let mut bytes = wire_bytes(&process);
        if bytes > left && page.is_empty() {
            // Only a hostile identity service sends names that are too long for a cluster.
            process.identity.iter_mut().for_each(|identity| identity.pod = None);
            bytes = wire_bytes(&process);
        }
        let Some(rest) = left.checked_sub(bytes) else { break };
        left = rest;
        page.push(process);
    }
    page
}

/// The size of a process in a packet, with its tag and length.
fn wire_bytes(process: &Process) -> usize {
    packet::encode(&Processes { processes: vec![process.clone()], ..Processes::default() }).len()
}

pub(crate) fn process(
    identity: &PeerIdentity,
    sessions: usize,
    seats: impl Iterator<Item = Participant>,
    holdings: Holdings,
) -> Process {
    Process {
        identity: Some(identity.clone()),
        sessions: count(sessions),
        seats: seats.map(|participant| seat(&participant)).collect(),
        exports: count(holdings.exports),
        imports: count(holdings.imports),
    }
}

pub(crate) fn seat(participant: &Participant) -> Seat {
    let side = match participant.word.side() {
        Side::Primary => broker::Side::Primary,
        Side::Secondary => broker::Side::Secondary,
    };
    Seat { seat: number(participant.seat), side: side.into(), pid: participant.word.pid() }
}

fn number(seat: SeatIndex) -> u32 {
    seat.value().into()
}

pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use shmesh_proto::broker::{AllKeys, KeyInfo, Reply, reply};
    use shmesh_proto::identity::Pod;
    use shmesh_proto::limits::{MAX_LISTED, MAX_LISTED_IMPORTERS};

    use super::*;

    fn big(pod_bytes: usize) -> Process {
        let long = |bytes| "x".repeat(bytes);
        let pod = Pod { uid: long(36), name: long(pod_bytes), confirmed: true, ..Pod::default() };
        let seat = Seat { seat: 63, side: 2, pid: u32::MAX };
        Process {
            identity: Some(PeerIdentity {
                bare_tgid: i32::MAX,
                start_time: u64::MAX,
                pidfd_inode: u64::MAX,
                uid: u32::MAX,
                gid: u32::MAX,
                pod: Some(pod),
            }),
            sessions: u32::MAX,
            seats: vec![seat; MAX_SEATS],
            exports: u32::MAX,
            imports: u32::MAX,
        }
    }

    fn packet_bytes(processes: Vec<Process>) -> usize {
        let unclaimed = vec![Seat { seat: 63, side: 2, pid: u32::MAX }; MAX_SEATS];
        let all = Processes { processes, total: u32::MAX, unidentified: u32::MAX, unclaimed };
        packet::encode(&Reply::new(u64::MAX, reply::Result::Processes(all))).len()
    }

    #[test]
    fn page_fits_into_a_packet() {
        for pod_bytes in [0, 100, 1000, 5000, 8000, 100_000] {
            let page = page(std::iter::repeat_n(big(pod_bytes), 500));
            assert!(!page.is_empty(), "at least one, or asking would never end");
            let bytes = packet_bytes(page);
            assert!(bytes <= MAX_PACKET_BYTES, "{pod_bytes}: {bytes}");
        }
        let small = Process { identity: Some(PeerIdentity::default()), ..Process::default() };
        assert!(page(std::iter::repeat_n(small, 5000)).len() > 100, "and it is filled");
    }

    #[test]
    fn page_of_keys_fits_into_a_packet() {
        let key = KeyInfo {
            hash: "0".repeat(16),
            size: u64::MAX,
            mechanism: i32::MAX,
            exporter: i32::MAX,
            importers: vec![i32::MAX; MAX_LISTED_IMPORTERS],
            importer_count: u32::MAX,
            admitted: u32::MAX,
            open: true,
            closing: true,
        };
        let all = AllKeys { keys: vec![key; MAX_LISTED], total: u32::MAX };
        let bytes = packet::encode(&Reply::new(u64::MAX, reply::Result::AllKeys(all))).len();
        assert!(bytes <= MAX_PACKET_BYTES, "{bytes}");
    }

    #[test]
    fn operators_are_seen_and_trusted() {
        let by = |pid, uid| is_operator(Some(Credentials { pid, uid, gid: 0 }), 65532);
        assert!(by(7, 0) && by(7, 65532));
        assert!(!by(0, 0) && !by(0, 65532), "of another pid namespace, whatever user it says that it is");
        assert!(!by(7, 1000), "of another user");
        assert!(!is_operator(None, 65532));
    }
}
