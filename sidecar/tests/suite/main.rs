//! The sidecar and its broker: random commands against a model, and real processes around a real sidecar.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

// Tests start in the order of their names: those that wait for ten seconds start first.
mod after_a_restart;
mod attacks;
mod beside_a_bad_link;
mod broker;
mod broker_model;
mod device;
mod device_pools;
mod hostile;
mod kills;
mod library;
mod lingering;
mod links;
mod metrics;
mod operator;
mod shares;
mod strangers;
mod support;
mod unprivileged;
mod vendors;

shmesh_testing::peer_process!(vendors::serve);
