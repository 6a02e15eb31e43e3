//! Compiles the C programs in `tests`, links them with the library that cargo has just built, and runs them: as they
//! are, as C++, with the static library, and under the address and undefined-behaviour sanitizers.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};
use std::process::Command;

use shmesh_testing::{run_program, succeed};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The folder with the libraries: that of this test.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Compiles a program with the flags and links it with the shared library.
#[track_caller]
fn compiled(compiler: &str, program: &str, flags: &[&str], into: &Path) -> PathBuf {
    let out = into.join(program);
    let mut command = Command::new(compiler);
    command
        .args(flags)
        .args(["-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(format!("{HERE}/include"));
    command.arg("-o").arg(&out).arg(format!("{HERE}/tests/{program}.c"));
    let libraries = libraries();
    command.arg("-x").arg("none").arg("-L").arg(&libraries).arg("-lshmesh_nvipc");
    command.arg(format!("-Wl,-rpath,{}", libraries.display()));
    succeed(&mut command);
    out
}

#[track_caller]
fn run(program: &Path, args: &[&str], layout: &str) {
    run_with(program, args, layout, &[]);
}

/// Runs a program over a layout; over that of the configuration, if it is empty.
#[track_caller]
fn run_with(program: &Path, args: &[&str], layout: &str, variables: &[(&str, &Path)]) {
    run_program(program, |command| {
        command.args(args).env("SHMESH_NVIPC_LAYOUT", layout).env_remove("SHMESH_NVIPC_TIMEOUT_S");
        command.envs(variables.iter().copied());
    });
}

#[track_caller]
fn check(program: &str, wants_folder: bool) {
    check_over(program, wants_folder, "");
}

#[track_caller]
fn check_over(program: &str, wants_folder: bool, layout: &str) {
    let folder = tempfile::tempdir().unwrap();
    let args = folder.path().to_str().unwrap();
    let args = if wants_folder { &[args][..] } else { &[] };
    run(&compiled("cc", program, &["-std=c11", "-g", "-O1"], folder.path()), args, layout);
    let sanitized = folder.path().join("sanitized");
    std::fs::create_dir(&sanitized).unwrap();
    let flags = ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    run(&compiled("cc", program, &flags, &sanitized), args, layout);
}

#[test]
fn the_layout_is_that_of_the_programs_that_are_relinked() {
    check("layout", false);
}

#[test]
fn cxx_takes_the_headers() {
    let folder = tempfile::tempdir().unwrap();
    for standard in ["-std=c++11", "-std=c++20"] {
        run(&compiled("c++", "layout", &[standard, "-pedantic-errors", "-x", "c++"], folder.path()), &[], "");
    }
}

#[test]
fn the_static_library_is_linked_alone() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("layout");
    let mut command = Command::new("cc");
    command.arg("-I").arg(format!("{HERE}/include")).arg("-o").arg(&out);
    command.arg(format!("{HERE}/tests/layout.c")).arg(libraries().join("libshmesh_nvipc.a"));
    succeed(command.args(["-pthread", "-ldl", "-lm"]));
    run(&out, &[], "");
}

#[test]
fn messages_flow_between_processes() {
    check("flow", false);
}

#[test]
fn what_must_be_refused_is() {
    check("refusals", true);
}

#[test]
fn threads_share_an_endpoint() {
    check("threads", false);
}

#[test]
fn instances_and_the_functions_beside_them() {
    check("instances", false);
}

#[test]
fn a_tap_sees_what_passes() {
    check("forward", false);
}

#[test]
fn data_parts_are_in_device_memory() {
    let folder = tempfile::tempdir().unwrap();
    let double = shmesh_fake_cuda::library();
    let flags = ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    for flags in [&flags[..3], &flags] {
        let program = compiled("cc", "devices", flags, folder.path());
        for gpu in ["-1", "0"] {
            run_with(&program, &[gpu], "", &[("SHMESH_CUDA_LIBRARY", &double)]);
        }
    }
}

#[test]
fn either_side_is_killed_and_comes_back() {
    check("restart", false);
}

#[test]
fn the_same_over_the_layout_of_nvipc() {
    for program in ["flow", "threads", "theirs", "forward"] {
        check_over(program, false, "nvipc");
    }
}

#[test]
fn messages_flow_over_udp() {
    check("udp", false);
}
