//! Error numbers, for matching on what [`io::Error::raw_os_error`](std::io::Error::raw_os_error) gives.

pub use libc::{
    EACCES, EADDRINUSE, EAGAIN, ECONNABORTED, ECONNREFUSED, ECONNRESET, EEXIST, EFBIG, EIDRM, EINTR, EINVAL,
    EISDIR, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENOBUFS, ENOENT, ENOMEM, ENOPROTOOPT, ENOSPC, ENOTDIR,
    ENOTEMPTY, ENXIO, EPERM, EPIPE, EPROTOTYPE, ESRCH, ETIMEDOUT, EXDEV,
};
/// An error number with its name and description.
pub use nix::errno::Errno;

/// Sets `errno` of this thread, for functions that C programs call.
pub fn set(number: i32) {
    Errno::set_raw(number);
}

/// The error number of an error; `UnknownErrno` for one that is not the kernel's.
#[must_use]
pub fn of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}

/// Whether an error says that this process or the system has no descriptors or memory left, which passes by itself.
#[must_use]
pub fn is_exhausted(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS | ENOMEM))
}

/// Whether an error says that there is no room for a file or for memory.
#[must_use]
pub fn is_no_space(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(ENOSPC | ENOMEM | EFBIG))
}
