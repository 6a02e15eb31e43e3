//! Segments: the shared regions of a link, and their layout.
//!
//! | file | concept |
//! |---|---|
//! | [`lines`] | mapped or heap memory, and checked windows of cache lines over it |
//! | [`header`] | the first lines of each segment, which identify its kind, size and version |
//! | [`layout`] | the position of each table, computed from the shape of the link alone |
//! | [`lock`] | the lock file, by which the kernel tells which processes serve, use and hold seats of the link |
//! | [`payload_type`] | the type of the link's typed messages |
//! | [`store`] | files and memfds that hold segments: create, open, check |

pub(crate) mod header;
pub(crate) mod layout;
pub(crate) mod lines;
pub(crate) mod lock;
pub(crate) mod payload_type;
pub(crate) mod store;

pub(crate) use lines::{Lines, Memory};
pub(crate) use lines::{prefetch_exclusive, prefetch_exclusive_at, prefetch_shared};
