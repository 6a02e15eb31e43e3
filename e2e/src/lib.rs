//! End-to-end tests on a cluster. None are built yet.
//!
//! They will install the chart of `helm/`, run the samples of `manifests/`, and check what only a cluster can show: that
//! containers of one pod, and pods of one node, share a link; that a killed container costs nothing; that a kubelet restart
//! is survived. They are not a default member of the workspace.
