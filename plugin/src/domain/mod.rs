//! The DRA driver's own logic: a ResourceClaim is an IPC domain.
//!
//! | file | concept |
//! |---|---|
//! | `domain_config.rs` | the opaque configuration of a claim, `DomainConfig` |
//! | `device_names.rs` | devices of the node, as slices and allocations name them |
//! | `slice.rs` | the devices that the node's ResourceSlices list |
//! | `claim_plan.rs` | what an allocated claim gives to containers; pure |
//! | `checkpoint.rs` | the prepared claims on disk, with the boot id |
//! | `claim_store.rs` | directories, groups and CDI specifications of prepared claims |
//! | `directory_owner.rs` | the mark by which one domain owns the directory of claims |
//! | `directory_watch.rs` | waits until files appear in directories, or vanish |
//! | `driver.rs` | Prepare and Unprepare, as the kubelet asks for them |
//! | `domain_service.rs` | registration, slices and health beside it |
//! | `claim_status.rs` | what the driver says in `status.devices` of a claim |
//! | `drain.rs` | the mark by which no new claim is allocated to the node |
//! | `claim_metrics.rs` | metrics of the claims on this node |
//!
//! A claim's directory belongs to a group that is leased for this claim, so the containers of another claim cannot
//! open its files. The checkpoint is written before anything that must be undone, and each step can be repeated: a
//! driver that is killed at any point continues with the next call or the next start.

mod checkpoint;
mod claim_metrics;
mod claim_plan;
mod claim_status;
mod claim_store;
mod device_names;
mod directory_owner;
mod directory_watch;
mod domain_config;
mod domain_service;
mod drain;
mod driver;
mod slice;

#[cfg(test)]
mod tests;

pub(crate) use claim_metrics::ClaimMetrics;
pub(crate) use domain_service::{DomainService, open_claims};
pub(crate) use drain::set_draining;
pub(crate) use driver::{DomainDriver, SharedClaims};
