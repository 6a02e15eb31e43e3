//! Two users in two sets of namespaces, as the containers of two pods are, with one directory at `/dev/shm`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use shmesh_testing::{files, ipc_dir, is_root, until};

use crate::program::{RunningProgram, folder, left_after_collection};

const GROUP: u32 = 60_001;
const PEER: &str = "/mnt/peer";

/// The directory of a pool, as the device plugin makes it: of one group, which files inherit.
fn pool() -> tempfile::TempDir {
    let dir = ipc_dir();
    std::os::unix::fs::chown(dir.path(), Some(0), Some(GROUP)).unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o3770)).unwrap();
    dir
}

/// A program as a user in namespaces of its own. The shell sees the directory at `/dev/shm`.
fn pod(dir: &Path, user: u32, with_library: bool, program: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--ipc", "--mount", "--uts", "--net", "--fork", "--kill-child", "sh", "-c"]);
    // The programs are where only this user may go.
    let script = r#"mount --bind "$DIR" /dev/shm && mount --bind "$FOLDER" /mnt && mount -t proc proc /proc &&
        exec setpriv --reuid="$USER_ID" --regid="$USER_ID" --groups="$GROUP" env ${PRELOAD:+LD_PRELOAD="$PRELOAD"} "$@""#;
    command.arg(script).arg("sh").args(program).env("DIR", dir).env("FOLDER", folder());
    command.env("GROUP", GROUP.to_string());
    command.env("USER_ID", user.to_string()).env_remove("SHMESH_DIR").env_remove("LD_LIBRARY_PATH");
    if with_library {
        command.env("PRELOAD", "/mnt/libshmesh_posix.so");
    }
    command
}

#[test]
fn memory_and_semaphores_are_shared_by_two_users() {
    if !is_root() {
        return;
    }
    let dir = pool();
    let mut producer = RunningProgram::start(&mut pod(dir.path(), 1001, true, &[PEER, "produce"]));
    producer.expect("ready");
    let mut consumer = RunningProgram::start(&mut pod(dir.path(), 1002, true, &[PEER, "consume"]));
    consumer.expect("done");
    producer.expect("received");
    consumer.end();
    // The one that is left has all of it mapped, and not open.
    assert_eq!(left_after_collection(dir.path()), ["batch", "sem.empty", "sem.full"]);
    producer.kill();
    until("the leases of the killed process end", || left_after_collection(dir.path()).is_empty());
}

/// Users of a pool share its memory, and cannot remove each other's names; those of another pool see none of them, and a process without
/// the pool's group cannot open any.
#[test]
fn names_of_other_users_and_pools_are_safe() {
    if !is_root() {
        return;
    }
    let (dir, other) = (pool(), pool());
    let mut producer = RunningProgram::start(&mut pod(dir.path(), 1001, true, &[PEER, "produce"]));
    producer.expect("ready");
    let run = |dir: &Path, arguments: &[&str], group: u32| {
        let mut command = pod(dir, 1002, true, arguments);
        assert_eq!(crate::program::said(command.env("GROUP", group.to_string())), "done\n");
    };
    run(dir.path(), &[PEER, "intrude"], GROUP);
    run(other.path(), &[PEER, "stray", &libc::ENOENT.to_string()], GROUP);
    run(dir.path(), &[PEER, "stray", &libc::EACCES.to_string()], GROUP + 1);
    assert_eq!(files(dir.path()), ["batch", "sem.empty", "sem.full"]);
    producer.kill();
}

/// The reason for the library: without it, the second user may not open the file of the first.
#[test]
fn without_the_library_two_users_do_not_meet() {
    if !is_root() {
        return;
    }
    let dir = pool();
    let mut producer = RunningProgram::start(&mut pod(dir.path(), 1001, false, &[PEER, "produce"]));
    producer.expect("ready");
    let output = crate::program::output(&mut pod(dir.path(), 1002, false, &[PEER, "consume"]));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("Permission denied"), "{error}");
    producer.kill();
}

#[test]
fn system_v_segments_are_shared_by_two_users() {
    if !is_root() {
        return;
    }
    let dir = pool();
    let mut producer = RunningProgram::start(&mut pod(dir.path(), 1001, true, &[PEER, "sysv-produce"]));
    let ready = producer.line();
    let id = ready.strip_prefix("ready ").unwrap_or_else(|| panic!("{ready}")).to_owned();
    producer.expect("");
    let mut consumer = RunningProgram::start(&mut pod(dir.path(), 1002, true, &[PEER, "sysv-consume", &id]));
    consumer.expect("done");
    producer.go_on();
    producer.expect("attached 2");
    producer.expect("removed");
    // It has no key any more, and stays until the last process detaches.
    let left = left_after_collection(dir.path());
    assert!(left.len() == 1 && left[0].starts_with("sysv.removed."), "{left:?}");
    producer.end();
    consumer.end();
    // The last one was not its owner, who alone may remove it in this directory.
    assert!(left_after_collection(dir.path()).is_empty());
}

/// Python's own class, whose tracker is a process that inherits the library.
#[test]
fn python_shared_memory_is_shared_by_two_users() {
    if !is_root() {
        return;
    }
    // The system's, which all users can read.
    let python = "/usr/bin/python3";
    if !Path::new(python).exists() {
        println!("skipped: no {python}");
        return;
    }
    let dir = pool();
    let create = "from multiprocessing.shared_memory import SharedMemory as S\n\
                  s = S(create=True, size=100000, name='psm_test'); s.buf[:5] = b'hello'; print('ready', flush=True)\n\
                  input(); print(bytes(s.buf[:5]).decode(), flush=True); input(); s.close(); s.unlink()";
    let attach = "from multiprocessing.shared_memory import SharedMemory as S\n\
                  s = S(name='psm_test'); assert bytes(s.buf[:5]) == b'hello'; s.buf[:5] = b'world'; s.close()\n\
                  from multiprocessing import resource_tracker as r; r.unregister('/psm_test', 'shared_memory')";
    let mut creator = RunningProgram::start(&mut pod(dir.path(), 1001, true, &[python, "-c", create]));
    creator.expect("ready");
    let attached = crate::program::output(&mut pod(dir.path(), 1002, true, &[python, "-c", attach]));
    assert!(attached.status.success(), "{}", String::from_utf8_lossy(&attached.stderr));
    assert_eq!(left_after_collection(dir.path()), ["psm_test"]);
    creator.go_on();
    creator.expect("world");
    creator.go_on();
    creator.end();
    assert!(files(dir.path()).is_empty());
}
