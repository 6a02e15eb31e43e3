//! `libshmesh_nvipc`: the C interface of NVIPC over links of shmesh.
//!
//! | file | concept |
//! |---|---|
//! | `types.rs` | structures and constants, as `include/nv_ipc.h` has them |
//! | `config.rs` | defaults, and what of a configuration a link is made of |
//! | `yaml.rs` | what files say beyond that |
//! | `instance.rs` | the instances of this process, and finding them by address and by name |
//! | `calls.rs` | the sixteen functions of an instance |
//! | `helpers.rs` | the functions beside them |
//! | `tap.rs`, `forward.rs` | what passes, for a third reader, and NVIPC's functions of that |
//! | `array_queue.rs` | NVIPC's queue for programs that use it by itself; the rest of its helpers is in `c/` |
//! | `backend/` | what carries the messages |
//! | `cancel.rs` | threads that are cancelled |
//! | `log.rs` | one line for each refusal, and not too many |
//!
//! Nothing here ends the process, and nothing unwinds into the caller: what is refused is -1 or NULL, and a line on standard
//! error that names the remedy. `docs/nvipc.md` lists where that differs from NVIPC.
// Unsafe: C calls it, with pointers that nobody can check further than by NULL, alignment and range.
#![expect(unsafe_code, reason = "the edge to C")]

pub mod array_queue;
pub mod backend;
mod calls;
mod cancel;
pub mod config;
pub mod forward;
pub mod helpers;
pub mod instance;
mod log;
pub mod tap;
pub mod types;
mod yaml;
