//! The directories of pools on the node.
//!
//! | file | concept |
//! |---|---|
//! | `directory.rs` | making one, and looking at what it holds |
//! | `tree.rs` | going through one, whatever pods put there |
//! | `sweep.rs` | taking away what dead pods left |

mod directory;
mod gc;
mod tree;

#[cfg(test)]
mod tests;

pub(crate) use directory::{free, prepare, used};
pub(crate) use gc::{IdleTimer, sweep};
