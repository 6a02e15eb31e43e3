//! A fake kubelet: the kubelet's side of the device plugin protocol and of dynamic resource allocation, as in Kubernetes 1.36.
//!
//! | file | contents |
//! |---|---|
//! | `node.rs` | [`Node`]: actions on a node, and its state |
//! | `config.rs` | [`Config`]: paths, clock and behaviour of the kubelet |
//! | `clock.rs` | [`Clock`]: tokio's clock, starting at zero |
//! | `pod.rs` | [`Pod`], [`Container`], and their status |
//! | `journal.rs` | [`Event`]: the log of events |
//! | `api.rs` | state that outlives the kubelet: pods, containers, the status of the node |
//! | `apiserver` | [`ApiServer`]: a double of the API server |
//! | `kubelet.rs` | one run of the kubelet: admission, containers, node status |
//! | `devices` | the device manager: devices and their allocation |
//! | `dra` | dynamic resource allocation: claims and their drivers |
//! | `registry` | registration and discovery of plugins |
//! | `podresources.rs` | the pod resources server |
//! | `claim_soak.rs` | [`claim_soak`]: random sequences around claims, against an oracle |
//! | `wire` | gRPC with the quirks of grpc-go |
//! | `names.rs`, `random.rs`, `process.rs` | resource names; a seeded random generator; task groups |
//!
//! The README lists the behaviour of the real kubelet that is reproduced, and the limitations.

mod api;
mod apiserver;
mod claim_soak;
mod clock;
mod config;
mod devices;
mod dra;
mod journal;
mod kubelet;
mod names;
mod node;
mod pod;
mod podresources;
mod process;
mod random;
mod registry;
mod wire;

pub use api::Quantity;
pub use apiserver::{ApiError, ApiServer, RequestKind, Verb};
pub use claim_soak::{ClaimReport, ClaimStep, DriverSubject, Failure, claim_soak};
pub use clock::Clock;
pub use config::{Config, Paths, Race};
pub use dra::PreparedClaim;
pub use journal::{Event, Record};
pub use names::is_extended_resource_name;
pub use node::{Holder, Late, Node};
pub use pod::{Container, ContainerState, ContainerStatus, Phase, Pod, PodClaim, PodStatus, RunOptions};

/// Whether a kubelet would accept this checkpoint by its checksum; `None` if it cannot be parsed.
pub fn checkpoint_is_intact(text: &str) -> Option<bool> {
    devices::checksum_matches(text)
}
