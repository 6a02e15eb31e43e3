//! Running compilers, and the C programs that they make.

use std::path::Path;
use std::process::{Command, Output};

/// Runs a command that has to succeed; what it says is shown if it does not.
#[track_caller]
pub fn succeed(command: &mut Command) -> Output {
    let shown = format!("{command:?}");
    let output =
        command.output().unwrap_or_else(|error| panic!("{shown}: {error}; install a C and a C++ compiler"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{shown}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Runs a program in an IPC directory of its own, which it leaves empty.
#[track_caller]
pub fn run_program(program: &Path, configure: impl FnOnce(&mut Command)) {
    let shm = Path::new("/dev/shm");
    let mut builder = tempfile::Builder::new();
    let dir = builder.prefix("shmesh-c-").tempdir_in(shm).or_else(|_| tempfile::tempdir()).unwrap();
    let mut command = Command::new(program);
    command.env("SHMESH_DIR", dir.path()).env("ASAN_OPTIONS", "detect_leaks=0");
    command.env("UBSAN_OPTIONS", "print_stacktrace=1");
    // Cargo's would find the library of an earlier build first.
    command.env_remove("LD_LIBRARY_PATH");
    configure(&mut command);
    succeed(&mut command);
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}
