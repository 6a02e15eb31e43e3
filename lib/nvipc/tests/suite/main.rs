//! NVIPC's layout and datagrams, between our own processes and beside a hostile one.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod datagrams;
mod deaths;
mod hostile;
mod support;
mod two_sides;

shmesh_testing::peer_process!(support::serve);
