//! Completions: for shells that call `kubectl-shmesh`, and for kubectl, which asks a program `kubectl_complete-shmesh`.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

use clap::{Command, CommandFactory, ValueHint};

/// Name under which kubectl asks for completions of `kubectl shmesh`: a link to this program.
const ASKED_BY_KUBECTL: &str = "kubectl_complete-shmesh";

#[derive(clap::Args, Debug)]
#[command(after_help = "\
kubectl completes `kubectl shmesh` in every shell that `kubectl completion` supports, if a link to this program is in PATH:
  ln -s \"$(command -v kubectl-shmesh)\" ~/.local/bin/kubectl_complete-shmesh

Examples, for the program's own name:
  kubectl shmesh completions bash > /etc/bash_completion.d/kubectl-shmesh
  kubectl shmesh completions zsh  > \"${fpath[1]}/_kubectl-shmesh\"
  kubectl shmesh completions fish > ~/.config/fish/completions/kubectl-shmesh.fish")]
pub(crate) struct ShellArgs {
    /// The shell that will read the completions
    shell: clap_complete::Shell,
}

pub(crate) fn completions(args: &ShellArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    // Into memory first: the generator panics when a pipe is closed.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "kubectl-shmesh", &mut text);
    Ok(out.write_all(&text)?)
}

/// Whether kubectl asks for completions.
pub(crate) fn is_completion(args: &[OsString]) -> bool {
    let program = args.first().map(Path::new).and_then(Path::file_name);
    program.is_some_and(|name| name == ASKED_BY_KUBECTL)
}

/// The completions of the last word, as kubectl reads them: a word and its description in each line, and a directive.
pub(crate) fn complete(words: &[OsString]) -> String {
    let (last, before) =
        words.split_last().map_or(("", words), |(last, before)| (last.to_str().unwrap_or(""), before));
    let cli = crate::Cli::command();
    let subcommand = before.iter().find_map(|word| cli.find_subcommand(word));
    let command = subcommand.unwrap_or(&cli);
    let mut text = String::new();
    let mut add = |word: &str, about: Option<&clap::builder::StyledStr>| {
        if word.starts_with(last) {
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "{word}\t{about}");
        }
    };
    // An option and its value are two words, or one with `=`.
    let option = last.split_once('=').map(|(option, _)| option).or_else(|| before.last()?.to_str());
    if option.is_some_and(|option| takes_file(command, option)) {
        // No words: then the shell completes names of files.
        return ":0\n".to_owned();
    }
    if last.starts_with('-') {
        for arg in command.get_arguments() {
            if let Some(long) = arg.get_long() {
                add(&format!("--{long}"), arg.get_help());
            }
        }
    } else if subcommand.is_none() {
        for command in cli.get_subcommands() {
            add(command.get_name(), command.get_about());
        }
    }
    // No file names.
    text.push_str(":4\n");
    text
}

/// Whether the value of an option is a file.
fn takes_file(command: &Command, option: &str) -> bool {
    command.get_arguments().any(|arg| {
        let long = arg.get_long().map(|name| format!("--{name}"));
        let short = arg.get_short().map(|name| format!("-{name}"));
        let is_named = [long, short].iter().flatten().any(|name| name == option);
        is_named && arg.get_value_hint() == ValueHint::AnyPath
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(words: &[&str]) -> Vec<String> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let text = complete(&words);
        text.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn kubectl_gets_subcommands_and_options() {
        assert_eq!(completed(&["c"]), ["check", "claim", "completions", ":4"]);
        assert_eq!(completed(&["ls", "--no"]), ["--node", ":4"]);
        assert_eq!(completed(&["ls", "-n", "x", "--all"]), ["--all-namespaces", ":4"]);
        assert_eq!(completed(&["ls", ""]), [":4"]);
        for words in [
            &["inject", "-f", ""][..],
            &["claim", "--file", "a"],
            &["ls", "--kubeconfig", ""],
            &["ls", "--kubeconfig=a"],
        ] {
            assert_eq!(completed(words), [":0"], "{words:?}: files");
        }
        assert_eq!(completed(&["inject", "--namespace", ""]), [":4"]);
        assert!(completed(&[]).len() > 8);
        assert!(
            is_completion(&["/a/kubectl_complete-shmesh".into()])
                && !is_completion(&["kubectl-shmesh".into()])
        );
    }
}
