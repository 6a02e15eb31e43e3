//! Every system call of the library, one file per kind. Descriptors go in and out as `OwnedFd`.
//!
//! Public is what tells whether a process lives, how much memory its container has left, taking memory of it, and the sockets
//! that brokers and participants meet at.
//!
//! ```
//! use shmesh::sys::process::{Liveness, ProcessIdentity};
//! # let dir = tempfile::tempdir()?;
//! # let options = shmesh::LinkOptions::new().dir(dir.path());
//! # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
//! let me = ProcessIdentity::me()?;
//! assert!(link.participants().all(|other| other.liveness(&me) == Liveness::Alive));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cgroup;
pub(crate) mod eventfd;
pub(crate) mod fifo;
pub(crate) mod file;
pub(crate) mod futex;
pub mod process;
pub mod socket;

pub use file::reserve;
