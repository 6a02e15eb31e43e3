//! Inspecting links from outside, for `shmesh ls`, `dump` and `rm`.
//!
//! | file | concept |
//! |---|---|
//! | `segments.rs` | finding the files of a link, opening and mapping them for reading only |
//! | `cached_view.rs` | a link that is inspected repeatedly |
//! | `seat_locks.rs` | the liveness of participants, by the locks of their seats |
//! | `snapshot.rs` | attached participants, queued messages, and the holder of each buffer |
//! | `tap.rs` | recording messages for `shmesh capture` |
//! | `memory_files.rs` | files of other programs, and whether they are in use |
//! | `remains.rs` | removing a link |
//! | `far_nodes.rs` | other machines to which a bridge carries a link |
//!
//! Inspection takes no seat, and only [`Remains`] changes anything: segments are mapped read-only. So it works
//! on a link in use, after a crash, and beside a hostile participant; values are checked like a peer's. While a
//! link is in use, each value is correct, but sums may be off by messages that moved in the meantime.
//!
//! ```
//! # let dir = tempfile::tempdir()?;
//! use shmesh::inspect::{View, names};
//! let options = shmesh::LinkOptions::new().dir(dir.path());
//! let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
//! link.send_inline(7, 0, b"slot 7")?;
//!
//! let name = names(dir.path())?.remove(0);
//! let snapshot = View::open(dir.path(), &name)?.snapshot();
//! assert_eq!(snapshot.seats[0].participant.word.pid(), std::process::id());
//! assert_eq!(snapshot.rings[0].queued[0].msg_id, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cached_view;
mod far_nodes;
mod memory_files;
mod remains;
mod seat_locks;
mod segments;
mod snapshot;
mod tap;

pub use crate::participant::times::{LinkTimes, TimeHistogram};
pub use cached_view::CachedView;
pub use far_nodes::{FAR_NODE_MAGIC, FAR_NODE_WORDS, FarNode, FarNodeWord, far_node_file, far_nodes};
pub use memory_files::{
    ARRAY_MEMFD, FileRemoval, FileUse, MemoryFile, MemoryKind, StaleFile, memory_files, remove_stale,
    stale_files,
};
pub use remains::{Remains, unused_names};
pub use segments::{PoolView, View, names};
pub use snapshot::{
    BufferState, HeldBuffer, QueuedMessage, ReaderView, RequestsView, RingView, SeatView, Snapshot, TableView,
};
pub use tap::{Filter, LostCounts, Tap, TappedMessage};
