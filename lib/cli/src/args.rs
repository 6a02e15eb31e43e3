//! Arguments that several subcommands share.

use std::path::PathBuf;

use shmesh::config::LinkName;

/// The option for the IPC directory.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Dir {
    /// IPC directory with the links
    #[arg(long, value_name = "DIR", env = shmesh::DIR_VARIABLE, default_value = shmesh::DEFAULT_DIR)]
    pub(crate) dir: PathBuf,
}

/// The options of a subcommand that reports on one link.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct LinkArgs {
    /// Name of the link
    #[arg(value_name = "LINK")]
    pub(crate) link: LinkName,
    #[command(flatten)]
    pub(crate) dir: Dir,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    pub(crate) output: Output,
}

/// The output format of a subcommand.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Output {
    /// Aligned columns and sentences, for people
    Text,
    /// JSON, for other programs
    Json,
}

/// Parses a duration in seconds.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("must lie between 0.1 and 3600".to_owned())
    }
}
