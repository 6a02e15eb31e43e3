//! Device keys between real processes, brokered by a real sidecar, with memfds in place of device memory.

use std::os::fd::AsFd;

use crate::support::Sidecar;
use crate::support::client::{ask, refusal};
use shmesh::device::{HostMemory, Session};
use shmesh_proto::broker::{Code, ExportKey, ImportByKey, Mechanism, reply, request};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, key_of, own_process, stranger, until};

/// Starts a sidecar, an exporter and an importer.
fn three(dir: &std::path::Path, flags: &[&str]) -> (Sidecar, Peer, Peer) {
    let sidecar = Sidecar::start_with(dir, "mpmc", flags);
    let (mut exporter, mut importer) = (Peer::start(dir), Peer::start(dir));
    exporter.tell("device connect");
    importer.tell("device connect");
    // A reply shows that they were accepted, and not only queued: tests count descriptors from here on.
    assert_ne!(exporter.ask("device tgid"), importer.ask("device tgid"));
    (sidecar, exporter, importer)
}

#[test]
fn only_admitted_processes_import_memory() {
    let _watchdog = Watchdog::start();
    let kernels: [&[&str]; 2] = [&[], &["--old-kernel"]];
    for kernel in kernels {
        only_admitted_import(kernel);
    }
}

fn only_admitted_import(flags: &[&str]) {
    let dir = ipc_dir();
    let (sidecar, mut exporter, mut importer) = three(dir.path(), flags);
    let mut other = Peer::start(dir.path());
    other.tell("device connect");
    let key = exporter.ask("device export weights 0");
    assert_eq!(key.len(), 64);
    // Not admitted yet, and no such key: the text is the same.
    let refused = importer.ask(&format!("device import {key}"));
    let unknown = importer.ask(&format!("device import {}", "0".repeat(64)));
    assert!(refused.starts_with("err Denied") && refused == unknown, "{refused} / {unknown}");

    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    assert!(
        other.ask(&format!("device import {key}")).starts_with("err Denied"),
        "another process is not admitted"
    );
    until("it is counted", || sidecar.metric("shmesh_sidecar_keys") == 1);

    // Importers close before the exporter.
    let busy = exporter.ask(&format!("device close {key}"));
    assert!(busy.starts_with("err Busy") && busy.contains(&tgid), "{busy}");
    importer.tell(&format!("device close {key}"));
    assert!(importer.ask(&format!("device close {key}")).starts_with("err"), "closed twice");
    until("the exporter is notified", || exporter.ask("device event") == "unused");
    exporter.tell(&format!("device close {key}"));
    until("the key is gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
    assert!(importer.ask(&format!("device import {key}")).starts_with("err Denied"));
}

/// A forked child shares its parent's connection, and would receive the replies for which the parent waits.
#[test]
fn session_of_the_parent_is_refused_in_a_forked_child() {
    own_process(|| {
        let _watchdog = Watchdog::start();
        let dir = ipc_dir();
        let _sidecar = Sidecar::start(dir.path(), "mpmc");
        let mut session = Session::<HostMemory>::connect(dir.path(), "link").unwrap();
        let tgid = session.bare_tgid().unwrap();
        // SAFETY: the child only uses its copy of the session, and exits.
        #[expect(unsafe_code, reason = "the test is about fork")]
        let child = unsafe { nix::unistd::fork() }.unwrap();
        let nix::unistd::ForkResult::Parent { child } = child else {
            let refused = session.bare_tgid().map_or_else(|error| error.to_string(), |_| String::new());
            // SAFETY: no destructor or exit handler of the parent may run in the child.
            #[expect(unsafe_code, reason = "as above")]
            unsafe {
                libc::_exit(i32::from(!refused.contains("after fork")))
            }
        };
        let ended = nix::sys::wait::waitpid(child, None).unwrap();
        assert_eq!(ended, nix::sys::wait::WaitStatus::Exited(child, 0), "an error that says what to do");
        assert_eq!(session.bare_tgid().unwrap(), tgid, "the parent's works");
    });
}

#[test]
fn death_of_an_importer_closes_its_import() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_sidecar, mut exporter, mut importer) = three(dir.path(), &[]);
    let key = exporter.ask("device export weights 0");
    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    importer.kill();
    until("its death is its close", || exporter.ask(&format!("device close {key}")) == "ok");
}

#[test]
fn importers_are_notified_of_a_dead_exporter() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (sidecar, mut exporter, mut importer) = three(dir.path(), &[]);
    let before = sidecar.fds();
    let key = exporter.ask("device export weights 0");
    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    exporter.kill();
    until("the importer is notified", || importer.ask("device event") == "lost");
    until("the key is gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
    until("and its descriptor", || sidecar.fds() < before);
    importer.tell(&format!("device close {key}"));
    assert!(importer.ask(&format!("device close {key}")).starts_with("err Denied"), "closed twice");
}

#[test]
fn forced_close_tells_the_importers() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_sidecar, mut exporter, mut importer) = three(dir.path(), &[]);
    let key = exporter.ask("device export weights 0");
    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    exporter.tell(&format!("device force {key}"));
    until("the importer is notified", || importer.ask("device event") == "closing");
    importer.tell(&format!("device close {key}"));
    until("the exporter may free it", || exporter.ask("device event") == "unused");
}

/// The importer has closed once before; what counts is that it imports now.
#[test]
fn forced_close_waits_for_current_importers() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_sidecar, mut exporter, mut importer) = three(dir.path(), &[]);
    let key = exporter.ask("device export weights 0");
    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    importer.tell(&format!("device close {key}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    // The exporter has not read its events. The first says that there are no importers.
    exporter.tell(&format!("device force {key}"));
    assert_eq!(exporter.ask("device event"), "none");
    importer.tell(&format!("device close {key}"));
    until("the exporter may free it", || exporter.ask("device event") == "unused");
}

#[test]
fn forced_close_without_importers_frees_the_key() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_sidecar, mut exporter, _importer) = three(dir.path(), &[]);
    let fds = format!("/proc/{}/fd", exporter.pid());
    let before = std::fs::read_dir(&fds).unwrap().count();
    let key = exporter.ask("device export weights 0");
    assert!(std::fs::read_dir(&fds).unwrap().count() > before);
    exporter.tell(&format!("device force {key}"));
    assert_eq!(std::fs::read_dir(&fds).unwrap().count(), before);
    assert!(exporter.ask(&format!("device close {key}")).starts_with("err Denied"));
}

/// Closing a session does not unmap memory.
#[test]
fn import_outlives_its_session() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_sidecar, mut exporter, mut importer) = three(dir.path(), &[]);
    let key = exporter.ask("device export weights 0");
    let tgid = importer.ask("device tgid");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    importer.tell("device drop");
    assert!(exporter.ask(&format!("device close {key}")).starts_with("err Busy"));
    importer.kill();
    until("its death is a close", || exporter.ask(&format!("device close {key}")) == "ok");
}

#[test]
fn open_keys_require_the_operators_permission() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_sidecar, mut exporter, _importer) = three(dir.path(), &[]);
    let refused = exporter.ask("device export weights 1");
    assert!(refused.starts_with("err Denied") && refused.contains("--allow-open-keys"), "{refused}");
    assert!(exporter.ask("device export weights 2").starts_with("err Refused"), "a flag that does not exist");
    let dir = ipc_dir();
    let (_sidecar, mut exporter, mut importer) = three(dir.path(), &["--allow-open-keys"]);
    let key = exporter.ask("device export weights 1");
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
}

/// Both are process 1 of their own pid namespaces. Only the number that the sidecar reports admits a process.
#[test]
fn numbers_of_other_pid_namespaces_admit_no_process() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let (mut exporter, mut importer) = (Peer::start_alone(dir.path()), Peer::start_alone(dir.path()));
    exporter.tell("device connect");
    importer.tell("device connect");
    let key = exporter.ask("device export weights 0");
    // 1 is the importer in its own namespace, and the init process of the machine in the sidecar's.
    let _ = exporter.ask(&format!("device admit {key} 1"));
    assert!(importer.ask(&format!("device import {key}")).starts_with("err Denied"));
    let tgid = importer.ask("device tgid");
    assert_ne!(tgid, "1");
    exporter.tell(&format!("device admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("device import {key}")), "weights");
}

#[test]
fn only_memory_can_be_exported() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let before = sidecar.fds();
    let connection = stranger(dir.path());
    let export = |size| {
        let mechanism = Mechanism::Host.into();
        request::Op::ExportKey(ExportKey { size, flags: 0, mechanism, handle: Vec::new() })
    };
    let refused = |result| refusal(result).code();
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let memory = HostMemory::new(4096).unwrap();
    let memfd = shmesh::device::DeviceMemory::fd(&memory).unwrap();
    assert_eq!(refused(ask(&connection, export(4096), &[file.as_fd()])), Code::Invalid, "a plain file");
    assert_eq!(refused(ask(&connection, export(4096), &[connection.as_fd()])), Code::Invalid, "a socket");
    assert_eq!(refused(ask(&connection, export(4097), &[memfd])), Code::Invalid, "more than there is");
    assert_eq!(refused(ask(&connection, export(0), &[memfd])), Code::Invalid, "nothing");
    assert_eq!(refused(ask(&connection, export(4096), &[])), Code::Invalid, "no descriptor");
    assert_eq!(refused(ask(&connection, export(4096), &[memfd, memfd])), Code::Invalid, "two");
    let short = request::Op::ImportByKey(ImportByKey { key: b"short".to_vec() });
    assert!(matches!(refused(ask(&connection, short, &[])), Code::Invalid | Code::Denied));
    let reply::Result::Exported(exported) = ask(&connection, export(4096), &[memfd]) else {
        panic!("it is fine")
    };
    assert_eq!(exported.key.len(), 65);
    let _ = key_of(std::str::from_utf8(&exported.key[..64]).unwrap());
    drop(connection);
    until("only the key of a living process is left", || sidecar.fds() <= before + 2);
    assert!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"bad_descriptors\"}") >= 3);
}

/// One death causes more events than a session's queue holds. An importer that reads them keeps its session.
#[test]
fn many_keys_end_at_once() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (sidecar, mut exporter, mut importer) = three(dir.path(), &[]);
    let tgid = importer.ask("device tgid");
    for _ in 0..200 {
        let key = exporter.ask("device export weights 0");
        exporter.tell(&format!("device admit {key} {tgid}"));
        assert_eq!(importer.ask(&format!("device import {key}")), "weights");
    }
    exporter.kill();
    for _ in 0..200 {
        until("each event arrives", || importer.ask("device event") == "lost");
    }
    assert_eq!(importer.ask("device tgid"), tgid, "it still has its session");
    assert_eq!(sidecar.metric("shmesh_sidecar_refused_requests_total{reason=\"slow\"}"), 0);
}
