//! The sidecar of a pod: keeps its links, controls attachment, brokers device keys, recovers dead participants.
//!
//! ```text
//!  accept -> identity -> session --ActorEvent--> actor --Command--> broker (device keys)
//!                           ^                |  \--> links (hosts)
//!                           '----OutgoingPacket----'
//! ```
//!
//! | file | concept |
//! |---|---|
//! | [`args`], [`config`] | flags; the links to keep |
//! | `run.rs` | lifecycle; accepting connections |
//! | `identity.rs` | identity of the process behind a connection |
//! | `events.rs` | closing descriptors of clients |
//! | `pending.rs` | clients that have not proved their identity yet |
//! | `shares.rs` | fair shares of limited resources |
//! | `session.rs` | one connection: receiving and sending packets |
//! | `actor/` | the one task that owns all state; attaching, seats, deaths |
//! | [`broker`] | device keys: a state machine without I/O |
//! | `links.rs` | the links: each kept by a task of its own, which retries |
//! | `inspect.rs` | lists for the operator |
//! | `audit/`, `metrics.rs` | audit log and metrics |
//! | [`library`] | copies the preload library into pods that ask for it |
//! | [`start`] | holds back the other containers of the pod until the links are there |
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
pub mod library;
mod links;
mod metrics;
mod pending;
pub mod run;
mod session;
mod shares;
pub mod start;
