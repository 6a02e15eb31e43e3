//! What the daemons of shmesh share, so that they cannot drift apart.
//!
//! | file | concept |
//! |---|---|
//! | [`args`] | flags that every daemon has |
//! | [`telemetry`] | structured logs with a filter that can be changed while it runs |
//! | [`readiness`] | latches: ready when all are open |
//! | [`admin`], `limited.rs` | `/livez`, `/readyz`, `/metrics`, `/log-level`, for whoever lingers as well |
//! | [`shutdown`] | SIGTERM and SIGINT |
//! | [`descriptor`] | descriptors in the event loop |
//! | [`bytes`] | `64Mi` in configurations |
//! | [`log_limit`] | a log that others cannot flood |
//!
//! It is never a dependency of the transport.

pub mod admin;
pub mod args;
pub mod bytes;
pub mod descriptor;
mod limited;
pub mod readiness;
pub mod shutdown;
pub mod telemetry;

pub use shmesh_log_limit as log_limit;
