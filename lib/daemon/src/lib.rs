//! Shared building blocks of the shmesh daemons.
//!
//! | module | contents |
//! |---|---|
//! | [`args`] | command-line flags |
//! | [`telemetry`] | structured logs with a filter that can be changed at run time |
//! | [`readiness`] | latches that must all be open before the daemon is ready |
//! | [`admin`], `limited.rs` | `/livez`, `/readyz`, `/metrics`, `/log-level` |
//! | [`resident`] | less resident memory after the start |
//! | [`shutdown`] | SIGTERM and SIGINT |
//! | [`descriptor`] | file descriptors in the event loop |
//! | [`log_limit`] | rate limit for log lines |
//!
//! The transport must not depend on this crate.

pub mod admin;
pub mod args;
pub mod descriptor;
mod limited;
pub mod readiness;
pub mod resident;
pub mod shutdown;
pub mod telemetry;

pub use shmesh_log_limit as log_limit;
