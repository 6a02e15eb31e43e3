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
mod keeper;
mod machine;
mod server;
mod service;

#[cfg(test)]
mod tests;

pub(crate) use client::held;
pub(crate) use keeper::{Keeper, Node};
pub(crate) use machine::Mode;
pub(crate) use server::{Lock, remove_stale};
pub(crate) use service::{Ledger, Offer};
