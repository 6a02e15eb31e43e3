//! End-to-end tests: what takes more than one program.
//!
//! `kubelet/` is a crate of its own: a kubelet double, for tests of the device plugin.
//! `tests/identity.rs` runs the sidecar and the node's identity service together, in pid namespaces as in pods.
//! `tests/command.rs` asks a running sidecar with the command line tool.
//!
//! Tests on a cluster are not built yet. They will install the chart of `helm/`, run the samples of `manifests/`, and check what only a cluster can show: that
//! containers of one pod, and pods of one node, share a link; that a killed container costs nothing; that a kubelet restart
//! is survived. They are not a default member of the workspace.
