//! A device's primary context: created at its first use, and current in a thread as long as needed.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::ffi::c_int;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Driver, check};

/// The primary context, which frameworks use as well. It takes hundreds of megabytes of its device, so it is retained
/// at its first use, and released when it is no longer needed.
#[derive(Debug)]
pub(super) struct Context {
    ordinal: c_int,
    retained: Mutex<Option<usize>>,
}

/// Makes the context current in this thread until it is dropped.
#[derive(Debug)]
pub(super) struct CurrentContext {
    before: usize,
    _context: Arc<Context>,
}

impl Context {
    pub(super) fn of(ordinal: c_int) -> Self {
        Self { ordinal, retained: Mutex::new(None) }
    }

    /// Makes the context current in this thread; dropping the returned guard restores the previous one.
    pub(super) fn enter(self: &Arc<Self>) -> io::Result<CurrentContext> {
        let driver = Driver::get()?;
        let mut before = 0;
        // SAFETY: the call writes the address to a local variable.
        check("cuCtxGetCurrent", unsafe { driver.cuCtxGetCurrent()?(&raw mut before) })?;
        let context = self.retain(driver)?;
        // SAFETY: the context is retained as long as the returned guard lives.
        check("cuCtxSetCurrent", unsafe { driver.cuCtxSetCurrent()?(context) })?;
        Ok(CurrentContext { before, _context: Arc::clone(self) })
    }

    fn retain(&self, driver: &Driver) -> io::Result<usize> {
        let mut retained = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = *retained {
            return Ok(context);
        }
        let mut context = 0;
        // SAFETY: the call writes the address to a local variable.
        check("cuDevicePrimaryCtxRetain", unsafe {
            driver.cuDevicePrimaryCtxRetain()?(&raw mut context, self.ordinal)
        })?;
        Ok(*retained.insert(context))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let retained = self.retained.get_mut().unwrap_or_else(PoisonError::into_inner);
        if retained.is_some()
            && let Ok(release) = Driver::get().and_then(Driver::cuDevicePrimaryCtxRelease_v2)
        {
            // SAFETY: it was retained here once, is released once, and is not used here any more.
            unsafe { release(self.ordinal) };
        }
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Ok(set) = Driver::get().and_then(Driver::cuCtxSetCurrent) {
            // SAFETY: this context, or none, was current in this thread before.
            unsafe { set(self.before) };
        }
    }
}
