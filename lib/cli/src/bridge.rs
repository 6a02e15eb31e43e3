//! `shmesh bridge`: runs the program `shmesh-bridge`, which is installed separately because of what it depends on.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, anyhow};

const PROGRAM: &str = "shmesh-bridge";

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  shmesh bridge --link fronthaul --listen tcp/0.0.0.0:7447           where the link is
  shmesh bridge --link fronthaul --connect tcp/192.0.2.7:7447        on another machine")]
pub(crate) struct Args {
    /// Arguments of `shmesh-bridge`, such as `--link fronthaul --connect tcp/host:7447`; `shmesh-bridge --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Becomes `shmesh-bridge`: the one beside this program, else the one in `PATH`.
pub(crate) fn run(args: &Args) -> Result<Infallible> {
    let beside =
        std::env::current_exe().ok().map(|me| me.with_file_name(PROGRAM)).filter(|path| path.is_file());
    let program = beside.unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(&program).args(&args.arguments).exec();
    if error.kind() == ErrorKind::NotFound {
        return Err(anyhow!(
            "{PROGRAM} is not installed: install the package shmesh-bridge, or build it with `cargo install --locked --path lib/bridge`, and put it beside this program or in PATH"
        ));
    }
    Err(anyhow::Error::new(error).context(format!("cannot start {}", program.display())))
}
