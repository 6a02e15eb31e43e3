//! `libshmesh`: the C and C++ interface of shmesh links.
//!
//! | file | concept |
//! |---|---|
//! | `error.rs` | error codes, their texts, and the last error |
//! | `config.rs` | configurations from YAML |
//! | `handles.rs` | C handles and the table behind them |
//! | `link.rs` | creating, attaching, waiting and waking |
//! | `events.rs` | peer events |
//! | `message.rs` | loans and messages |
//! | `borrows.rs` | the tables that they refer to |
//!
//! `include/shmesh.h` is generated from these files and checked in. `tests/suite/header.rs` fails if it is out of date, and updates it.
// Unsafe: C calls these functions with pointers that cannot be checked except for NULL.
#![expect(unsafe_code, reason = "the edge to C")]
#![expect(non_camel_case_types, reason = "the names of the interface")]

mod borrows;
pub mod config;
pub mod error;
pub mod events;
mod handles;
pub mod link;
pub mod message;
pub mod request;
