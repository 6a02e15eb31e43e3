//! Memory of NVIDIA GPUs, by the driver API, which is loaded at its first use.
//!
//! | file | concept |
//! |---|---|
//! | `driver.rs` | the calls of `libcuda.so`, and the meaning of their results |
//! | `context.rs` | a device's primary context |
//! | `device.rs` | [`CudaDevice`]: a GPU or a MIG partition, by its UUID |
//! | `memory.rs` | [`CudaMemory`]: shared as a descriptor, which is the permission to map it |
//! | `legacy.rs` | [`CudaLegacyMemory`]: shared by handles of 64 bytes; opt-in |
//! | `locked.rs` | [`PageLocked`]: a pool of the host, for DMA |
//! | `view.rs` | copies to and from the host, for both |
//! | `timeline.rs` | [`CudaTimeline`]: a word by which GPU work of two processes is ordered |

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

/// Constants and types of the driver's interface, from `cudarc`.
mod sys {
    pub(super) use cudarc::driver::sys::{
        CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
        CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    };
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys;

    use super::{legacy, locked, memory, timeline, view};

    #[test]
    fn constants_match_the_vendors_header() {
        assert_eq!(view::MEMORY_TYPE, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as i32);
        assert_eq!(
            view::DEVICE_ORDINAL,
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i32
        );
        let legacy_capable = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        assert_eq!(view::LEGACY_CAPABLE, legacy_capable as i32);
        assert_eq!(view::ON_DEVICE, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as i32);
        let posix_fd = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        assert_eq!(memory::POSIX_FD, posix_fd.0);
        assert_eq!(legacy::LAZY, sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32);
        assert_eq!(locked::FOR_ALL, sys::CU_MEMHOSTREGISTER_PORTABLE);
        assert_eq!(timeline::AT_LEAST, sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32);
        assert_eq!(timeline::AT_LEAST, sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32);
        assert_eq!(timeline::WAITS_FOR_NONE, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32);
        assert_eq!(size_of::<super::driver::IpcHandle>(), size_of::<sys::CUipcMemHandle>());
    }
}
