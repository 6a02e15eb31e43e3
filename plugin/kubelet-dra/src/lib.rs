//! The node's half of a Kubernetes driver for dynamic resource allocation (DRA).

#![deny(missing_docs)]

mod claims;
mod driver;

pub use claims::Claims;
pub use driver::{ClaimRef, DeviceHealth, Driver, HealthState, PreparedDevice};
