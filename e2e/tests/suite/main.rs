//! Tests below the cluster, with real programs and doubles of the kubelet and the API server, and of the program
//! that tests a cluster.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cluster;
mod command;
mod identity;
mod node;
mod samples;
mod scripts;
mod support;

shmesh_testing::peer_process!(shmesh_testing::serve);
