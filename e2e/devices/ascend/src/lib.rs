//! A double of `libascendcl.so`: the calls by which processes share memory of an NPU, with their rules and error numbers.
//!
//! The real peer is a driver in the kernel: it knows processes by their thread-group id in the outermost pid namespace, and
//! keeps the lists. So the double has two parts: the library, and a small daemon, [`Npud`], that knows its callers by
//! `SO_PEERCRED` and by nothing that they say. It has to run in the outermost pid namespace that counts, in a test or as a
//! thread of one. Device memory is a memfd; device pointers are addresses that the CPU cannot read; and when an exporter
//! closes its key, frees its memory or dies, importers' next copy is a bus error, as the torn page table is on the device.
//!
//! It was written from what is published of the driver's behaviour, and has never been compared with an NPU.
//!
//! | variable | meaning |
//! |---|---|
//! | `FAKE_NPU_SOCK` | the daemon's socket; without it there is no device |
//! | `FAKE_NPU_DEVICES` | how many devices this process sees; 1 if not said |
//! | `FAKE_ACL_EXBUS` | `0`: memory of one card cannot be mapped by another, as with PCIe cards |
//! | `FAKE_ACL_TGID` | what the bare id is said to be; -1 as when the device manager does not answer, and the call still says that all is well |
//! | `FAKE_ACL_PRODUCT` | `310B`: a product, or `vnpu`: a virtual NPU, that shares nothing by keys |
//!
//! | file | concept |
//! |---|---|
//! | `wire.rs` | what library and daemon say to each other |
//! | `npud.rs` | [`Npud`]: sockets, and the processes at the other end |
//! | `nodes.rs` | keys, their lists, who has opened what: the rules |
//! | `memory.rs` | device memory in this process |
//! | `calls.rs` | the library's calls |
//! | `framework.rs` | [`Framework`]: other code in a process that has the library |

#![allow(unsafe_code, reason = "it is the other end of a C interface")]
#![allow(non_snake_case, reason = "the names are the vendor's")]
#![allow(dead_code, reason = "the C interface is called from outside alone")]

mod calls;
mod framework;
mod memory;
mod nodes;
mod npud;
mod wire;

use std::path::PathBuf;

pub use framework::Framework;
pub use npud::Npud;

/// Path of the built library, for crates that depend on this one: next to the tests, as Cargo puts it.
///
/// # Panics
/// It is not there.
#[must_use]
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this program");
    let found = test.ancestors().skip(1).take(2).find_map(|dir| {
        let name = "libshmesh_fake_ascend.so";
        [dir.join(name), dir.join("deps").join(name)].into_iter().find(|path| path.is_file())
    });
    found.expect("Cargo builds the double together with what depends on it")
}

/// The result codes of calls, with the runtime's numbers.
mod code {
    use std::ffi::c_int;

    pub(crate) const SUCCESS: c_int = 0;
    /// A pointer is null.
    pub(crate) const INVALID_PARAM: c_int = 100_000;
    pub(crate) const REPEAT_INITIALIZE: c_int = 100_002;
    /// The library checks it before the driver is asked.
    pub(crate) const PARAM: c_int = 107_000;
    pub(crate) const INVALID_DEVICE: c_int = 107_001;
    /// This thread has no device.
    pub(crate) const CONTEXT_NULL: c_int = 107_002;
    /// `EFAULT`.
    pub(crate) const BAD_ADDRESS: c_int = 107_017;
    /// `EOPNOTSUPP`.
    pub(crate) const NOT_SUPPORTED: c_int = 207_000;
    pub(crate) const OUT_OF_MEMORY: c_int = 207_001;
    /// `EPERM`.
    pub(crate) const NOT_PERMITTED: c_int = 207_006;
    /// `EINVAL` and `EACCES`.
    pub(crate) const DRIVER: c_int = 507_899;
}
