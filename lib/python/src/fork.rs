//! Detects handles that were created before a fork: the child has copies of them, and must not use them.

pub(crate) use shmesh_sys::fork::{generation, watch};

/// Detects whether a handle was created before a fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForkGuard(usize);

impl ForkGuard {
    pub(crate) fn here() -> Self {
        Self(generation())
    }

    pub(crate) fn is_here(self) -> bool {
        self.0 == generation()
    }
}
