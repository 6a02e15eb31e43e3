//! Arguments that several subcommands share.

use std::path::PathBuf;

/// The IPC directory.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Dir {
    /// IPC directory with the links
    #[arg(long, value_name = "DIR", env = shmesh::DIR_VARIABLE, default_value = shmesh::DEFAULT_DIR)]
    pub(crate) dir: PathBuf,
}

/// How to print results.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Output {
    /// Aligned tables for people
    Text,
    /// JSON for programs
    Json,
}

/// Checks a time that is asked for.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("must lie between 0.1 and 3600".to_owned())
    }
}
