//! A double of `libcuda.so`: the calls of the driver API by which processes share device memory, over files in memory.
//!
//! No mock: what it hands out are real descriptors and real mappings, so memory lives as long as the last handle, mapping
//! or descriptor of it anywhere, and a leaked descriptor pins it, as with the real one. Device pointers are addresses that
//! the CPU cannot read; copies go through a second mapping. What it cannot be is fast, or a proof that a real driver agrees.
//!
//! | variable | meaning |
//! |---|---|
//! | `FAKE_CUDA_DIR` | a directory that all processes share, best a tmpfs of its own: device memory comes from there, [`cuMemGetInfo_v2`](vmm) tells its free bytes, and old handles work |
//! | `FAKE_CUDA_DEVICES` | how many devices the machine has; 2 if not said |
//! | `CUDA_VISIBLE_DEVICES` | which of them this process sees, as ordinals |
//! | `FAKE_CUDA_CONTEXT_KIB` | how much of a device its primary context takes; nothing if not said |
//! | `FAKE_CUDA_CONTEXT_LOG` | a file that gets a line for each primary context that is made |
//! | `FAKE_CUDA_LAZY_COPIES` | what the device is given to copy and to fill it does long after the call has returned; copies from the host, too, as the driver reserves itself for memory that is not page-locked |
//! | `FAKE_CUDA_MIG` | device 0 is a MIG partition with this number, and nothing else is visible |
//!
//! | file | concept |
//! |---|---|
//! | `physical.rs` | device memory that exists, in a file |
//! | `space.rs` | this process's handles, reservations and mappings |
//! | `device.rs` | devices and contexts |
//! | `vmm.rs` | virtual memory management: create, export, import, reserve, map, set access |
//! | `linear.rs` | `cuMemAlloc` in blocks of 2 MiB, copies, pointers |
//! | `ipc.rs` | the old handles |
//! | `stream.rs` | streams and the words that they write and wait for |

#![allow(unsafe_code, reason = "it is the other end of a C interface")]
#![allow(non_snake_case, reason = "the names are the driver's")]
#![allow(dead_code, reason = "the C interface is called from outside alone")]

mod device;
mod ipc;
mod linear;
mod physical;
mod space;
mod stream;
mod vmm;

use std::ffi::c_int;
use std::path::PathBuf;

/// Path of the built library, for crates that depend on this one: next to the tests, as Cargo puts it.
///
/// # Panics
/// It is not there.
#[must_use]
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this program");
    let found = test.ancestors().skip(1).take(2).find_map(|dir| {
        let name = "libshmesh_fake_cuda.so";
        [dir.join(name), dir.join("deps").join(name)].into_iter().find(|path| path.is_file())
    });
    found.expect("Cargo builds the double together with what depends on it")
}

/// Path of the driver for tests that can run on a GPU: what `SHMESH_CUDA_LIBRARY` names, or [`library`].
///
/// # Panics
/// As [`library`].
#[must_use]
pub fn named_or_fake() -> PathBuf {
    std::env::var_os("SHMESH_CUDA_LIBRARY").map_or_else(library, PathBuf::from)
}

/// The result codes of calls, with the driver's numbers.
mod code {
    use std::ffi::c_int;

    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const INVALID_VALUE: c_int = 1;
    pub(crate) const OUT_OF_MEMORY: c_int = 2;
    pub(crate) const NOT_INITIALIZED: c_int = 3;
    pub(crate) const NO_DEVICE: c_int = 100;
    pub(crate) const INVALID_DEVICE: c_int = 101;
    pub(crate) const INVALID_CONTEXT: c_int = 201;
    pub(crate) const INVALID_HANDLE: c_int = 400;
    pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
    pub(crate) const CONTEXT_IS_DESTROYED: c_int = 709;
    pub(crate) const ALREADY_REGISTERED: c_int = 712;
    pub(crate) const NOT_REGISTERED: c_int = 713;
    pub(crate) const NOT_PERMITTED: c_int = 800;
    pub(crate) const NOT_SUPPORTED: c_int = 801;
    pub(crate) const UNKNOWN: c_int = 999;
}

/// A call that can fail.
type Outcome<T = ()> = Result<T, c_int>;

fn done(outcome: Outcome) -> c_int {
    outcome.err().unwrap_or(code::SUCCESS)
}

/// Writes what a call gives back.
fn put<T>(out: *mut T, outcome: Outcome<T>) -> c_int {
    if out.is_null() {
        return code::INVALID_VALUE;
    }
    match outcome {
        Ok(value) => {
            // SAFETY: callers of the C interface give room for one of it, and it is not null.
            unsafe { out.write(value) };
            code::SUCCESS
        }
        Err(code) => code,
    }
}
