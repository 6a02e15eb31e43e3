//! Runs tests in a process of their own.

use std::process::{Command, Output};

/// Set in the environment of such a process, to the name of its test.
const MARKER: &str = "SHMESH_TEST_OWN_PROCESS";

/// Runs the body of the calling test in a process of its own, where it is the only test. For tests that count
/// descriptors or threads, change limits, signal handlers or namespaces, or fork.
///
/// The body must be a closure in the test function itself: the name of the test is read from its type.
///
/// # Panics
///
/// If the body panicked, or the process failed otherwise.
#[track_caller]
pub fn own_process<F: FnOnce()>(body: F) {
    if let Some(output) = own_process_by(this_test, body) {
        assert!(passed(&output), "{} in a process of its own: {}", test_of::<F>(), output.status);
    }
}

/// Like [`own_process`], with a command that runs [`this_test`], for example under `unshare` or with environment variables.
/// Returns the output of the process, and `None` in that process.
pub fn own_process_by<F: FnOnce()>(command: impl FnOnce() -> Command, body: F) -> Option<Output> {
    let name = test_of::<F>();
    if std::env::var(MARKER).is_ok_and(|marked| marked == name) {
        body();
        return None;
    }
    let output = command()
        .args([name, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(MARKER, name)
        .output()
        .expect("start this test again");
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    Some(output)
}

/// A command that runs this test program.
#[must_use]
pub fn this_test() -> Command {
    Command::new(std::env::current_exe().expect("the path of this test"))
}

/// Whether exactly one test ran and passed: a name that matches no test would succeed too.
#[must_use]
pub fn passed(output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stdout);
    output.status.success() && said.contains("test result: ok. 1 passed")
}

/// The name of the test that contains the closure, as the harness knows it.
fn test_of<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let test = path.strip_suffix("::{{closure}}").expect("a closure in a test function");
    test.split_once("::").expect("a path that begins with the crate").1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_runs_in_another_process() {
        own_process(|| {
            let marker = std::env::var(MARKER).expect("this is the other process");
            assert_eq!(marker, "process::tests::body_runs_in_another_process");
        });
    }

    #[test]
    #[should_panic(expected = "in a process of its own")]
    fn panic_in_the_body_fails_the_test() {
        own_process(|| std::process::exit(7));
    }
}
