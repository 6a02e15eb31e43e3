//! Error numbers, for matching on the result of [`io::Error::raw_os_error`](std::io::Error::raw_os_error).

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

/// The error number of an error; `UnknownErrno` if it is not from the kernel.
#[must_use]
pub fn of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}

/// Whether an error means that this process or the system temporarily has no descriptors or memory left.
#[must_use]
pub fn is_exhausted(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS | ENOMEM))
}

/// Whether an error means that there is no room for a file or for memory.
#[must_use]
pub fn is_no_space(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(ENOSPC | ENOMEM | EFBIG))
}
