//! `libshmesh_nvipc`: the C interface of NVIPC over links of shmesh.
//!
//! | file | concept |
//! |---|---|
//! | `types.rs` | structures and constants of `include/nv_ipc.h` |
//! | `config.rs` | default configurations, creation of links from a configuration |
//! | `yaml.rs` | settings of files that a link's configuration does not have |
//! | `layout.rs` | whether a link has shmesh's layout or NVIPC's |
//! | `instance.rs` | the instances of this process, found by address and by name |
//! | `calls.rs` | the creation of an instance, and its sixteen functions |
//! | `helpers.rs` | the other functions of NVIPC |
//! | `tap.rs`, `forward.rs` | copies of messages for a third reader, and NVIPC's functions for it |
//! | `array_queue.rs` | NVIPC's queue for programs that use it by itself; the other helpers are in `c/` |
//! | `backend/` | the transports |
//! | `cancel.rs` | waits of threads that may be cancelled |
//! | `idle.rs` | threads that poll yield the processor |
//! | `guard.rs` | no panic unwinds into C |
//! | `log.rs` | one log line per failure, rate-limited |
//!
//! Nothing here ends the process or unwinds into the caller. A function that fails returns -1 or NULL and writes a line
//! with the remedy to standard error. `docs/nvipc.md` lists where that differs from NVIPC.
// Unsafe: C calls these functions, with pointers that can only be checked for NULL, alignment and range.
#![expect(unsafe_code, reason = "the edge to C")]

pub mod array_queue;
pub mod backend;
pub mod calls;
mod cancel;
pub mod config;
pub mod forward;
mod guard;
pub mod helpers;
mod idle;
pub mod instance;
mod layout;
mod log;
pub mod tap;
pub mod types;
mod yaml;
