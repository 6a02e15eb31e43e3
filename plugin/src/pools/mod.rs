//! Directories of pools on the node.
//!
//! | file | concept |
//! |---|---|
//! | `directory.rs` | creates a directory and measures its use |
//! | `tree.rs` | walks a directory with hostile contents |
//! | `gc.rs` | garbage collection of unused pools |
//! | `links.rs` | garbage collection of unused links in a pool that is in use |

mod directory;
mod gc;
mod links;
mod tree;

#[cfg(test)]
mod tests;

pub(crate) use directory::{free, own, prepare, prepare_parent, used};
pub(crate) use gc::{IdleTimer, SweepReport, erase, sweep};
pub(crate) use links::UnusedLinks;
