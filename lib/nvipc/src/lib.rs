//! NVIPC's shared-memory layout and socket handshake: an endpoint whose peer may be an unmodified NVIPC process.
//!
//! | file | concept |
//! |---|---|
//! | `layout.rs` | names, sizes and offsets of NVIPC's files |
//! | `queue.rs`, `array_queue.rs` | NVIPC's array queue, and the same over memory of the caller |
//! | `endpoint/` | one side of a link: create, attach, allocate, send, receive, release, death of the peer |
//! | `exchange.rs` | the handshake in which each side gets the other's eventfd |
//! | `held.rs` | which buffers this endpoint holds |
//! | `snapshot.rs` | a link as seen from outside |
//! | `udp/` | messages as datagrams between nodes |
//!
//! It is for a migration in which one pod moves to shmesh while its peer stays as it is. The layout has weaknesses
//! (`docs/nvipc-wire.md` lists them) that shmesh's own layout does not have. This side makes up for some: it trusts nothing
//! that it reads, no call ends the process, and when the peer dies it recovers what the peer held, without wiping a link
//! that is in use.
//!
//! Buffers are addresses, as NVIPC's applications expect. Nothing here reads or writes at such an address, so all functions
//! are safe: an address outside the buffers that this endpoint holds is refused.
//!
//! ```
//! # let dir = tempfile::tempdir()?;
//! use shmesh_nvipc_wire::{Message, Options};
//! let config = shmesh::config::LinkConfig::new("nvipc".parse()?);
//! let phy = Options::new().dir(dir.path()).create("nvipc", config.pools)?; // or NVIPC itself, in another process
//! let mac = Options::new().dir(dir.path()).attach("nvipc")?;
//!
//! let buffers = mac.allocate(None)?;
//! // SAFETY: a MSG buffer of this link has 8192 bytes, and it is ours until it is sent.
//! unsafe { buffers.msg.cast::<u64>().write_unaligned(42) };
//! mac.send(Message { msg_id: 0x80, cell_id: 0, msg_len: 8, data_len: 0, buffers })?;
//! mac.notify()?;
//!
//! assert!(phy.wait(None)?);
//! let message = phy.receive()?.expect("a message waits");
//! // SAFETY: `msg_len` bytes lie there, and they are ours until they are released.
//! assert_eq!(unsafe { message.buffers.msg.cast::<u64>().read_unaligned() }, 42);
//! phy.release(message.buffers)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(not(all(target_endian = "little", target_pointer_width = "64")))]
compile_error!("NVIPC's layout is for 64-bit little-endian machines only");

mod array_queue;
mod endpoint;
mod error;
mod exchange;
mod held;
mod layout;
mod memory;
mod queue;
mod snapshot;
pub mod udp;

pub use array_queue::ArrayQueue;
pub use endpoint::{Buffers, Endpoint, Message, Options, RecoveryStats};
pub use error::{Error, Result};
pub use snapshot::{LinkSnapshot, MappedLink, QueuedMessage};
