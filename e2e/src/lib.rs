//! End-to-end tests: what takes more than one program.
//!
//! | place | what it tests |
//! |---|---|
//! | `tests/node.rs` | a node below the cluster: kubelet double, real plugin, containers made by `unshare` of what was allocated, sidecar and applications in them; kills of each |
//! | `tests/identity.rs` | the sidecar and the node's identity service, in pid namespaces as in pods |
//! | `tests/command.rs` | the command line tool with a running sidecar |
//! | `kubelet/` | a crate of its own: the kubelet double, for tests of any device plugin |
//!
//! They need root where they make namespaces, and say so where they skip. Tests on a cluster are not built yet. They will install
//! the chart of `helm/`, run the samples of `manifests/`, and check what only a cluster can show. They are not a default member
//! of the workspace.
