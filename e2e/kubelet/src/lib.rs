//! A kubelet double: the kubelet's side of the device plugin protocol, as Kubernetes 1.36 plays it.
//!
//! | file | concept |
//! |---|---|
//! | `node.rs` | [`Node`]: what a script does, and what it can see |
//! | `config.rs` | [`Config`]: which kubelet, where its files are, whose time |
//! | `clock.rs` | [`Clock`]: the runtime's time, or the script's |
//! | `pod.rs` | [`Pod`], [`Container`], and what becomes of them |
//! | `journal.rs` | [`Event`]: what has happened |
//! | `api.rs` | what outlives the kubelet: pods, containers, the node's status |
//! | `kubelet.rs` | one run of the kubelet: admission, containers, node status |
//! | `devices` | the device manager: which devices there are, and who has them |
//! | `registry` | plugins that register, and plugins that are found |
//! | `podresources.rs` | the server that says which pod has which device |
//! | `soak.rs` | [`soak`]: random sequences against an oracle |
//! | `wire` | gRPC as Go does it |
//! | `names.rs`, `random.rs`, `process.rs` | names of resources; chance that can be repeated; tasks that end together |
//!
//! See the README for what it does like the real one, and what it leaves out.

mod api;
mod clock;
mod config;
mod devices;
mod journal;
mod kubelet;
mod names;
mod node;
mod pod;
mod podresources;
mod process;
mod random;
mod registry;
mod soak;
mod wire;

pub use api::Quantity;
pub use clock::{Clock, Hand};
pub use config::{Config, Paths, Race};
pub use journal::{Event, Record};
pub use names::is_extended_resource_name;
pub use node::{Holder, Late, Node};
pub use pod::{Container, ContainerState, ContainerStatus, Phase, Pod, PodStatus, RunOptions};
pub use random::Chance;
pub use soak::{Failure, Report, Step, Subject, soak};

/// Whether a kubelet would believe this checkpoint, by its checksum; `None` if it could not read it.
///
/// ```
/// let checkpoint = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
/// assert_eq!(shmesh_fake_kubelet::checkpoint_is_intact(checkpoint), Some(false));
/// ```
pub fn checkpoint_is_intact(text: &str) -> Option<bool> {
    devices::checksum_matches(text)
}
