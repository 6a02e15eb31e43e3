//! Memory of NVIDIA GPUs, by the driver API, which is loaded when it is first needed.
//!
//! | file | concept |
//! |---|---|
//! | `driver.rs` | the calls of `libcuda.so`, and what their numbers mean |
//! | `context.rs` | a device's primary context, while it is needed |
//! | `device.rs` | [`CudaDevice`]: a GPU or a MIG partition, by its UUID |
//! | `memory.rs` | [`CudaMemory`]: a descriptor names it, and whoever has that may map it |
//! | `legacy.rs` | [`CudaLegacyMemory`]: 64 bytes name it; opt-in |
//! | `locked.rs` | [`PageLocked`]: a pool of the host, for DMA |
//! | `view.rs` | copies to and from the host, the same for both |
//! | `timeline.rs` | [`CudaTimeline`]: a word by which GPU work of two processes waits for each other |

mod context;
mod device;
mod driver;
mod legacy;
mod locked;
mod memory;
mod timeline;
mod view;

pub use device::{CudaDevice, DeviceUuid};
pub use legacy::CudaLegacyMemory;
pub use locked::PageLocked;
pub use memory::CudaMemory;
pub use timeline::{CudaStream, CudaTimeline};

/// Numbers of the driver's interface, as `cudarc` has them from the vendor's header.
mod sys {
    pub(super) use cudarc::driver::sys::{
        CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
        CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    };
}
