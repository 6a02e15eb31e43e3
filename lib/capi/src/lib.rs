//! `libshmesh`: links of shmesh for C and C++.
//!
//! | file | concept |
//! |---|---|
//! | `error.rs` | codes, their texts, and what went wrong last |
//! | `config.rs` | configurations from YAML |
//! | `handles.rs` | handles of C, and the table of what they stand for |
//! | `link.rs` | a participant; waiting and waking |
//! | `events.rs` | peer events |
//! | `message.rs` | loans and messages |
//!
//! `include/shmesh.h` is generated from here and checked in; `tests/suite/header.rs` fails when it is not what it should be, and
//! repairs it.
// Unsafe: C calls it, with pointers that nobody can check further than by NULL.
#![expect(unsafe_code, reason = "the edge to C")]
#![expect(non_camel_case_types, reason = "the names of the interface")]

pub mod config;
pub mod error;
pub mod events;
mod handles;
pub mod link;
pub mod message;
