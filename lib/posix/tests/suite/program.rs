//! Programs with the library, and the directories that they work in.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use shmesh_testing::{output_within, succeed};

const HERE: &str = env!("CARGO_MANIFEST_DIR");
/// Longer than the alarm that each program sets itself.
const HANGS: Duration = Duration::from_secs(400);

/// A folder with the library that cargo has built for this test, and the programs.
pub(crate) fn folder() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("posix");
        // A test in a process of its own: its parent has built it.
        if std::env::var_os("SHMESH_POSIX_IS_BUILT").is_some() {
            return folder;
        }
        let test = std::env::current_exe().unwrap();
        std::fs::create_dir_all(&folder).unwrap();
        replace(&folder.join("libshmesh_posix.so"), |new| {
            std::fs::copy(test.with_file_name("libshmesh_posix.so"), new).unwrap();
        });
        for program in ["memory", "names", "sysv", "room", "peer", "refused"] {
            let out = folder.join(program);
            let changed = |path: &Path| path.metadata().and_then(|found| found.modified()).ok();
            let sources =
                [format!("{HERE}/tests/programs/{program}.c"), format!("{HERE}/tests/programs/check.h")];
            if sources.iter().any(|source| changed(Path::new(source)) >= changed(&out)) {
                replace(&out, |new| compile(program, new, &[]));
            }
        }
        folder
    })
}

/// Makes a file anew beside the old one, which other processes may be running.
fn replace(path: &Path, make: impl FnOnce(&Path)) {
    let new = path.with_extension(std::process::id().to_string());
    make(&new);
    std::fs::rename(new, path).unwrap();
}

/// Compiles one of the programs.
#[track_caller]
pub(crate) fn compile(program: &str, out: &Path, flags: &[&str]) {
    let mut command = Command::new("cc");
    command
        .args(["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(flags)
        .arg("-o")
        .arg(out);
    succeed(command.arg(format!("{HERE}/tests/programs/{program}.c")));
}

pub(crate) fn library() -> PathBuf {
    folder().join("libshmesh_posix.so")
}

pub(crate) fn path(program: &str) -> PathBuf {
    folder().join(program)
}

/// A command that runs with the library, in an IPC directory.
pub(crate) fn with_library(program: impl AsRef<std::ffi::OsStr>, dir: &Path) -> Command {
    let mut command = Command::new(program);
    // Cargo's would find the library of an earlier build first.
    command.env("LD_PRELOAD", library()).env("SHMESH_DIR", dir).env_remove("LD_LIBRARY_PATH");
    command
}

pub(crate) fn output(command: &mut Command) -> Output {
    output_within(command, HANGS)
}

/// The standard output of a command that has to succeed and to print no error.
#[track_caller]
pub(crate) fn said(command: &mut Command) -> String {
    let output = output(command);
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success() && stderr.is_empty(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    stdout
}

/// A running program that prints what it did, line by line, and waits for a line where the test controls its steps.
pub(crate) struct RunningProgram {
    pub(crate) child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl RunningProgram {
    #[track_caller]
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    /// The next line; empty when the program has ended.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    #[track_caller]
    pub(crate) fn expect(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    pub(crate) fn go_on(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    pub(crate) fn kill(self) {
        drop(self);
    }

    #[track_caller]
    pub(crate) fn end(mut self) {
        drop(self.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

/// With the processes of its namespaces: the kernel forgets that they are to die with it when they change their user.
impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// Removes what is stale in a directory, and gives the names of what is left.
pub(crate) fn left_after_collection(dir: &Path) -> Vec<String> {
    for name in shmesh_testing::files(dir) {
        shmesh_sys::lease::remove_unused(&dir.join(name)).unwrap();
    }
    shmesh_testing::files(dir)
}
