//! The C interface: its header, and C programs that use it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod c;
mod errors;
#[expect(unsafe_code, reason = "the table of the library, which is private to it")]
#[path = "../../src/handles.rs"]
mod handles;
mod header;
#[expect(unsafe_code, reason = "it reads names as C does")]
mod table;
