//! The sidecar and its broker: random commands against a model, and real processes around a real sidecar.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod attacks;
mod broker;
mod broker_model;
mod device;
mod device_pools;
mod hostile;
mod kills;
mod lingering;
mod links;
mod metrics;
mod operator;
mod restarts;
mod shares;
mod strangers;
mod support;
mod two_links;
mod unprivileged;
mod vendors;

shmesh_testing::peer_process!(vendors::serve);
