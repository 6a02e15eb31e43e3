#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod api_error;
pub mod backoff;
mod claims;
mod device_status;
mod driver;
mod grpc;
mod instance_lock;
mod node;
mod serve;
mod settings;
mod slices;
mod socket;

pub use claims::Claims;
pub use device_status::DeviceStatuses;
pub use driver::{ClaimRef, DeviceHealth, Driver, HealthState, PreparedDevice};
pub use serve::serve;
pub use settings::{DriverSettings, ServeError};
pub use slices::{PublisherState, SlicePublisher};
