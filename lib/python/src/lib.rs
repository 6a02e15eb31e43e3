//! `shmesh._shmesh`: the native module of the Python package `shmesh`.
//!
//! | file | concept |
//! |---|---|
//! | `memory.rs` | `Memory`: mapped shared memory |
//! | `share.rs` | passing it to other processes, by handle and by name |
//! | `sysv.rs` | System V segments of other processes |
//! | `view.rs` | numpy arrays over memory, which keep it alive |
//! | `link.rs` | `Link`: a participant of a link |
//! | `batch.rs` | `Batch` and `BatchLayout`: arrays by name in one message |
//! | `handle.rs` | the participant that all of them share |
//! | `leased.rs` | files of an IPC directory whose users can be known |
//! | `loan.rs`, `message.rs` | `Loan` and `Message`: buffers that arrays keep |
//! | `object.rs` | objects of plain values and arrays as messages |
//! | `pending.rs`, `request.rs` | `PendingReply` and `Request`: requests and replies |
//! | `waiting.rs` | threads that wait, and the end of the interpreter |
//! | `session.rs` | the common part of sessions with a broker |
//! | `device.rs` | `DeviceSession`: device keys |
//! | `cuda.rs`, `dlpack.rs` | `GpuSession`, `GpuMemory`: device keys of GPU memory, and its use in place by frameworks |
//! | `fork.rs`, `error.rs` | which handles a child may not use; errors as classes of `shmesh._errors` |
//!
//! Code that needs shapes, types or `asyncio` is in Python: `python/shmesh`.

mod batch;
mod cuda;
mod device;
mod dlpack;
mod error;
mod fork;
mod handle;
mod leased;
mod link;
mod loan;
mod memory;
mod message;
mod object;
mod pending;
mod request;
mod session;
mod share;
mod view;
mod waiting;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _shmesh {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::batch::{Batch, BatchLayout};
    #[pymodule_export]
    use crate::cuda::{GpuMemory, GpuSession};
    #[pymodule_export]
    use crate::device::DeviceSession;
    #[pymodule_export]
    use crate::leased::{create_leased, open_leased, remove_unused};
    #[pymodule_export]
    use crate::link::Link;
    #[pymodule_export]
    use crate::loan::Loan;
    #[pymodule_export]
    use crate::memory::Memory;
    #[pymodule_export]
    use crate::message::Message;
    #[pymodule_export]
    use crate::object::{decode, encode, object_places, parts};
    #[pymodule_export]
    use crate::pending::PendingReply;
    #[pymodule_export]
    use crate::request::Request;

    /// Called when the package is imported.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::fork::watch();
        module.add("INLINE_MAX_BYTES", shmesh::INLINE_MAX_BYTES)?;
        module.add("REQUEST_INLINE_MAX_BYTES", shmesh::REQUEST_INLINE_MAX_BYTES)?;
        module.add("DEFAULT_DIR", shmesh::DEFAULT_DIR)?;
        module.add("BUFFERS_MAX", crate::object::BUFFERS_MAX)?;
        module.add("PLAIN_TYPES", crate::object::PLAIN_TYPES)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    #[pyfunction]
    fn after_fork_in_child() {
        crate::waiting::after_fork_in_child();
        crate::share::after_fork_in_child();
    }

    #[pyfunction]
    fn at_exit(py: Python<'_>) {
        crate::waiting::at_exit(py);
        crate::share::at_exit();
    }
}
