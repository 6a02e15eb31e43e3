//! Memory of GPUs and NPUs between real processes in real namespaces, brokered by a real sidecar, over doubles of the
//! vendors' libraries. Nothing here has been near a device.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod ascend;
mod cuda;
mod kills;
mod peer;
#[path = "../../../lib/tests/peers/mod.rs"]
mod peers;
mod pools;
#[path = "../support/mod.rs"]
mod support;

#[test]
#[ignore = "the body of other processes"]
fn peer_process() {
    peer::serve();
}
