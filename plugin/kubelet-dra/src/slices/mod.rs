//! The ResourceSlices of a node.
//!
//! | file | concept |
//! |---|---|
//! | `publisher.rs` | watches the slices and writes what a plan says |
//! | `plan.rs` | compares the slices that are there with those that should be; pure |
//! | `equality.rs` | devices that are equal although they are written differently |
//! | `turn.rs` | which of two instances publishes |

mod equality;
mod plan;
#[cfg(test)]
mod plan_tests;
mod publisher;
mod turn;

pub use publisher::{PublisherState, SlicePublisher};
