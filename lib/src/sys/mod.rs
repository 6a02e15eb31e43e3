//! Every system call of the library, one file per kind. Descriptors go in and out as `OwnedFd`.

pub(crate) mod cgroup;
pub(crate) mod eventfd;
pub(crate) mod file;
pub mod process;
pub(crate) mod socket;
