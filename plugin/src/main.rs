//! Entry point of the command `shmesh-plugin`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(shmesh_plugin::run(std::env::args_os()))
}
