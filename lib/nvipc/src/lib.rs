//! NVIPC's own layout and wire: an endpoint of ours, and at the other end a process with NVIPC that was never changed.
//!
//! | file | concept |
//! |---|---|
//! | `layout.rs` | names, sizes and offsets of NVIPC's files |
//! | `queue.rs`, `array_queue.rs` | its array queue, and the same in memory of others |
//! | `endpoint/` | one side of a link: create, attach, allocate, send, receive, release, and the peer's death |
//! | `exchange.rs` | the socket on which each side gets the other's eventfd |
//! | `held.rs` | which buffers are ours |
//! | `seen.rs` | a link looked at from outside |
//! | `udp/` | messages as datagrams between nodes |
//!
//! This is for the time of a migration: one pod moves, the other stays as it is. The layout's faults come with it
//! (`docs/nvipc-wire.md` has the list), and links of our own layout have none of them. What this side adds is that it
//! believes nothing it reads, that no call of its own ends the process, and that it survives the peer and puts right what
//! the peer's death left, without ever wiping a link that somebody uses.
//!
//! Buffers travel as addresses, because that is how NVIPC's programs know them. Nothing here reads or writes at such an
//! address, so all functions are safe: an address that is not a buffer held by this endpoint is refused.
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
compile_error!("NVIPC's layout is that of 64-bit little-endian machines");

mod array_queue;
mod endpoint;
mod error;
mod exchange;
mod held;
mod layout;
mod memory;
mod queue;
mod seen;
pub mod udp;

pub use array_queue::ArrayQueue;
pub use endpoint::{Buffers, Endpoint, Message, Options, Recovered};
pub use error::{Error, Result};
pub use seen::{Seen, Waiting};
