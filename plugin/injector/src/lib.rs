//! Injects sidecars and shared-memory resources into pods that request links.
//!
//! A pod requests links with the annotation `shmesh.io/links`, or a directory alone with `shmesh.io/share`. [`inject`] is a pure function from the pod and
//! a [`Config`] to a JSON patch, or to a [`Refusal`] with the line of the annotation and the remedy. The
//! webhook and `shmesh-plugin inject` both call it.
//!
//! | file | concept |
//! |---|---|
//! | `config.rs` | configuration |
//! | `quantity.rs` | Kubernetes quantities |
//! | `refusal.rs` | why a pod is refused |
//! | `pod.rs` | access to an untrusted pod |
//! | `plan.rs` | containers, directory and size of each link |
//! | `pod_claims.rs` | ResourceClaims of a pod |
//! | `rules.rs` | checks that refuse a pod |
//! | `share.rs` | a pool or a claim for programs that know nothing of shmesh |
//! | `preload.rs` | the library for such programs |
//! | `edit.rs` | JSON patches that only add |
//! | `sidecar.rs` | the sidecar's container |
//! | `bridge.rs` | the bridge's container, for links to other nodes |
//! | `inject.rs` | turns a plan into a patch |
//! | `manifest.rs` | pods and pod templates in YAML and JSON documents |
//! | `domain_claim.rs` | ResourceClaims for the links of pods |
//! | `review.rs` | `AdmissionReview` |
//! | `certificate/` | the webhook's certificate |
//! | `webhook/` | the HTTPS server |
//! | `command.rs` | the subcommands `inject`, `claim` and `webhook` |
//!
//! # Which sidecar keeps a link
//!
//! A link in scope `pod` is kept by the sidecar of that pod. A link in scope `pool/<name>` is kept by the
//! sidecar of the primary's pod; a secondary gets no sidecar, but the pool and affinity to the node of the
//! primary. In scope `claim/<name>` it is the same, with the ResourceClaim in place of pool and affinity: the scheduler
//! sends all pods with a claim to one node, whichever comes first. `shmesh::config::from_annotation`, which the sidecar calls, implements the same rule.

mod bridge;
pub mod certificate;
pub mod command;
mod config;
mod domain_claim;
mod edit;
mod inject;
pub mod manifest;
mod plan;
mod pod;
mod pod_claims;
mod preload;
mod quantity;
mod refusal;
pub mod review;
mod rules;
mod share;
mod sidecar;
pub mod webhook;

pub use config::{
    BridgeNamespace, Config, InjectedBridge, Limits, Pool, Shm, Sidecar, UserNamespaces, schema,
};
pub use domain_claim::{ClaimKind, claims};
pub use edit::Operation;
pub use inject::{Injection, inject};
pub use pod::SIDECAR;
pub use quantity::bytes_of;
pub use refusal::Refusal;
pub use shmesh_sys::quantity::Bytes;
