//! The guard of each call: nothing unwinds into C.

use std::panic::{AssertUnwindSafe, catch_unwind};

use shmesh_sys::cancel::Uncancelled;

use crate::log::say;

/// Runs `act` and returns `failed`, after a log line, if it panics: nothing may unwind into C.
pub(crate) fn guarded<T>(what: &str, failed: T, act: impl FnOnce() -> T) -> T {
    let _uncancelled = Uncancelled::new();
    unwinding(what, failed, act)
}

/// As [`guarded`], for calls without a cancellation point other than those that say so.
#[inline(always)]
pub(crate) fn unwinding<T>(what: &str, failed: T, act: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| {
        say!("{what}: internal error of this library; please report it with the lines above");
        failed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_an_error() {
        assert_eq!(guarded("a call", -1, || panic!("as a defect of this library would")), -1);
        assert_eq!(guarded("a call", -1, || 0), 0);
    }
}
