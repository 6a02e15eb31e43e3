//! The sidecar of a pod: keeps its links, says who may attach, brokers device keys, takes back what the dead held.
//!
//! ```text
//!  accept -> identity -> session --ActorEvent--> actor --Command--> broker (device keys)
//!                           ^                |  \--> links (hosts)
//!                           '----Outgoing----'
//! ```
//!
//! | file | concept |
//! |---|---|
//! | [`args`], [`config`] | flags; which links to keep |
//! | `run.rs` | from start to end; accepting connections |
//! | `identity.rs` | who is at the other end |
//! | `events.rs` | closing descriptors of strangers |
//! | `pending.rs` | who has connected and proved nothing yet |
//! | `shares.rs` | how much of what is scarce one source may take |
//! | `session.rs` | one connection: packets in, packets out |
//! | `actor/` | the one task that owns all state; attaching, seats, deaths |
//! | [`broker`] | device keys: a state machine without I/O |
//! | `links.rs` | the links: each kept by a task of its own, which retries |
//! | `inspect.rs` | what an operator is told |
//! | `audit/`, `metrics.rs` | what is written down and counted |
//!
//! It depends on `lib` and not on `plugin`, and is not on the path of a message.

mod actor;
pub mod args;
mod audit;
pub mod broker;
pub mod config;
mod events;
mod identity;
mod inspect;
mod links;
mod metrics;
mod pending;
pub mod run;
mod session;
mod shares;
