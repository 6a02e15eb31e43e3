//! Running compilers and C programs.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

/// Time limit for a C program. It is longer than the alarm that a test program sets itself, so that its own message
/// comes first. An example sets none; if one of its processes fails, the others may wait until this limit.
const PROGRAM_HANGS: Duration = Duration::from_secs(400);

/// Runs a command that must succeed; its output is shown if it does not.
#[track_caller]
pub fn succeed(command: &mut Command) -> Output {
    let shown = format!("{command:?}");
    let output =
        command.output().unwrap_or_else(|error| panic!("{shown}: {error}; install a C and a C++ compiler"));
    assert_success(&shown, &output);
    output
}

#[track_caller]
fn assert_success(shown: &str, output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{shown}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
}

/// Writes a shell script that is executable when this returns.
///
/// Another process writes it, because a file that is open for writing cannot be executed: were it open here, a child that another
/// thread forks would have it open until it executes its program.
#[track_caller]
pub fn write_script(path: &Path, text: &str) {
    let write = ["-c", "cat >\"$0\" && chmod 755 \"$0\""];
    let mut writer = Command::new("sh").args(write).arg(path).stdin(Stdio::piped()).spawn().unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success(), "cannot write {}", path.display());
}

/// Runs a command in a process group of its own, and kills the group when the command has ended or `limit` is over. Its
/// output goes to files: unlike a pipe, they need not be read until the last process that has them open has ended.
pub fn output_within(command: &mut Command, limit: Duration) -> Output {
    let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
    let [stdout, stderr] = [0, 1].map(|i: usize| Stdio::from(files[i].try_clone().unwrap()));
    command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let pid = Pid::from_raw(child.id().cast_signed());
    let start = Instant::now();
    // Not reaped yet, so no other process group can have its id.
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    while waitid(Id::Pid(pid), flags) == Ok(WaitStatus::StillAlive) && start.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = killpg(pid, Signal::SIGKILL);
    let status = child.wait().unwrap();
    let [stdout, stderr] = files.map(|mut file: File| {
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).unwrap();
        bytes
    });
    Output { status, stdout, stderr }
}

/// Runs a program in an IPC directory of its own, which it leaves empty.
#[track_caller]
pub fn run_program(program: &Path, configure: impl FnOnce(&mut Command)) {
    let dir = crate::ipc_dir();
    let mut command = Command::new(program);
    command.env("SHMESH_DIR", dir.path()).env("ASAN_OPTIONS", "detect_leaks=0");
    command.env("UBSAN_OPTIONS", "print_stacktrace=1");
    // Cargo's value would find the library of an earlier build first.
    command.env_remove("LD_LIBRARY_PATH");
    configure(&mut command);
    let output = output_within(&mut command, PROGRAM_HANGS);
    assert_success(&format!("{command:?}"), &output);
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// A child that hangs with the output open does not block the caller, and is killed.
    #[test]
    fn program_ends_with_its_children() {
        let output = output_within(&mut shell("sleep 1000 & echo $!; echo oops >&2; exit 3"), PROGRAM_HANGS);
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(3), b"oops\n".as_slice()));
        let child = String::from_utf8(output.stdout).unwrap();
        let stat = format!("/proc/{}/stat", child.trim());
        // Gone, or a zombie that its new parent has not reaped yet.
        crate::until("the child ends", || match std::fs::read_to_string(&stat) {
            Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
            Err(_) => true,
        });
    }

    #[test]
    fn program_that_hangs_is_killed() {
        let output = output_within(&mut shell("echo begun; sleep 1000 | cat"), Duration::from_millis(300));
        assert_eq!(output.status.signal(), Some(Signal::SIGKILL as i32));
    }
}
