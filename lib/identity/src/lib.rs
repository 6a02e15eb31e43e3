//! Who is that process? The kernel's word, and nothing that a process says of itself.
//!
//! A number of a process means nothing by itself: it may be another's by the time it is used. But while a process lives, its
//! number is its own. So everything starts from a pidfd, all facts are read first, and then the pidfd is asked whether the
//! process lives still: if it does, all that was read was read of it; if not, nothing of it is given out.
//!
//! | file | concept |
//! |---|---|
//! | `pidfd.rs` | from a descriptor, a socket or a number to a pidfd |
//! | `procfs.rs` | what `/proc` says of a process: parsers |
//! | `process.rs` | from a pidfd to an identity, never a mixture |
//! | `namespace.rs` | which numbers this process sees |
//!
//! The sidecar uses it where it sees its peers itself, and the node's identity service for everybody else.

pub mod namespace;
pub mod pidfd;
pub mod process;
pub mod procfs;
