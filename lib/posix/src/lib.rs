//! `libshmesh_posix.so`: POSIX and System V shared memory between pods, for programs that were not written for shmesh.
//!
//! Loaded with `LD_PRELOAD`, it takes the place of the functions of the C library that make, open, size and remove shared memory.
//! Calls that do not concern the IPC directory reach the C library unchanged, and no call is intercepted after a file is mapped.
//! `docs/unmodified-programs.md` is its manual.
//!
//! | file | concept |
//! |---|---|
//! | `exports.rs` | the functions that take the place of the C library's |
//! | `real.rs` | the C library's own |
//! | `sys.rs` | system calls, which go past the functions above |
//! | `settings.rs` | the environment variables, read once, and which paths are below the IPC directory |
//! | `path.rs` | paths on the stack |
//! | `open.rs` | opening files with group bits, mark and lease |
//! | `grow.rs` | sizes: reserved, and within the limit |
//! | `locks.rs` | locks of programs, which leave out the bytes of leases |
//! | `semaphores.rs` | named semaphores |
//! | `sysv.rs`, `attachments.rs` | System V segments as files, and where this process has them |
//!
//! Rules that a host program imposes: it may call these functions before the C library has started its threads or its allocator, in a
//! signal handler, and in a forked child. So nothing here allocates on the way of a call (but [`settings`], once, and the look at
//! the memory limit before a large file), the one lock is taken over in a forked child, and no code panics: sums saturate, and what
//! fails inside is passed to the C library's function. A panic could not unwind into the program anyway: `extern "C"` aborts.

#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!(
    "the calling convention of variadic functions was checked for Linux on x86-64 and AArch64 only"
);

mod attachments;
mod exports;
mod grow;
mod locks;
mod open;
mod path;
mod real;
mod semaphores;
mod settings;
mod sys;
mod sysv;
