//! What the daemons of shmesh share, so that they cannot drift apart.
//!
//! | file | concept |
//! |---|---|
//! | [`args`] | flags that every daemon has |
//! | [`telemetry`] | structured logs with a filter that can be changed while it runs |
//! | [`readiness`] | latches: ready when all are open |
//! | [`admin`] | `/livez`, `/readyz`, `/metrics`, `/log-level` |
//! | [`shutdown`] | SIGTERM and SIGINT |
//! | [`descriptor`] | descriptors in the event loop, and those of processes |
//!
//! It is never a dependency of the transport.

pub mod admin;
pub mod args;
pub mod descriptor;
pub mod readiness;
pub mod shutdown;
pub mod telemetry;
