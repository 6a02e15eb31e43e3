//! Blocking signals of a thread, and waiting for them.

use std::io;

use nix::sys::signal::{SigSet, SigmaskHow, Signal as Number};
use nix::sys::time::TimeSpec;

/// A guard that keeps all signals of this thread pending, except faults: the kernel kills a process whose fault is
/// blocked, whatever handler it has. Threads started meanwhile inherit the mask, so that an application's handlers run
/// in the application's own threads.
#[derive(Debug)]
pub struct Blocked(Option<SigSet>);

impl Blocked {
    /// Blocks all signals of this thread except faults.
    #[must_use]
    pub fn all() -> Self {
        let mut signals = SigSet::all();
        for fault in [Number::SIGBUS, Number::SIGSEGV, Number::SIGILL, Number::SIGFPE, Number::SIGTRAP] {
            signals.remove(fault);
        }
        Self(signals.thread_swap_mask(SigmaskHow::SIG_SETMASK).ok())
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = before.thread_set_mask();
        }
    }
}

/// A signal that asks a program to end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Signal {
    /// `SIGINT`, from a terminal.
    Interrupt,
    /// `SIGTERM`.
    Terminate,
    /// `SIGHUP`: the terminal was closed.
    HangUp,
}

impl Signal {
    const ALL: [(Self, Number); 3] = [
        (Self::Interrupt, Number::SIGINT),
        (Self::Terminate, Number::SIGTERM),
        (Self::HangUp, Number::SIGHUP),
    ];
}

/// Signals that are blocked in this thread and in threads that it starts later, so that they can be waited for.
#[derive(Debug)]
pub struct Awaited(SigSet);

impl Awaited {
    /// Blocks these signals until dropped.
    ///
    /// # Errors
    /// Never fails in normal use.
    pub fn block(signals: &[Signal]) -> io::Result<Self> {
        let mut set = SigSet::empty();
        for (signal, number) in Signal::ALL {
            if signals.contains(&signal) {
                set.add(number);
            }
        }
        set.thread_block()?;
        Ok(Self(set))
    }

    /// Waits for one of the signals and returns its number.
    ///
    /// # Errors
    /// Never fails in normal use.
    pub fn wait(&self) -> io::Result<i32> {
        Ok(self.0.wait()? as i32)
    }
}

/// Runs `write`, which may write to a pipe without a reader, and discards the `SIGPIPE` that the kernel would send to
/// this thread.
pub fn without_sigpipe(write: impl FnOnce() -> io::Result<()>) {
    let mut pipe = SigSet::empty();
    pipe.add(Number::SIGPIPE);
    let Ok(before) = pipe.thread_swap_mask(SigmaskHow::SIG_BLOCK) else { return };
    let is_others = is_pending(Number::SIGPIPE);
    if write().is_err() && !is_others {
        take_pending(&pipe);
    }
    let _ = before.thread_set_mask();
}

#[expect(unsafe_code, reason = "nix has no sigpending")]
fn is_pending(signal: Number) -> bool {
    let mut pending = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is a local variable, and zeroes are an empty set.
    unsafe {
        libc::sigpending(pending.as_mut_ptr());
        libc::sigismember(pending.as_ptr(), signal as i32) == 1
    }
}

#[expect(unsafe_code, reason = "nix has no sigtimedwait")]
fn take_pending(set: &SigSet) {
    let at_once = TimeSpec::new(0, 0);
    // SAFETY: both pointers are to values that live until the call returns; no information is requested.
    unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), at_once.as_ref()) };
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use shmesh_testing::own_process;

    use super::*;

    #[test]
    fn broken_pipe_leaves_no_signal_behind() {
        // In a process of its own: a child that another test starts has copies of all descriptors for a moment.
        own_process(|| {
            // Rust ignores SIGPIPE at start, so what is checked is that nothing stays pending and the mask comes back.
            let mask = SigSet::thread_get_mask().unwrap();
            let (reader, mut writer) = io::pipe().unwrap();
            drop(reader);
            let mut failed = false;
            without_sigpipe(|| writer.write_all(b"x").inspect_err(|_| failed = true));
            assert!(failed && !is_pending(Number::SIGPIPE));
            assert_eq!(SigSet::thread_get_mask().unwrap(), mask);
        });
    }

    #[test]
    fn signal_mask_is_restored() {
        let before = SigSet::thread_get_mask().unwrap();
        let blocked = Blocked::all();
        assert!(SigSet::thread_get_mask().unwrap().contains(Number::SIGTERM));
        drop(blocked);
        assert_eq!(SigSet::thread_get_mask().unwrap(), before);
    }
}
