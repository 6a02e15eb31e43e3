//! All calls to the kernel and the C library that shmesh makes, behind safe functions.
//!
//! No other product crate depends on `libc` or `nix`, declares C functions or contains assembly, which `.ci/kernel.py`
//! checks. There are three exceptions: `lib/posix`, which takes the place of the C library in programs and depends on `libc`;
//! `lib/src/device`, which loads drivers of vendors; and the prefetch instructions in `lib/src/segment/lines.rs`.
//!
//! Descriptors are passed as `BorrowedFd` and returned as `OwnedFd`; errors are `io::Error`, or a small enum if the caller
//! has to distinguish cases.
//!
//! | module | concept |
//! |---|---|
//! | [`errno`] | error numbers |
//! | [`file`](mod@file) | files and memfds of segments: reserved, sealed, mapped, locked |
//! | [`lease`] | whether any process uses a file of an IPC directory |
//! | [`huge`] | huge pages for files in memory |
//! | [`dir`] | directories that others can write, by descriptor and without following symbolic links |
//! | [`mount`], [`mountinfo`] | the file system of a path, and its free space; the list of mounts |
//! | [`socket`] | unix sockets, descriptors and credentials over them, hanging up |
//! | [`closing`] | closing descriptors of an untrusted peer, without lingering |
//! | [`udp`] | datagrams between nodes |
//! | [`eventfd`] | eventfds in semaphore mode |
//! | [`poll`](mod@poll), [`epoll`] | waiting for descriptors |
//! | [`bell`] | named datagram sockets that wake up their owner |
//! | [`inotify`] | detecting that files are opened and closed, and directories changed |
//! | [`futex`] | waiting for a word in shared memory |
//! | [`process`] | this process and others: identity, liveness, signals to children |
//! | [`pidfd`], [`identify`](mod@identify) | identifying a process by a descriptor, a socket or its id |
//! | [`procfs`], [`namespace`] | facts from `/proc` |
//! | [`cgroup`] | memory that may still be charged |
//! | [`sigbus`] | mappings that survive the truncation of their file |
//! | [`signal`] | blocking signals of threads, and waiting for them |
//! | [`cancel`], [`fork`] | threads that C programs cancel, processes that fork |
//! | [`sched`] | processor affinity |
//! | [`resident`] | pages that are not needed again |
//! | [`rlimit`], [`user`], [`time`] | limits, users, clocks |
//! | [`terminal`], [`table`], [`causes`] | text on a terminal: its width, control characters, closed pipes; tables; errors with their causes |
//! | [`human`], [`top`] | numbers for people; the table that `shmesh top` and `kubectl shmesh top` print |
//! | [`sysv`] | System V shared memory of other processes |
//! | [`quantity`] | numbers of bytes as Kubernetes writes them, which all programs read and show |

pub mod bell;
pub mod cancel;
pub mod causes;
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
pub mod human;
pub mod identify;
pub mod inotify;
pub mod lease;
pub mod mount;
pub mod mountinfo;
pub mod namespace;
pub mod pidfd;
pub mod poll;
pub mod process;
pub mod procfs;
pub mod quantity;
pub mod resident;
pub mod rlimit;
pub mod sched;
pub mod sigbus;
pub mod signal;
pub mod socket;
pub mod sysv;
pub mod table;
pub mod terminal;
pub mod time;
pub mod top;
pub mod udp;
pub mod user;
