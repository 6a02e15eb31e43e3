//! Segments: the shared regions of a link, and what lies where in them.
//!
//! | file | concept |
//! |---|---|
//! | [`lines`] | mapped or heap memory, and checked windows of cache lines over it |
//! | [`header`] | the first lines of each segment: is it ours, whole, and of this version? |
//! | [`layout`] | where each table lies, computed from the shape of the link alone |
//! | [`lock`] | the lock file: who serves the link, who is on it, who sits in which seat |
//! | [`payload_type`] | the type that typed messages of the link have |
//! | [`store`] | files and memfds that hold segments: create, open, check |

pub(crate) mod header;
pub(crate) mod layout;
pub(crate) mod lines;
pub(crate) mod lock;
pub(crate) mod payload_type;
pub(crate) mod store;

pub(crate) use lines::{Lines, Memory};
pub(crate) use lines::{prefetch_exclusive, prefetch_exclusive_at, prefetch_shared};
