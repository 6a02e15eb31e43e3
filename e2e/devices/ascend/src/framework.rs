//! Other code in the process, with contexts of its own, as a machine-learning framework has.

use std::ffi::{CString, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Calls of the library that this process has loaded from a path.
#[derive(Debug)]
pub struct Framework(*mut c_void);

impl Framework {
    /// With the library at this path, which stays loaded.
    ///
    /// # Panics
    /// It cannot be loaded.
    #[must_use]
    pub fn with(library: PathBuf) -> Self {
        let path = CString::new(library.into_os_string().into_vec()).expect("a path");
        // SAFETY: the path ends with a zero; the double's constructors do nothing.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the library loads");
        Self(handle)
    }

    fn symbol(&self, name: &std::ffi::CStr) -> *mut c_void {
        // SAFETY: the library is loaded, and the name ends with a zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "it has {name:?}");
        symbol
    }

    /// Makes a context on a device, which this thread then has.
    ///
    /// # Panics
    /// There is no such device.
    #[must_use]
    pub fn make_context(&self, device: i32) -> usize {
        let symbol = self.symbol(c"aclrtCreateContext");
        // SAFETY: this is its signature.
        let call: unsafe extern "C" fn(*mut usize, i32) -> c_int = unsafe { std::mem::transmute(symbol) };
        let mut context = 0;
        // SAFETY: there is room for the address.
        assert_eq!(unsafe { call(&raw mut context, device) }, 0, "device {device}");
        context
    }

    /// The context that this thread has.
    #[must_use]
    pub fn context(&self) -> Option<usize> {
        let symbol = self.symbol(c"aclrtGetCurrentContext");
        // SAFETY: this is its signature.
        let call: unsafe extern "C" fn(*mut usize) -> c_int = unsafe { std::mem::transmute(symbol) };
        let mut context = 0;
        // SAFETY: there is room for the address.
        (unsafe { call(&raw mut context) } == 0).then_some(context)
    }
}
