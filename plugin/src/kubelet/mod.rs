//! One resource and the kubelet.
//!
//! | file | concept |
//! |---|---|
//! | `machine.rs` | when to listen, when to register, when to wait; pure |
//! | `keeper.rs` | does what the machine says |
//! | `server.rs` | a socket with a name, and what is served there |
//! | `service.rs` | the kubelet's questions, answered |
//! | `client.rs` | our questions to the kubelet |

mod client;
mod registrar;
mod server;
mod service;
mod state_machine;

#[cfg(test)]
mod tests;

pub(crate) use client::held;
pub(crate) use registrar::{NodeContext, Registrar};
pub(crate) use server::{PluginLock, remove_stale};
pub(crate) use service::{AllocationTimes, ResourceOffer};
pub(crate) use state_machine::Mode;
