//! Registration of one resource with the kubelet, and its gRPC service.
//!
//! | file | concept |
//! |---|---|
//! | `state_machine.rs` | when to listen, register and wait; pure |
//! | `registrar.rs` | executes the actions of the state machine |
//! | `server.rs` | the plugin's socket and gRPC server |
//! | `service.rs` | answers requests of the kubelet |
//! | `client.rs` | requests to the kubelet |

mod client;
mod registrar;
mod server;
mod service;
mod state_machine;

#[cfg(test)]
mod tests;

pub(crate) use client::held;
pub(crate) use registrar::{NodeContext, Registrar};
pub(crate) use server::remove_stale;
pub(crate) use service::{AllocationTimes, ResourceOffer};
pub(crate) use state_machine::Mode;
