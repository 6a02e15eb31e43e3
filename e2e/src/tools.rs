//! External commands, run with a timeout and with their output in errors.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use tokio::process::Command;

/// Returns the path of a command if it is installed.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| {
        let mode = |file: &PathBuf| {
            file.metadata().map(|data| std::os::unix::fs::PermissionsExt::mode(&data.permissions()))
        };
        file.is_file() && mode(file).is_ok_and(|mode| mode & 0o111 != 0)
    })
}

/// Creates a directory that only this user can read, removed when it is dropped.
pub(crate) fn private_dir() -> Result<TempDir> {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("shmesh-e2e-").permissions(mode).tempdir();
    made.context("cannot make a temporary directory")
}

/// An external command with a timeout.
#[derive(Debug)]
pub(crate) struct Tool {
    command: Command,
    shown: String,
    limit: Duration,
}

impl Tool {
    pub(crate) fn new(name: &str, limit: Duration) -> Self {
        Self { command: Command::new(name), shown: name.to_owned(), limit }
    }

    pub(crate) fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        for arg in args {
            self.shown = format!("{} {}", self.shown, arg.as_ref().to_string_lossy());
            self.command.arg(arg);
        }
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs the command and returns its standard output.
    pub(crate) async fn run(mut self) -> Result<String> {
        // In a process group of its own: Ctrl-C reaches only us, and we kill the group with all children.
        self.command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let child = self.command.spawn().with_context(|| format!("cannot start {}", self.shown))?;
        let mut group = Group(child.id());
        let Ok(ended) = tokio::time::timeout(self.limit, child.wait_with_output()).await else {
            bail!("{} took longer than {} s; it was killed", self.shown, self.limit.as_secs());
        };
        let output = ended.with_context(|| format!("cannot wait for {}", self.shown))?;
        // The process was reaped, so its pid may be reused.
        group.0 = None;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr);
            let words = if words.trim().is_empty() { said.trim() } else { words.trim() };
            bail!("{}: {}: {}", self.shown, output.status, last_lines(words, 20));
        }
        Ok(said)
    }
}

/// The process group of a command, killed on drop.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0.take() {
            let _ = shmesh_sys::process::kill_group(leader);
        }
    }
}

/// Returns the last lines of a text.
pub(crate) fn last_lines(text: &str, most: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(most)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn private_directory_is_for_this_user_only_and_removed() {
        let dir = private_dir().unwrap();
        let path = dir.path().to_owned();
        let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o700);
        drop(dir);
        assert!(!path.exists());
    }

    fn sh(script: &str, limit: Duration) -> Tool {
        Tool::new("sh", limit).args(["-c", script])
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn node_script_output_is_reported() {
        assert_eq!(sh("echo out; echo err >&2", LONG).run().await.unwrap(), "out\n");
        let error =
            sh("echo out; echo 'no such thing' >&2; exit 3", LONG).run().await.unwrap_err().to_string();
        assert!(error.starts_with("sh -c ") && error.ends_with("exit status: 3: no such thing"), "{error}");
        let error = sh("echo on-standard-output; exit 1", LONG).run().await.unwrap_err().to_string();
        assert!(error.ends_with("on-standard-output"), "{error}");
        let error = Tool::new("no-such-command", LONG).run().await.unwrap_err().to_string();
        assert_eq!(error, "cannot start no-such-command");
    }

    #[tokio::test]
    async fn slow_command_is_killed() {
        let began = Instant::now();
        let error = sh("sleep 600", Duration::from_millis(100)).run().await.unwrap_err().to_string();
        assert!(error.ends_with("took longer than 0 s; it was killed"), "{error}");
        assert!(began.elapsed() < LONG);
    }

    #[tokio::test]
    async fn dropped_command_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("child");
        let script = format!("sleep 600 & echo $! >{0}.new; mv {0}.new {0}; wait", file.display());
        let running = tokio::spawn(sh(&script, LONG).run());
        let began = Instant::now();
        let until = async |what: &str, is: &dyn Fn() -> bool| {
            while !is() {
                assert!(began.elapsed() < LONG, "{what}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        until("it never started", &|| file.exists()).await;
        let child: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        running.abort();
        let is_gone =
            || nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), None).is_err() || is_zombie(child);
        until("the child lives", &is_gone).await;
    }

    fn is_zombie(pid: i32) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z"))
    }

    #[test]
    fn commands_are_found_in_path() {
        assert!(find("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(find("no-such-command"), None);
    }
}
