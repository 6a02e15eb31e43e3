//! Tests of the bridge with real links: in one process with an engine that loses frames, and with processes, Zenoh and a
//! bad network.
#![expect(clippy::unwrap_used, reason = "helpers of tests, which fail by it")]

#[path = "suite/addresses.rs"]
mod addresses;
#[path = "suite/carried.rs"]
mod carried;
#[path = "suite/networks.rs"]
mod networks;
#[path = "suite/primaries.rs"]
mod primaries;
#[path = "suite/processes.rs"]
mod processes;
#[path = "suite/renewal.rs"]
mod renewal;
#[path = "suite/simulation.rs"]
mod simulation;

/// Waits until a participant of the other side is attached.
fn wait_for_peer(link: &shmesh::Link) {
    let me = link.side();
    shmesh_testing::until("a peer attaches", || link.participants().any(|peer| peer.word.side() != me));
}
