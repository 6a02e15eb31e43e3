//! The `shmesh` command.
fn main() {}
