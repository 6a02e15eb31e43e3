//! Counting forks: a child has copies of its parent's handles, and must not use them.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

static FORKS: AtomicUsize = AtomicUsize::new(0);

/// How often this process and its ancestors have forked since [`watch`]: a number that a child never shares with its parent.
#[must_use]
pub fn generation() -> usize {
    FORKS.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Counts forks from now on.
#[expect(unsafe_code, reason = "nix has no pthread_atfork")]
pub fn watch() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler only increments an atomic, which may be done in a forked child of any process.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}
