//! Programs of one user in one set of namespaces.

use std::path::Path;
use std::process::Command;

use shmesh_testing::{LEGAL_QUANTITIES, files, ipc_dir, is_root, own_process_by, passed, succeed};

use crate::program::{compile, left_after_collection, library, output, path, said, with_library};

fn run(program: &str) {
    let dir = ipc_dir();
    assert_eq!(said(&mut with_library(path(program), dir.path())), "");
    assert!(files(dir.path()).is_empty(), "{:?}", files(dir.path()));
}

#[test]
fn posix_memory_has_group_bits_reserved_sizes_and_the_c_librarys_errors() {
    run("memory");
}

#[test]
fn system_v_segments_are_files_of_the_directory() {
    run("sysv");
}

#[test]
fn refused_calls_are_errors_that_leave_nothing_behind() {
    let dir = ipc_dir();
    assert_eq!(said(with_library(path("refused"), dir.path()).arg("calls")), "");
    assert!(files(dir.path()).is_empty(), "{:?}", files(dir.path()));
}

#[test]
#[ignore = "long: three calls that end after two seconds"]
fn files_that_a_process_keeps_locked_are_an_error_and_no_hang() {
    let dir = ipc_dir();
    assert_eq!(said(with_library(path("refused"), dir.path()).arg("locked")), "");
    assert!(files(dir.path()).is_empty(), "{:?}", files(dir.path()));
}

#[test]
fn errors_of_names_are_those_of_the_c_library() {
    let dir = ipc_dir();
    let name = format!("shmesh-{}", std::process::id());
    let with = said(with_library(path("names"), dir.path()).arg(&name));
    // The C library's directory is fixed; it is left as it was.
    let without = said(Command::new(path("names")).arg(&name));
    assert_eq!(with, without);
    assert!(files(dir.path()).is_empty());
}

/// The library may not be noticed except by what it is for: these are the functions that it takes the place of. None of them is called
/// to read, write or wait for memory that is mapped.
#[test]
fn no_other_function_is_replaced() {
    let listed = said(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let mut names: Vec<_> = listed.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    names.sort_unstable();
    let expected = [
        "__open64_2",
        "__open_2",
        "__openat64_2",
        "__openat_2",
        "chmod",
        "creat",
        "creat64",
        "fallocate",
        "fallocate64",
        "fchmod",
        "fchmodat",
        "fcntl",
        "fcntl64",
        "fopen",
        "fopen64",
        "ftruncate",
        "ftruncate64",
        "lockf",
        "lockf64",
        "mkostemp",
        "mkostemp64",
        "mkostemps",
        "mkostemps64",
        "mkstemp",
        "mkstemp64",
        "mkstemps",
        "mkstemps64",
        "open",
        "open64",
        "openat",
        "openat64",
        "posix_fallocate",
        "posix_fallocate64",
        "sem_close",
        "sem_open",
        "sem_unlink",
        "shm_open",
        "shm_unlink",
        "shmat",
        "shmctl",
        "shmdt",
        "shmget",
    ];
    assert_eq!(names, expected);
}

#[test]
fn limit_is_an_error_and_not_a_bus_error() {
    let dir = ipc_dir();
    let room = |limit: &str, bytes: u64| {
        let mut command = with_library(path("room"), dir.path());
        command.env("SHMESH_POSIX_LIMIT", limit).arg(bytes.to_string());
        said(&mut command)
    };
    assert_eq!(room("512Ki", 1 << 20), "refused\n");
    // Sparse, and far beyond what the machine has.
    assert_eq!(room("512k", 1 << 40), "refused\n");
    assert_eq!(room("1.5Mi", 1 << 20), "filled\n");
    // The files of others count.
    std::fs::write(dir.path().join("other"), vec![1; 1 << 20]).unwrap();
    assert_eq!(room("2000Ki", 1 << 20), "refused\n");
    std::fs::remove_file(dir.path().join("other")).unwrap();
    let size = 128 * shmesh_sys::time::page_bytes().unwrap() as u64;
    let mut edge = with_library(path("room"), dir.path());
    edge.env("SHMESH_POSIX_LIMIT", (size + 100).to_string()).args([&size.to_string(), "edge"]);
    assert_eq!(said(&mut edge), "untouched\n");
    let mut allocate = with_library(path("room"), dir.path());
    allocate.env("SHMESH_POSIX_LIMIT", size.to_string()).args([&size.to_string(), "allocate"]);
    assert_eq!(said(&mut allocate), "allocated\n");
    assert!(files(dir.path()).is_empty(), "{:?}", files(dir.path()));
}

#[test]
fn limit_is_an_error_of_the_command_fallocate() {
    let dir = ipc_dir();
    let allocate = |limit: &str| {
        let mut command = with_library("fallocate", dir.path());
        command.env("SHMESH_POSIX_LIMIT", limit).args(["--length", "1MiB"]).arg(dir.path().join("file"));
        output(&mut command)
    };
    let refused = allocate("1023Ki");
    let complaint = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && complaint.contains("No space left on device"), "{complaint}");
    let allocated = allocate("1Mi");
    assert!(allocated.status.success(), "{}", String::from_utf8_lossy(&allocated.stderr));
    assert_eq!(dir.path().join("file").metadata().unwrap().len(), 1 << 20);
}

#[test]
fn full_file_system_is_an_error_and_not_a_bus_error() {
    let dir = ipc_dir();
    let command = || {
        let mut command = Command::new("unshare");
        command.arg("--mount").arg(std::env::current_exe().unwrap()).env("SHMESH_POSIX_IS_BUILT", "1");
        command
    };
    if !is_root() {
        return;
    }
    // The library is built outside.
    let (library, room) = (library(), path("room"));
    let ran = own_process_by(command, || {
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(dir.path()).status();
        assert!(mount.unwrap().success());
        let mut with = Command::new(&room);
        with.env("LD_PRELOAD", &library).env("SHMESH_DIR", dir.path()).arg((2 << 20).to_string());
        assert_eq!(said(&mut with), "refused\n");
        // What it is without the library: the file system is at the C library's place.
        assert!(
            Command::new("mount").arg("--bind").arg(dir.path()).arg("/dev/shm").status().unwrap().success()
        );
        let without = output(Command::new(&room).arg((2 << 20).to_string()));
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&without.status), Some(libc::SIGBUS));
        // So that the directory can be removed.
        assert!(Command::new("umount").arg("/dev/shm").arg(dir.path()).status().unwrap().success());
    });
    if let Some(output) = ran {
        assert!(passed(&output), "{}", output.status);
    }
}

#[test]
fn names_are_private_where_asked() {
    let dir = ipc_dir();
    let create = |name: &str, configure: &dyn Fn(&mut Command)| {
        let mut command = with_library(path("peer"), dir.path());
        command.args(["create", name]);
        configure(&mut command);
        output(&mut command)
    };
    let private = |command: &mut Command| {
        command.env("SHMESH_POSIX_PRIVATE", "cuda.*,nccl-*-x").env("SHMESH_POSIX_PREFIX", "pod-a.");
    };
    for name in ["/cuda.1", "/nccl-7-x", "/nccl-7-y"] {
        assert!(create(name, &private).status.success());
    }
    let expected = [
        "nccl-7-y",
        "pod-a.cuda.1",
        "pod-a.nccl-7-x",
        "sem.nccl-7-y",
        "sem.pod-a.cuda.1",
        "sem.pod-a.nccl-7-x",
    ];
    assert_eq!(files(dir.path()), expected);
    // One line for each mistake, and the program runs.
    let wrong = create("/plain", &|command| {
        command
            .env("SHMESH_POSIX_PRIVATE", "*")
            .env("SHMESH_POSIX_LIMIT", "much")
            .env("SHMESH_POSIX_PREFIX", "a/b");
    });
    assert!(wrong.status.success() && dir.path().join("plain").exists());
    let lines = String::from_utf8(wrong.stderr).unwrap();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.contains("SHMESH_POSIX_LIMIT=much is not a number of bytes; write 64Mi"), "{lines}");
}

#[test]
fn limit_is_any_kubernetes_quantity() {
    let dir = ipc_dir();
    for (index, (text, bytes)) in LEGAL_QUANTITIES.into_iter().enumerate() {
        let mut command = with_library(path("peer"), dir.path());
        let ran = output(command.args(["create", &format!("/{index}")]).env("SHMESH_POSIX_LIMIT", text));
        let complaints = String::from_utf8(ran.stderr).unwrap();
        assert!(!complaints.contains("SHMESH_POSIX_LIMIT"), "{text}: {complaints}");
        // The programs create two files of a page.
        assert_eq!(ran.status.success(), bytes > (2 * index as u64 + 2) * 4096, "{text}: {complaints}");
    }
}

#[test]
fn kept_names_outlive_their_processes() {
    let dir = ipc_dir();
    for name in ["/kept-1", "/other"] {
        let mut command = with_library(path("peer"), dir.path());
        assert_eq!(said(command.args(["create", name]).env("SHMESH_POSIX_KEEP", "kept-*")), "");
    }
    assert_eq!(left_after_collection(dir.path()), ["kept-1", "sem.kept-1"]);
    // A long list is whole.
    let patterns = format!("{},kept-2", "other-*,".repeat(1000));
    let mut command = with_library(path("peer"), dir.path());
    assert_eq!(said(command.args(["create", "/kept-2"]).env("SHMESH_POSIX_KEEP", patterns)), "");
    assert_eq!(left_after_collection(dir.path()), ["kept-1", "kept-2", "sem.kept-1", "sem.kept-2"]);
}

#[test]
fn invalid_directory_is_reported_in_one_line() {
    let dir = ipc_dir();
    let wrong = ["relative".to_owned(), format!("/{}", "d/".repeat(3000)), "/no/such/directory".to_owned()];
    for directory in wrong {
        let ran = output(with_library("true", dir.path()).env("SHMESH_DIR", &directory));
        let error = String::from_utf8(ran.stderr).unwrap();
        assert!(ran.status.success() && error.lines().count() == 1, "{error}");
        assert!(error.contains("is not the absolute path of a directory"), "{error}");
    }
}

/// An image may lack any library but the C library.
#[test]
fn library_depends_on_libc_only() {
    let needed = said(Command::new("readelf").args(["--wide", "--dynamic"]).arg(library()));
    let needed: Vec<_> = needed.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(!needed.is_empty());
    // The loader is a part of it.
    let is_of_it = |line: &&str| line.contains("[libc.so.6]") || line.contains("[ld-linux");
    assert!(needed.iter().all(is_of_it), "{needed:?}");
    // Of glibc 2.35.
    let symbols = said(Command::new("nm").arg("--dynamic").arg(library()));
    assert!(!symbols.contains("_dl_find_object"), "{symbols}");
}

/// Debian's own, which may use `chmod` or `fchmodat`.
#[test]
fn chmod_keeps_mark_and_group_bits() {
    let dir = ipc_dir();
    let file = dir.path().join("file");
    drop(shmesh_sys::lease::create(&file, 0o660, 1).unwrap());
    assert_eq!(said(with_library("chmod", dir.path()).arg("600").arg(&file)), "");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o7777, 0o1660);
}

#[test]
fn static_program_is_not_affected() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("static");
    compile("peer", &program, &["-static"]);
    makes_memory_as_without_the_library("static", |dir| with_library(&program, dir));
}

/// The loader takes no library from the environment for it.
#[test]
fn setuid_program_is_not_affected() {
    if !is_root() {
        return;
    }
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    // Where every user may run it. On a file system without setuid this would be any program.
    let folder = tempfile::tempdir().unwrap();
    mode(folder.path(), 0o755);
    let program = folder.path().join("setuid");
    compile("peer", &program, &[]);
    let place = nix::sys::statvfs::statvfs(folder.path()).unwrap();
    assert!(!place.flags().contains(nix::sys::statvfs::FsFlags::ST_NOSUID));
    mode(&program, 0o4755);
    makes_memory_as_without_the_library("setuid", |dir| {
        let mut command = with_library("setpriv", dir);
        command.args(["--reuid=1001", "--regid=1001", "--clear-groups"]).arg(&program);
        command
    });
}

/// Runs a program that makes memory and a semaphore.
fn makes_memory_as_without_the_library(what: &str, command: impl Fn(&Path) -> Command) {
    let name = format!("/shmesh-{what}-{}", std::process::id());
    let dir = ipc_dir();
    assert_eq!(said(command(dir.path()).args(["create", &name])), "");
    assert!(files(dir.path()).is_empty());
    let made = Path::new("/dev/shm").join(name.trim_start_matches('/'));
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&made).unwrap().permissions());
    assert_eq!(mode & 0o7777, 0o600);
    for file in [made.clone(), Path::new("/dev/shm").join(format!("sem.{}", name.trim_start_matches('/')))] {
        std::fs::remove_file(file).unwrap();
    }
}

/// A program of musl finds no library where the path has `$LIB`, which only glibc replaces, and runs as without it.
#[test]
fn program_of_another_c_library_is_not_affected() {
    if Command::new("musl-gcc").arg("--version").output().is_err() {
        println!("skipped: no musl-gcc");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = "#include <stdio.h>\n#include <fcntl.h>\n#include <unistd.h>\n#include <sys/mman.h>\n#include <sys/stat.h>\n\
                  int main(int n, char **names) { struct stat s; int fd = shm_open(names[1], O_CREAT | O_RDWR, 0600);\n\
                  fstat(fd, &s); printf(\"%o\", s.st_mode & 07777); return shm_unlink(names[1]); }";
    std::fs::write(folder.path().join("musl.c"), source).unwrap();
    let program = folder.path().join("musl");
    let mut compiler = Command::new("musl-gcc");
    succeed(compiler.args(["-Werror", "-o"]).arg(&program).arg(folder.path().join("musl.c")));
    let run = |preload: &Path| {
        let name = format!("/shmesh-musl-{}", std::process::id());
        output(Command::new(&program).arg(name).env("LD_PRELOAD", preload).env_remove("LD_LIBRARY_PATH"))
    };
    let ran = run(&library().parent().unwrap().join("$LIB/libshmesh_posix.so"));
    assert!(ran.status.success() && ran.stderr.is_empty() && ran.stdout == b"600", "{ran:?}");
    // The reason for `$LIB`.
    let ended = run(&library());
    assert!(!ended.status.success() && ended.stdout.is_empty(), "{ended:?}");
}

/// Debian's own programs, one process each: the second finds what the first made, and a third removes it.
#[test]
fn ipcmk_ipcs_and_ipcrm_work_on_the_directory() {
    let dir = ipc_dir();
    let run = |program: &str, arguments: &[&str]| {
        said(with_library(program, dir.path()).args(arguments).env("LC_ALL", "C"))
    };
    let made = run("ipcmk", &["--shmem", "123456"]);
    let id = made.trim().rsplit(' ').next().unwrap();
    let listed = run("ipcs", &["--shmems"]);
    let line = listed
        .lines()
        .find(|line| line.split_whitespace().nth(1) == Some(id))
        .unwrap_or_else(|| panic!("{id} is not in {listed}"));
    assert!(line.contains("123456") && line.contains(" 644 "), "{line}");
    let details = run("ipcs", &["--shmems", "--id", id]);
    assert!(details.contains("bytes=123456"), "{details}");
    run("ipcrm", &["--shmem-id", id]);
    assert!(files(dir.path()).is_empty());
}
