//! Builds the library, and runs programs that know nothing of it: C programs of `tests/programs`, Debian's `ipcmk` and `ipcs`, and Python.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod alone;
mod kills;
mod namespaces;
mod program;
