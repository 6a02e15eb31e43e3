//! Declarations of the calls of `libascendcl.so`.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::sync::OnceLock;

use super::explain::check;
use crate::device::library::{Library, functions};

/// The variable with the path of a library to use instead of the toolkit's.
const VARIABLE: &str = "SHMESH_ASCEND_LIBRARY";
/// Other code in this process has already started the runtime.
const STARTED_BEFORE: c_int = 100_002;

functions! {
    /// The calls of the runtime that sharing memory between processes needs.
    pub(super) struct Driver {
        aclInit(*const c_char) since "CANN 5";
        aclrtGetDeviceCount(*mut u32) since "CANN 5";
        aclrtGetDevice(*mut i32) since "CANN 5";
        aclrtSetDevice(i32) since "CANN 5";
        aclrtGetCurrentContext(*mut usize) since "CANN 5";
        aclrtSetCurrentContext(usize) since "CANN 5";
        aclrtMalloc(*mut *mut c_void, usize, c_int) since "CANN 5";
        aclrtFree(*mut c_void) since "CANN 5";
        aclrtMemcpy(*mut c_void, usize, *const c_void, usize, c_int) since "CANN 5";
        aclrtDeviceGetBareTgid(*mut i32) since "CANN 8.0.RC2";
        aclrtIpcMemGetExportKey(*mut c_void, usize, *mut c_char, usize, u64) since "CANN 8.3.RC1";
        aclrtIpcMemSetImportPid(*const c_char, *mut i32, usize) since "CANN 8.3.RC1";
        aclrtIpcMemImportByKey(*mut *mut c_void, *const c_char, u64) since "CANN 8.3.RC1";
        aclrtIpcMemClose(*const c_char) since "CANN 8.3.RC1";
    }
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Paths of the library in toolkits. A library that is loaded already is found by its name alone.
fn candidates() -> Vec<String> {
    let homes =
        ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"].into_iter().filter_map(|home| std::env::var(home).ok());
    let usual = ["/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"].map(str::to_owned);
    let homes = homes.chain(usual).map(|home| format!("{home}/lib64/libascendcl.so"));
    std::iter::once("libascendcl.so".to_owned()).chain(homes).collect()
}

impl Driver {
    /// The started runtime. Loaded once; loading is retried if it failed.
    pub(super) fn get() -> io::Result<&'static Self> {
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let driver = Self::of(Library::open("Ascend runtime (libascendcl.so)", VARIABLE, &candidates())?);
        let start = driver.aclInit()?;
        #[expect(unsafe_code, reason = "a C call")]
        // SAFETY: without a configuration the call uses the default one.
        match unsafe { start(std::ptr::null()) } {
            STARTED_BEFORE => {}
            code => check("aclInit", code)?,
        }
        Ok(DRIVER.get_or_init(|| driver))
    }
}
