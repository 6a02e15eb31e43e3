//! Looking at links from outside: what `shmesh ls`, `dump` and `rm` do.
//!
//! | file | concept |
//! |---|---|
//! | `segments.rs` | finding the files of a link, opening and mapping them for reading only |
//! | `seat_locks.rs` | which participants live |
//! | `snapshot.rs` | who is attached, what is queued, who holds which buffer |
//! | `tap.rs` | messages as they pass: `shmesh capture` |
//! | `memory_files.rs` | files of other programs, and whether they are in use |
//! | `remains.rs` | what is left of a link, and removing it |
//!
//! Nothing here sits down on a link, and nothing but [`Remains::remove`] writes: segments are mapped without the right to.
//! So it works on a link in use, on one that a crash left, and beside a hostile participant; what it reads is checked as a
//! peer's words are. While others go on, it is a moment's view: single facts are true, their sums may be off by what moved.
//!
//! ```
//! # let dir = tempfile::tempdir()?;
//! use shmesh::inspect::{View, names};
//! let options = shmesh::LinkOptions::new().dir(dir.path());
//! let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
//! link.send_inline(7, 0, b"nobody listens")?;
//!
//! let name = names(dir.path())?.remove(0);
//! let snapshot = View::open(dir.path(), &name)?.snapshot();
//! assert_eq!(snapshot.seats[0].participant.word.pid(), std::process::id());
//! assert_eq!(snapshot.rings[0].queued[0].msg_id, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod memory_files;
mod remains;
mod seat_locks;
mod segments;
mod snapshot;
mod tap;

pub use memory_files::{
    FileRemoval, FileUse, MemoryFile, MemoryKind, memory_files, remove_stale, stale_files,
};
pub use remains::{Remains, unused_names};
pub use segments::{PoolView, View, names};
pub use snapshot::{
    BufferState, HeldBuffer, QueuedMessage, ReaderView, RequestsView, RingView, SeatView, Snapshot, TableView,
};
pub use tap::{Filter, LostCounts, Tap, TappedMessage};
