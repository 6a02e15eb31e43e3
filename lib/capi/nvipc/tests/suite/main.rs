//! Compiles the C programs in `tests`, links them with the library that cargo has just built, and runs them: as C, as C++,
//! with the static library, and as long tests with the address and undefined-behaviour sanitizers.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};
use std::process::Command;

use shmesh_testing::{run_program, succeed};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The directory of the libraries, which is that of this test.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Compiles a program with these flags and links it with the shared library.
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

/// Runs a program with a layout, or with that of the configuration if it is empty.
#[track_caller]
fn run_with(program: &Path, args: &[&str], layout: &str, variables: &[(&str, &Path)]) {
    run_program(program, |command| {
        command.args(args).env("SHMESH_NVIPC_LAYOUT", layout).env_remove("SHMESH_NVIPC_TIMEOUT_S");
        command.envs(variables.iter().copied());
    });
}

/// The programs that run with both layouts.
const OF_BOTH_LAYOUTS: [&str; 4] = ["flow", "threads", "forward", "failed"];
const SANITIZED: [&str; 5] =
    ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// Compiles a program without sanitizers and runs it, with each layout if it is for both.
#[track_caller]
fn check(program: &str) {
    check_as(program, &SANITIZED[..3]);
}

#[track_caller]
fn check_as(program: &str, flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let compiled = compiled("cc", program, flags, folder.path());
    // Only one of them reads its argument.
    let args = [folder.path().to_str().unwrap()];
    // With an empty name, the configuration says which layout.
    let layouts: &[&str] = match program {
        "theirs" => &["nvipc"],
        _ if OF_BOTH_LAYOUTS.contains(&program) => &["", "nvipc"],
        _ => &[""],
    };
    for layout in layouts {
        run(&compiled, if program == "refusals" { &args } else { &[] }, layout);
    }
}

#[test]
#[ignore = "long: compiles all programs once more, and they run more slowly"]
fn programs_run_under_sanitizers() {
    let others = ["layout", "refusals", "instances", "restart", "udp", "theirs"];
    for program in others.into_iter().chain(OF_BOTH_LAYOUTS) {
        check_as(program, &SANITIZED);
    }
}

#[test]
fn layout_matches_relinked_programs() {
    check("layout");
}

#[test]
fn headers_compile_as_cxx() {
    let folder = tempfile::tempdir().unwrap();
    for standard in ["-std=c++11", "-std=c++20"] {
        run(&compiled("c++", "layout", &[standard, "-pedantic-errors", "-x", "c++"], folder.path()), &[], "");
    }
}

#[test]
#[ignore = "long: links 85 MB"]
fn static_library_links_alone() {
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
    check("flow");
}

#[test]
fn invalid_calls_are_refused() {
    check("refusals");
}

#[test]
fn threads_share_an_endpoint() {
    check("threads");
}

#[test]
fn instances_and_helper_functions() {
    check("instances");
}

#[test]
fn tap_copies_messages() {
    check("forward");
}

#[test]
fn data_parts_in_device_memory() {
    let folder = tempfile::tempdir().unwrap();
    let library = shmesh_fake_cuda::named_or_fake();
    // A real driver does not run beside a sanitizer.
    let flags = if library == shmesh_fake_cuda::library() { &SANITIZED } else { &SANITIZED[..3] };
    let program = compiled("cc", "devices", flags, folder.path());
    for gpu in ["-1", "0"] {
        run_with(&program, &[gpu], "", &[("SHMESH_CUDA_LIBRARY", &library)]);
    }
}

#[test]
fn failed_create_leaves_the_directory_as_it_was() {
    check("failed");
}

#[test]
fn link_is_removed_if_the_gpu_has_no_memory() {
    let library = shmesh_fake_cuda::library();
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("cc", "failed", &SANITIZED, folder.path());
    // The fake has its memory there.
    let nowhere = folder.path().join("nowhere");
    run_with(&program, &["gpu"], "", &[("SHMESH_CUDA_LIBRARY", &library), ("FAKE_CUDA_DIR", &nowhere)]);
}

#[test]
fn either_side_is_killed_and_restarts() {
    check("restart");
}

#[test]
fn nvipc_layout_has_behaviour_of_its_own() {
    check("theirs");
}

/// Installs the libraries below a folder, as a user does.
#[track_caller]
fn installed(folder: &Path) -> PathBuf {
    let prefix = folder.join("usr");
    let mut install = Command::new(format!("{HERE}/../install"));
    // The other library belongs to another package, which is not built for these tests.
    let built = folder.join("built");
    std::fs::create_dir(&built).unwrap();
    for name in ["libshmesh_nvipc.so", "libshmesh_nvipc.a"] {
        std::os::unix::fs::symlink(libraries().join(name), built.join(name)).unwrap();
        std::os::unix::fs::symlink(libraries().join(name), built.join(name.replace("_nvipc", "_c"))).unwrap();
    }
    succeed(install.arg(&prefix).arg(&built).env("CFLAGS", "-O1 -Werror"));
    prefix
}

/// Compiles programs that only name NVIPC's headers and libraries.
#[test]
fn nvipc_consumer_compiles_and_links_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let prefix = installed(folder.path());
    for library in ["libnvipc.so", "libnvlog.so"] {
        let names = std::fs::read(prefix.join("lib").join(library)).unwrap();
        let has = |name: &str| names.windows(name.len()).any(|at| at == name.as_bytes());
        assert!(has(&format!("\0{library}\0")), "{library}: the name that the linker wrote");
        assert!(has("\0NVIPC_2530\0"), "{library}: the version that the linker wrote");
    }

    let flags = |package: &str| {
        let mut command = Command::new("pkg-config");
        command.args(["--cflags", "--libs", package]).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let consumer = |compiler: &str, source: &str, more: &[&str], package: &str, libraries: &[&str]| {
        let program = path(&format!("{}_{package}", source.replace('.', "_")));
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-pthread"]).args(more);
        command.arg(format!("{HERE}/tests/{source}")).arg("-o").arg(&program);
        command.args(flags(package).split_whitespace()).args(libraries);
        succeed(command.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display())));
        program
    };
    let logs = folder.path().to_str().unwrap().to_owned();
    let dir = path("shm");
    std::fs::create_dir(&dir).unwrap();
    run_with(
        &consumer("cc", "consumer.c", &["-std=c11"], "nvipc", &[]),
        &[&logs],
        "",
        &[("SHMESH_DIR", &dir)],
    );
    let lines = path("stderr");
    run(&consumer("cc", "logger.c", &["-std=c11"], "nvipc", &[]), &[lines.to_str().unwrap()], "");
    let tree = format!("-I{HERE}/tests/tree");
    let file = format!("{HERE}/tests/tree/tree.yaml");
    run(&consumer("c++", "consumer.cpp", &["-std=c++17", &tree], "nvipc", &[]), &[&file], "");
    // Also with shmesh's package name, and with our yaml.hpp if libyaml is installed.
    if Path::new("/usr/include/yaml.h").exists() {
        run(&consumer("c++", "consumer.cpp", &["-std=c++20"], "shmesh_nvipc", &["-lyaml"]), &[&file], "");
    } else {
        eprintln!("yaml.hpp is not compiled: libyaml is not here");
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "a consumer leaves nothing");
}

/// Both package names, in one project: `nvlog` is defined by either.
#[test]
#[ignore = "long: installs and links once more"]
fn cmake_finds_the_installed_packages() {
    if let Err(error) = Command::new("cmake").arg("--version").output() {
        shmesh_testing::skip("CMAKE", &format!("find_package was not checked: cmake cannot be run: {error}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let prefix = installed(folder.path());
    let (project, build) = (folder.path().join("project"), folder.path().join("build"));
    std::fs::create_dir(&project).unwrap();
    let text = format!(
        "cmake_minimum_required(VERSION 3.18)\nproject(consumer C)\nset(CMAKE_C_STANDARD 11)\n\
         find_package(nvipc REQUIRED)\nfind_package(shmesh_nvipc REQUIRED)\n\
         add_executable(by_nvipc {HERE}/tests/consumer.c)\ntarget_link_libraries(by_nvipc nvipc)\n\
         add_executable(by_shmesh {HERE}/tests/layout.c)\n\
         target_link_libraries(by_shmesh shmesh_nvipc::shmesh_nvipc nvlog::nvlog)\n"
    );
    std::fs::write(project.join("CMakeLists.txt"), text).unwrap();
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&project).arg("-B").arg(&build);
    succeed(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())));
    succeed(Command::new("cmake").arg("--build").arg(&build));
    let dir = folder.path().join("shm");
    std::fs::create_dir(&dir).unwrap();
    let logs = folder.path().to_str().unwrap();
    run_with(&build.join("by_nvipc"), &[logs], "", &[("SHMESH_DIR", &dir)]);
    run(&build.join("by_shmesh"), &[], "");
}

/// Runs eight threads on each side for this long, with busy loops beside them, in both layouts.
#[track_caller]
fn stress(milliseconds: &str) {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("cc", "stress", &["-std=c11", "-O2"], folder.path());
    for layout in ["", "nvipc"] {
        run(&program, &[milliseconds], layout);
    }
}

#[test]
fn more_threads_than_cores_make_progress() {
    stress("100");
}

#[test]
#[ignore = "long: sixteen threads and eight busy loops on few cores"]
fn no_thread_starves_with_more_threads_than_cores() {
    stress("10000");
}

#[test]
fn messages_flow_over_udp() {
    check("udp");
}
