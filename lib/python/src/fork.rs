//! What a fork does to handles: the child has copies of all of them, and must not use them.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

static FORKS: AtomicUsize = AtomicUsize::new(0);

/// How often this process and those it was forked from have forked: a number that a child never shares with its parent.
pub(crate) fn generation() -> usize {
    FORKS.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Counts forks from now on, also those that Python does not make.
#[expect(unsafe_code, reason = "libc has it, and no crate of ours wraps it")]
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler only increments an atomic, which may be done in a forked child of any process.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// Refuses a handle that was made before a fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made(usize);

impl Made {
    pub(crate) fn here() -> Self {
        Self(generation())
    }

    pub(crate) fn is_here(self) -> bool {
        self.0 == generation()
    }
}
