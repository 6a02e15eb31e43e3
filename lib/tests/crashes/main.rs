//! Participants that die, stand still or write what they like, at any instruction and under load. What survives must
//! not notice.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod broadcast;
mod broadcast_kills;
mod crash_points;
mod crashpoint;
mod frozen;
mod harness;
mod hostile;
mod killer;
mod layout;
mod random;
mod requests;
mod scenes;
mod selftest;
mod shared;
mod workers;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(worker) = killer::worker() {
        return ExitCode::from(worker.run());
    }
    if broadcast_kills::is_worker() {
        return ExitCode::from(broadcast_kills::work());
    }
    harness::main(&[
        selftest::CASES,
        crash_points::CASES,
        requests::CASES,
        broadcast::CASES,
        broadcast_kills::CASES,
        frozen::CASES,
        hostile::CASES,
        killer::CASES,
    ])
}
