//! `shmesh completions` and `shmesh man`: files for shells and for man, made from the same definitions as `--help`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::CommandFactory;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  shmesh completions bash > /etc/bash_completion.d/shmesh
  shmesh completions zsh  > \"${fpath[1]}/_shmesh\"
  shmesh completions fish > ~/.config/fish/completions/shmesh.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell that will read the completions
    shell: clap_complete::Shell,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Example:
  shmesh man /usr/local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Directory for the pages; it is created if it does not exist
    directory: PathBuf,
}

pub(crate) fn completions(args: &CompletionsArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    // Into memory first: the generator panics when a pipe is closed.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "shmesh", &mut text);
    Ok(out.write_all(&text)?)
}

pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let directory = &args.directory;
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    clap_mangen::generate_to(crate::Cli::command(), directory)
        .with_context(|| format!("cannot write man pages to {}", directory.display()))
}
