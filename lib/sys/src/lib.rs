//! Every call to the kernel and the C library that shmesh makes, behind safe functions.
//!
//! No other product crate depends on `libc` or `nix`; `tests/dependencies.rs` checks that. Descriptors go in as `BorrowedFd` and
//! out as `OwnedFd`; errors are `io::Error`, or a small enum where the caller has to tell cases apart.
//!
//! | module | concept |
//! |---|---|
//! | [`errno`] | error numbers |
//! | [`file`](mod@file) | files and memfds of segments: reserved, sealed, mapped, locked |
//! | [`lease`] | whether any process uses a file of an IPC directory |
//! | [`huge`] | huge pages for files in memory |
//! | [`dir`] | directories of others, by descriptor and without following links |
//! | [`mount`] | which file system a path is on, and how much is free there |
//! | [`socket`] | unix sockets, descriptors and credentials over them, hanging up |
//! | [`closing`] | closing what a stranger has sent, without lingering |
//! | [`udp`] | datagrams between nodes |
//! | [`eventfd`] | eventfds in semaphore mode |
//! | [`poll`](mod@poll) | waiting for descriptors |
//! | [`bell`] | named datagram sockets that only wake |
//! | [`inotify`] | learning that files are opened and closed |
//! | [`futex`] | waiting for a word in shared memory |
//! | [`process`] | this process and others: identity, liveness, signals to children |
//! | [`pidfd`], [`identify`](mod@identify) | from a descriptor, a socket or a number to a process, never a mixture of two |
//! | [`procfs`], [`namespace`] | what `/proc` says |
//! | [`cgroup`] | memory that may still be charged |
//! | [`sigbus`] | mappings that survive the truncation of their file |
//! | [`signal`] | signals of threads |
//! | [`cancel`], [`fork`] | threads that C programs cancel, processes that fork |
//! | [`sched`] | processor affinity |
//! | [`rlimit`], [`user`], [`time`] | limits, users, clocks |
//! | [`sysv`] | System V shared memory of others |

pub mod bell;
pub mod cancel;
pub mod cgroup;
pub mod closing;
pub mod dir;
pub mod epoll;
pub mod errno;
pub mod eventfd;
pub mod file;
pub mod fork;
pub mod futex;
pub mod huge;
pub mod identify;
pub mod inotify;
pub mod lease;
pub mod mount;
pub mod namespace;
pub mod pidfd;
pub mod poll;
pub mod process;
pub mod procfs;
pub mod rlimit;
pub mod sched;
pub mod sigbus;
pub mod signal;
pub mod socket;
pub mod sysv;
pub mod time;
pub mod udp;
pub mod user;
