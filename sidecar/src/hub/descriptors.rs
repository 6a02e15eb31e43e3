//! Which descriptors are memory.

use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::stat::{SFlag, fstat, major};
use shmesh_proto::broker::Mechanism;

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
            return fstat(fd).is_ok_and(|stat| {
                let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
                kind == SFlag::S_IFCHR && major(stat.st_rdev) == NVIDIA_MAJOR
                    || self.memfds_for_devices && kind == SFlag::S_IFREG
            });
        }
        let wanted = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
        let found = fstat(fd).ok().and_then(|stat| u64::try_from(stat.st_size).ok());
        seals.is_ok_and(|seals| seals.contains(wanted)) && found.is_some_and(|found| found >= size)
    }
}
