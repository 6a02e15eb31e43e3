//! Shared-memory links between the processes of one machine: no copy, and no system call on the hot path.
//!
//! ```text
//!   primary (PHY, trainer)                        secondary (MAC, loader)
//!        |   ----- ring m2s ----->  messages  ----------->   |
//!        |   <---- ring s2m ------  messages  <-----------   |
//!        |                                                   |
//!        '---- pools: cpu_msg, cpu_data, cpu_large ----------'     each buffer with an owner word
//!        '---- seats: attached participants -----------------'
//! ```
//!
//! A [`Link`] connects a primary and a secondary side. A sender [loans](Link::loan) a buffer, writes the message in place,
//! and [sends](Loan::send) it: an index crosses, the bytes stay. A receiver [receives](Link::receive) the message and drops
//! it, which frees the buffer. Receivers of one side share a queue: each message goes to one of them
//! ([`Receivers`](config::Receivers)). Small messages [travel in the ring](Link::send_inline). Any participant may be
//! killed at any instruction without disturbing the others: [`Link::recover`] recovers its buffers.
//!
//! [`Link::typed`] makes messages values of one type, or slices of them, and refuses a peer that uses another type;
//! [`Link::typed_requests`] does so for requests and their replies.
//!
//! Features: `yaml` reads configurations from files, `cuda` and `ascend` load the drivers of devices, `typed` adds [`TypedLink`] (these
//! four by default), and `tokio` adds `AsyncLink`, for async tasks.
//!
//! Layers, each using only those before it: `sync`, `segment`, `participant`, `pool`, `ring`, `notify`, `link`.
//! System calls are in the crate `shmesh-sys`. `docs/architecture.md` explains why.
//!
//! ```
//! use shmesh::config::{LinkConfig, PoolId};
//! use shmesh::{LinkOptions, Side};
//!
//! # let dir = tempfile::tempdir()?;
//! let options = LinkOptions::new().dir(dir.path()); // /dev/shm unless named
//! let trainer = options.create(&LinkConfig::new("batches".parse()?))?;
//! let loader = options.attach("batches", Side::Secondary)?; // in another process
//!
//! let mut batch = loader.loan_with(PoolId::CpuData)?;
//! batch.resize_msg(8)?.copy_from_slice(&42_u64.to_le_bytes());
//! batch.resize_data(65_536)?.fill(1);
//! batch.send()?;
//! loader.notify()?;
//!
//! assert!(trainer.wait(Some(std::time::Duration::from_secs(1)))?);
//! let batch = trainer.receive()?.expect("a message waits");
//! assert_eq!(batch.data().len(), 65_536);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// The example of the README, compiled and run with the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub mod client;
pub mod config;
pub mod device;
mod error;
pub mod inspect;
mod link;
mod notify;
mod participant;
mod pool;
#[cfg(test)]
mod proofs;
mod ring;
mod segment;
mod sync;

pub use error::{Error, ErrorKind, Result};
#[cfg(feature = "tokio")]
pub use link::{AsyncLink, AsyncPendingReply, AsyncRequest};
#[cfg(all(feature = "tokio", feature = "typed"))]
pub use link::{AsyncTypedLink, AsyncTypedPendingReply, AsyncTypedRequest, AsyncTypedRequests};
pub use link::{
    DEFAULT_DIR, DIR_VARIABLE, Link, LinkHost, LinkHostOffer, LinkOptions, Loan, Message, OwnedLoan,
    OwnedMessage, OwnedPendingReply, OwnedRequest, PendingReply, Probe, RecoveryStats, ReplyError, Request,
    SendError, SharedBytes, WaitOutcome, Waiter,
};
#[cfg(feature = "typed")]
pub use link::{
    OwnedTypedMessage, OwnedTypedPendingReply, OwnedTypedRequest, Payload, TypedLink, TypedLoan,
    TypedMessage, TypedPendingReply, TypedRequest, TypedRequests, TypedSendError,
};
pub use participant::{MAX_SEATS, Participant, PeerEvent, SeatIndex, SeatWord, Side};
pub use ring::{INLINE_MAX_BYTES, REPLIES_MAX, REQUEST_INLINE_MAX_BYTES};
pub use shmesh_sys::process::{Liveness, ProcessIdentity};
