//! The C interface: its header, and C programs that use it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod c;
mod header;
