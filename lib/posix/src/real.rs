//! The C library's own functions, or the next library's in the order of loading.

use std::ffi::CStr;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::sys;

/// A function that a library after this one defines.
pub(crate) struct Function {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Function {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Its address; null if there is none.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let found = sys::next_symbol(self.name);
        self.address.store(found, Ordering::Relaxed);
        found
    }

    /// Its address if it was looked up before; null otherwise. To look it up may allocate, which an allocator that opens a file while it
    /// starts could not bear.
    pub(crate) fn known_address(&self) -> *mut c_void {
        self.address.load(Ordering::Relaxed)
    }
}

pub(crate) static OPEN: Function = Function::new(c"open");
pub(crate) static OPENAT: Function = Function::new(c"openat");
pub(crate) static MKOSTEMPS: Function = Function::new(c"mkostemps");
pub(crate) static FOPEN: Function = Function::new(c"fopen");
pub(crate) static FCNTL: Function = Function::new(c"fcntl");
pub(crate) static LOCKF: Function = Function::new(c"lockf");
pub(crate) static FTRUNCATE: Function = Function::new(c"ftruncate");
pub(crate) static FALLOCATE: Function = Function::new(c"fallocate");
pub(crate) static POSIX_FALLOCATE: Function = Function::new(c"posix_fallocate");
pub(crate) static FCHMOD: Function = Function::new(c"fchmod");
pub(crate) static FCHMODAT: Function = Function::new(c"fchmodat");
pub(crate) static CHMOD: Function = Function::new(c"chmod");
pub(crate) static SHM_OPEN: Function = Function::new(c"shm_open");
pub(crate) static SHM_UNLINK: Function = Function::new(c"shm_unlink");
pub(crate) static SEM_OPEN: Function = Function::new(c"sem_open");
pub(crate) static SEM_CLOSE: Function = Function::new(c"sem_close");
pub(crate) static SEM_UNLINK: Function = Function::new(c"sem_unlink");
pub(crate) static SEM_INIT: Function = Function::new(c"sem_init");
pub(crate) static SHMGET: Function = Function::new(c"shmget");
pub(crate) static SHMAT: Function = Function::new(c"shmat");
pub(crate) static SHMDT: Function = Function::new(c"shmdt");
pub(crate) static SHMCTL: Function = Function::new(c"shmctl");

/// Looks up those that programs call early and often.
pub(crate) fn load() {
    for function in [&OPEN, &OPENAT, &FOPEN, &FCNTL, &LOCKF, &FTRUNCATE, &FCHMOD, &FCHMODAT, &CHMOD] {
        function.address();
    }
}
