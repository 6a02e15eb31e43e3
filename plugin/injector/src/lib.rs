//! What a pod that asks for links gets.
//!
//! A pod asks by the annotation `shmesh.io/links`. [`inject`] is a pure function from the pod and a [`Config`] to a JSON
//! patch, or to a [`Refusal`] that names the annotation's line and the remedy. The webhook and `shmesh-plugin inject` both
//! call it, so they cannot differ.
//!
//! | file | concept |
//! |---|---|
//! | `config.rs` | what the cluster has and allows |
//! | `quantity.rs` | Kubernetes' quantities, and numbers of bytes |
//! | `refusal.rs` | what cannot be honoured: what, where, remedy |
//! | `pod.rs` | looking at a pod without believing its shape |
//! | `plan.rs` | who is on which link, in which directory, with how many bytes |
//! | `rules.rs` | what cannot be honoured |
//! | `edit.rs` | a patch that only adds |
//! | `sidecar.rs` | the sidecar's container |
//! | `inject.rs` | from the plan to the patch |
//! | `manifest.rs` | pods and pod templates in YAML and JSON documents |
//! | `review.rs` | `AdmissionReview` |
//! | `policy.rs` | the same without a server, in CEL, for what needs no YAML |
//! | `certificate/` | the webhook's certificate: made, kept, replaced in time |
//! | `webhook/` | the server |
//! | `command.rs` | `shmesh-plugin inject` and `shmesh-plugin webhook` |
//!
//! ```
//! use serde_json::json;
//! let pod = json!({
//!     "metadata": {"name": "du", "annotations": {"shmesh.io/links": "- name: fronthaul\n"}},
//!     "spec": {"securityContext": {"runAsUser": 1000}, "containers": [{"name": "phy", "image": "phy"}]},
//! });
//! let injected = shmesh_injector::inject(&pod, "radio", &shmesh_injector::Config::default())?;
//! assert_eq!(injected.pod["spec"]["initContainers"][0]["name"], "shmesh");
//! assert!(injected.operations.iter().all(|operation| operation.op == "add"));
//! # Ok::<(), shmesh_injector::Refusal>(())
//! ```
//!
//! # Which links a sidecar keeps
//!
//! A link in scope `pod` is kept by the pod's own sidecar. A link in scope `pool/<name>` is kept by the sidecar of the pod
//! that is its primary; a pod that is only secondary gets no sidecar, but the pool, and a place on the primary's node.
//! `shmesh::config::from_annotation`, which the sidecar calls, has the same rule.

pub mod certificate;
pub mod command;
mod config;
mod edit;
mod inject;
pub mod manifest;
mod plan;
mod pod;
mod policy;
mod quantity;
mod refusal;
pub mod review;
mod rules;
mod sidecar;
pub mod webhook;

pub use config::{Config, Limits, Pool, Shm, Sidecar, UserNamespaces, schema};
pub use edit::Operation;
pub use inject::{Injection, inject};
pub use policy::{POLICY, policy};
pub use quantity::bytes_of;
pub use refusal::Refusal;
pub use shmesh_daemon::bytes::Bytes;
