//! The barrier that costs only one side.
//!
//! `membarrier(2)` has every running thread of this process execute a full barrier. Whoever calls it pays for both sides, and
//! on the other the compiler alone has to keep the order. Where the kernel or a seccomp filter refuses it, both sides have an
//! ordinary barrier.

#[cfg(not(any(loom, miri)))]
mod asymmetric {
    use std::sync::atomic::{AtomicU8, Ordering, compiler_fence, fence};

    use shmesh_sys::barrier;

    const UNKNOWN: u8 = 0;
    const ASYMMETRIC: u8 = 1;
    const SYMMETRIC: u8 = 2;

    static KIND: AtomicU8 = AtomicU8::new(UNKNOWN);

    /// Before the first barrier of a gate.
    pub(crate) fn prepare() {
        if KIND.load(Ordering::Relaxed) == UNKNOWN {
            let kind = if barrier::register() { ASYMMETRIC } else { SYMMETRIC };
            // Of two that come at once both have found out the same.
            let _ = KIND.compare_exchange(UNKNOWN, kind, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn light() {
        // Whoever has a gate has seen `prepare`: the kind does not change after that.
        if KIND.load(Ordering::Relaxed) == ASYMMETRIC {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    pub(crate) fn heavy() {
        fence(Ordering::SeqCst);
        if KIND.load(Ordering::Relaxed) != ASYMMETRIC || barrier::expedited() {
            return;
        }
        // Another process image: a child, whose kernel has forgotten. Refused again, a filter came after the registration,
        // and there is no other way to reach the other threads.
        assert!(
            barrier::register() && barrier::expedited(),
            "membarrier(2) was permitted and is refused now: permit it in the seccomp filter"
        );
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn this_kernel_has_it_and_a_child_too() {
            prepare();
            assert_eq!(KIND.load(Ordering::Relaxed), ASYMMETRIC, "Linux 4.14 has membarrier");
            heavy();
            // SAFETY: the child calls nothing but `heavy`, which allocates nothing, and ends.
            match unsafe { libc::fork() } {
                0 => {
                    heavy();
                    // SAFETY: ends this process alone.
                    unsafe { libc::_exit(0) }
                }
                child => {
                    let mut status = 0;
                    // SAFETY: there is room for the status.
                    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                    assert_eq!(status, 0);
                }
            }
        }
    }
}

#[cfg(not(any(loom, miri)))]
pub(crate) use asymmetric::{heavy, light, prepare};

/// What can be modelled: an ordinary barrier on both sides.
#[cfg(any(loom, miri))]
mod symmetric {
    #[cfg(loom)]
    use loom::sync::atomic::{Ordering, fence};
    #[cfg(not(loom))]
    use std::sync::atomic::{Ordering, fence};

    pub(crate) fn prepare() {}

    pub(crate) fn light() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy() {
        fence(Ordering::SeqCst);
    }
}

#[cfg(any(loom, miri))]
pub(crate) use symmetric::{heavy, light, prepare};
