//! The command, as users and scripts call it.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod capture;
mod command;
mod device;
