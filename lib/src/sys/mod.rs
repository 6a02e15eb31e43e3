//! Every system call of the library, one file per kind. Descriptors go in and out as `OwnedFd`.

pub mod cgroup;
pub mod eventfd;
pub(crate) mod file;
pub mod process;
pub(crate) mod socket;
