//! Compiles the C programs in `tests` and runs them, as long tests also as C++ and under the address and
//! undefined-behaviour sanitizers; runs the examples; and installs all of it, to be found by pkg-config.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use shmesh_testing::{run_program, succeed};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Where cargo has built the libraries for this test.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Compiles a program, and puts it beside the libraries that it is linked with.
#[track_caller]
fn compiled(compiler: &str, program: &str, flags: &[&str], folder: &Path) -> PathBuf {
    for (name, file) in [("libshmesh.so", "libshmesh_c.so"), ("libshmesh_nvipc.so", "libshmesh_nvipc.so")] {
        match std::os::unix::fs::symlink(built().join(file), folder.join(name)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            result => result.unwrap(),
        }
    }
    let out = folder.join(program.replace('/', "_"));
    let mut command = Command::new(compiler);
    command.args(flags).args(["-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"]);
    command.arg(format!("{HERE}/include")).arg("-o").arg(&out);
    // An absolute path remains as it is.
    command.arg(Path::new(HERE).join(format!("{program}.c")));
    command.args(["-x", "none", "-L"]).arg(folder).args(["-lshmesh", "-Wl,-rpath,$ORIGIN"]);
    succeed(&mut command);
    out
}

/// The programs that need no other library.
const PROGRAMS: [&str; 6] = ["request", "broadcast", "flow", "events", "refusals", "misuse"];

#[track_caller]
fn check(program: &str) {
    check_as(program, "cc", &["-std=c11"]);
}

#[track_caller]
fn check_as(program: &str, compiler: &str, flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(compiler, &format!("tests/{program}"), flags, folder.path());
    run_program(&program, |_| {});
}

#[test]
#[ignore = "long: compiles all programs once more"]
fn programs_run_as_cxx() {
    for program in PROGRAMS {
        check_as(program, "c++", &["-std=c++11", "-x", "c++"]);
    }
}

#[test]
#[ignore = "long: compiles all programs once more, and they run more slowly"]
fn programs_run_under_sanitizers() {
    let flags = ["-std=c11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    for program in PROGRAMS {
        check_as(program, "cc", &flags);
    }
}

#[test]
fn requests_find_their_replies() {
    check("request");
}

#[test]
fn broadcast_reaches_readers_in_other_processes() {
    check("broadcast");
}

#[test]
fn messages_flow_between_processes() {
    check("flow");
}

#[test]
fn peers_are_reported_attaching_detaching_and_dying() {
    check("events");
}

#[test]
fn invalid_calls_are_refused() {
    check("refusals");
}

#[test]
fn misused_handles_are_refused() {
    check("misuse");
}

#[test]
fn device_memory_has_no_address() {
    let folder = tempfile::tempdir().unwrap();
    let headers = format!("-I{HERE}/nvipc/include");
    let library = format!("-L{}", folder.path().display());
    let flags = ["-std=c11", &headers, &library, "-Wl,--no-as-needed", "-lshmesh_nvipc"];
    run_program(&compiled("cc", "tests/devices", &flags, folder.path()), |_| {});
}

/// Without the address sanitizer: its own locks are not released in forked children.
#[test]
fn examples_run() {
    let folder = tempfile::tempdir().unwrap();
    for example in
        ["broadcast", "epoll", "latest_value", "many_links", "reconnect", "request_reply", "stream"]
    {
        let program = compiled("cc", &format!("examples/{example}"), &["-std=gnu11"], folder.path());
        run_program(&program, |_| {});
    }
    assert_eq!(std::fs::read_dir(format!("{HERE}/examples")).unwrap().count(), 7, "each example is run");
}

/// Compiles the first program of docs/c.md, which prints what the page says.
#[test]
fn first_program_of_the_document_runs() {
    let page = std::fs::read_to_string(format!("{HERE}/../../docs/c.md")).unwrap();
    let block = |language: &str| {
        let (_, rest) = page.split_once(&format!("```{language}\n")).expect("a block");
        rest.split_once("```").expect("its end").0
    };
    let (_, printed) = block("console").split_once("$ ./hello\n").expect("the program is run");
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("hello");
    std::fs::write(source.with_extension("c"), block("c")).unwrap();
    let program = compiled("cc", source.to_str().unwrap(), &["-std=c11"], folder.path());
    let dir = shmesh_testing::ipc_dir();
    let output =
        Command::new(program).env("SHMESH_DIR", dir.path()).env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), printed);
}

#[test]
#[ignore = "long: installs and links once more"]
fn cmake_finds_the_installed_library() {
    if let Err(error) = Command::new("cmake").arg("--version").output() {
        shmesh_testing::skip("CMAKE", &format!("find_package was not checked: cmake cannot be run: {error}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [prefix, project, build] = ["prefix", "project", "build"].map(|name| folder.path().join(name));
    succeed(Command::new(format!("{HERE}/install")).arg(&prefix).arg(built()));
    std::fs::create_dir(&project).unwrap();
    let text = format!(
        "cmake_minimum_required(VERSION 3.18)\nproject(consumer C)\nfind_package(shmesh REQUIRED)\n\
         add_executable(plain {HERE}/examples/stream.c)\ntarget_link_libraries(plain shmesh)\n\
         add_executable(scoped {HERE}/examples/stream.c)\ntarget_link_libraries(scoped shmesh::shmesh)\n"
    );
    std::fs::write(project.join("CMakeLists.txt"), text).unwrap();
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&project).arg("-B").arg(&build);
    succeed(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())));
    succeed(Command::new("cmake").arg("--build").arg(&build));
    for program in ["plain", "scoped"] {
        run_program(&build.join(program), |_| {});
    }
}

#[test]
#[ignore = "long: installs and links twice"]
fn pkg_config_finds_the_installed_libraries() {
    let prefix = tempfile::tempdir().unwrap();
    succeed(Command::new(format!("{HERE}/install")).arg(prefix.path()).arg(built()));
    let ask = |what: &[&str], library: &str| {
        let mut command = Command::new("pkg-config");
        command.args(what).arg(library).env("PKG_CONFIG_PATH", prefix.path().join("lib/pkgconfig"));
        command.env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1");
        match command.output() {
            Ok(output) => {
                assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
                Some(String::from_utf8(output.stdout).unwrap())
            }
            // What it says is in the file all the same.
            Err(_) => None,
        }
    };
    for (library, program) in
        [("shmesh", format!("{HERE}/tests/flow.c")), ("shmesh_nvipc", format!("{HERE}/nvipc/tests/layout.c"))]
    {
        let pc = std::fs::read_to_string(prefix.path().join(format!("lib/pkgconfig/{library}.pc"))).unwrap();
        assert!(!pc.contains('@') && pc.contains(env!("CARGO_PKG_VERSION")), "{pc}");
        let Some(flags) = ask(&["--cflags", "--libs"], library) else {
            shmesh_testing::skip(
                "PKG_CONFIG",
                "the files of pkg-config were not checked: there is no pkg-config",
            );
            continue;
        };
        let out = prefix.path().join("program");
        let mut command = Command::new("cc");
        command.arg("-o").arg(&out).arg(program).args(flags.split_whitespace()).arg("-pthread");
        succeed(&mut command);
        run_program(&out, |command| {
            command.env("LD_LIBRARY_PATH", prefix.path().join("lib"));
        });
    }
}
