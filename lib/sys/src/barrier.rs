//! `membarrier(2)`: every running thread of this process executes a full barrier.

const PRIVATE_EXPEDITED: libc::c_int = 8;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 16;

/// Registers this process for [`expedited`]; `false` where the kernel or a seccomp filter refuses it.
#[must_use]
pub fn register() -> bool {
    membarrier(REGISTER_PRIVATE_EXPEDITED)
}

/// Runs the barrier in all threads; `false` if this process is not registered, as a child is not after `exec`.
#[must_use]
pub fn expedited() -> bool {
    membarrier(PRIVATE_EXPEDITED)
}

#[expect(unsafe_code, reason = "neither nix nor libc has a function for it")]
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: it takes numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
