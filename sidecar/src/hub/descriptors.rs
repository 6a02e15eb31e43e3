//! Which descriptors are memory.

use std::os::fd::OwnedFd;

use shmesh_proto::broker::Mechanism;
use shmesh_sys::file::{self, Kind};

/// Of the character devices whose descriptors are memory of a GPU.
const NVIDIA_MAJOR: u64 = 195;

/// Which descriptors keys and pools may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptors {
    /// How many keys may have, all together.
    pub(crate) max: usize,
    /// Whether a memfd passes for a device's, as that of a double is one.
    pub(crate) memfds_for_devices: bool,
}

impl Descriptors {
    /// Whether a descriptor is what the mechanism needs. Memory that can be truncated would be a bus error in the importer.
    pub(super) fn is_memory_of(self, fd: &OwnedFd, mechanism: Mechanism, size: u64) -> bool {
        if mechanism != Mechanism::Host {
            // A device's, where the mechanism has one at all.
            return match file::kind(fd) {
                Ok(Kind::CharDevice { major }) => major == NVIDIA_MAJOR,
                Ok(Kind::Regular { .. }) => self.memfds_for_devices,
                _ => false,
            };
        }
        let is_large = matches!(file::kind(fd), Ok(Kind::Regular { size: found }) if found >= size);
        file::is_size_sealed(fd) && is_large
    }
}
