//! The driver is killed before each system call of a Prepare or an Unprepare that changes a file, started again, and called again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::*;

/// System calls that change a file or a directory, whatever their arguments.
const CHANGES: [(i64, &str); 17] = [
    (libc::SYS_creat, "creat"),
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_mkdirat, "mkdirat"),
    (libc::SYS_rmdir, "rmdir"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_unlinkat, "unlinkat"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_renameat, "renameat"),
    (libc::SYS_renameat2, "renameat2"),
    (libc::SYS_chmod, "chmod"),
    (libc::SYS_fchmod, "fchmod"),
    (libc::SYS_fchmodat, "fchmodat"),
    (libc::SYS_chown, "chown"),
    (libc::SYS_fchown, "fchown"),
    (libc::SYS_fchownat, "fchownat"),
    (libc::SYS_ftruncate, "ftruncate"),
    (libc::SYS_linkat, "linkat"),
];
/// System calls that synchronise files with the disk.
const SYNCS: [(i64, &str); 3] =
    [(libc::SYS_fsync, "fsync"), (libc::SYS_fdatasync, "fdatasync"), (libc::SYS_syncfs, "syncfs")];
/// More changes than a call makes.
const MAX_POINTS: usize = 100;

/// The changes that a process made while it was traced, and whether it was killed before the next one.
struct Trace {
    changes: Vec<&'static str>,
    is_killed: bool,
}

/// Watches the system calls of a process, and kills it before one of them.
struct Tracer {
    thread: JoinHandle<Trace>,
    is_ended: Arc<AtomicBool>,
}

impl Tracer {
    /// Kills the process before the change of this number, if it makes so many.
    fn attach(pid: Pid, root: &Path, kill_before: usize) -> Self {
        let is_ended = Arc::new(AtomicBool::new(false));
        let (attached, wait) = mpsc::channel();
        let (ended, root) = (is_ended.clone(), root.to_owned());
        // A process is traced by a thread, and waits of other threads do not see it.
        let thread = std::thread::spawn(move || {
            let mut trace = Trace { changes: Vec::new(), is_killed: false };
            for thread in threads(pid) {
                // An earlier tracer may only just end.
                shmesh_testing::until("the thread is traced or has ended", || {
                    let options = Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE;
                    match ptrace::seize(thread, options) {
                        Ok(()) => {
                            let _ = ptrace::interrupt(thread);
                            true
                        }
                        Err(error) => error == Errno::ESRCH,
                    }
                });
            }
            attached.send(()).unwrap();
            let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD | WaitPidFlag::WNOHANG;
            loop {
                match waitpid(None, Some(flags)) {
                    Ok(WaitStatus::PtraceSyscall(thread)) => {
                        if let Some(change) = change(pid, thread, &root) {
                            if trace.changes.len() == kill_before {
                                kill(pid, Signal::SIGKILL).unwrap();
                                trace.is_killed = true;
                                return trace;
                            }
                            trace.changes.push(change);
                        }
                        let _ = ptrace::syscall(thread, None);
                    }
                    Ok(WaitStatus::Stopped(thread, signal)) => drop(ptrace::syscall(thread, signal)),
                    Ok(WaitStatus::PtraceEvent(thread, ..)) => drop(ptrace::syscall(thread, None)),
                    // With the end of this thread the process goes on untraced.
                    Ok(WaitStatus::StillAlive) if ended.load(Ordering::Relaxed) => return trace,
                    Ok(WaitStatus::StillAlive) => std::thread::sleep(Duration::from_micros(50)),
                    Ok(_) => {}
                    Err(Errno::ECHILD) => return trace,
                    Err(error) => panic!("waitpid: {error}"),
                }
            }
        });
        wait.recv().unwrap();
        Self { thread, is_ended }
    }

    /// Ends the watch. Only then it is certain whether there was a kill: it may come after an answer.
    fn end(self) -> Trace {
        self.is_ended.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Whether the kernel lets this process trace another one; the test is skipped if not, or fails where it is required.
fn can_trace(pid: Pid) -> bool {
    // With the end of the thread the process goes on untraced.
    match std::thread::spawn(move || ptrace::seize(pid, Options::empty())).join().unwrap() {
        Ok(()) => true,
        Err(Errno::EPERM) => {
            let why = "ptrace is forbidden here (EPERM): add CAP_SYS_PTRACE, or allow ptrace in seccomp and kernel.yama.ptrace_scope";
            shmesh_testing::skip("PTRACE", &format!("the driver was not killed: {why}"));
            false
        }
        Err(error) => panic!("ptrace: {error}"),
    }
}

fn threads(pid: Pid) -> Vec<Pid> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    entries.map(|entry| Pid::from_raw(entry.file_name().to_str().unwrap().parse().unwrap())).collect()
}

/// Returns the name of the system call that a thread is about to make, if it changes a file below `root`.
fn change(pid: Pid, thread: Pid, root: &Path) -> Option<&'static str> {
    let registers = ptrace::getregs(thread).ok()?;
    // Only at the entry.
    if registers.rax.cast_signed() != -i64::from(libc::ENOSYS) {
        return None;
    }
    let call = registers.orig_rax.cast_signed();
    if call == libc::SYS_openat {
        let flags = i32::try_from(registers.rdx & 0xffff_ffff).ok()?;
        return (flags & (libc::O_CREAT | libc::O_TRUNC) != 0).then_some("openat");
    }
    if [libc::SYS_write, libc::SYS_pwrite64, libc::SYS_writev].contains(&call) {
        let file = fs::read_link(format!("/proc/{pid}/fd/{}", registers.rdi)).ok()?;
        return file.starts_with(root).then_some("write");
    }
    CHANGES.iter().chain(&SYNCS).find(|(number, _)| *number == call).map(|(_, name)| *name)
}

/// When the driver was killed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum KillTime {
    Never,
    DuringCall,
    AfterAnswer,
}

/// A call of the kubelet for the only claim.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Call {
    Prepare,
    Unprepare,
}

struct Scene {
    node: DraNode,
    uid: String,
    plugin: Option<Plugin>,
    /// State of the node after each call, if nothing is killed.
    prepared: Vec<String>,
    released: Vec<String>,
}

impl Scene {
    async fn new() -> Option<Self> {
        let node = DraNode::new().await?;
        node.claim("a", A, &config(&json!({"links": [{"name": "fronthaul"}]})));
        let uid = node.uid("a");
        let plugin = node.start();
        if !can_trace(plugin.pid()) {
            plugin.crash();
            return None;
        }
        let plugin = Some(plugin);
        let mut scene = Self { node, uid, plugin, prepared: Vec::new(), released: Vec::new() };
        scene.call(Call::Prepare).await.unwrap();
        scene.prepared = scene.state();
        scene.call(Call::Unprepare).await.unwrap();
        scene.released = scene.state();
        assert_ne!(scene.prepared, scene.released);
        Some(scene)
    }

    async fn client(&self) -> DraPluginClient<Channel> {
        let socket = self.node.place.path("var/lib/kubelet/plugins/shmesh.io/dra-p1.sock");
        until("an answering socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
        self.node.client().await
    }

    async fn call(&self, call: Call) -> Result<(), tonic::Status> {
        self.call_with(self.client().await, call).await
    }

    async fn call_with(&self, mut client: DraPluginClient<Channel>, call: Call) -> Result<(), tonic::Status> {
        let claim = Claim { namespace: "radio".into(), name: "a".into(), uid: self.uid.clone() };
        let claims = vec![claim];
        let error = match call {
            Call::Prepare => {
                let answer = client.node_prepare_resources(NodePrepareResourcesRequest { claims }).await?;
                let mut answer = answer.into_inner().claims.remove(&self.uid).unwrap();
                assert_eq!(
                    answer.devices.remove(0).cdi_device_ids,
                    [format!("shmesh.io/claim={}", self.uid)]
                );
                answer.error
            }
            Call::Unprepare => {
                let answer =
                    client.node_unprepare_resources(NodeUnprepareResourcesRequest { claims }).await?;
                answer.into_inner().claims.remove(&self.uid).unwrap().error
            }
        };
        assert_eq!(error, "", "{call:?}");
        Ok(())
    }

    /// Names, modes, groups and contents of everything that claims have on the node.
    fn state(&self) -> Vec<String> {
        let mut state = Vec::new();
        for directory in ["dev/shm/shmesh-claims", "var/run/cdi", "var/lib/kubelet/plugins/shmesh.io"] {
            for name in self.node.entries(directory) {
                let path = self.node.place.path(directory).join(&name);
                // The sockets and locks of the plugin are not the claim's.
                let Ok(found) = path.symlink_metadata() else { continue };
                let is_claim = found.is_dir() || name.contains("claim") && !name.ends_with(".lock");
                if is_claim {
                    let text = fs::read_to_string(&path).unwrap_or_default();
                    state.push(format!("{name} {:o} {} {text}", found.mode(), found.gid()));
                }
            }
        }
        state
    }

    /// Waits until the claim has what it should have.
    async fn has(&self, after: Call, when: &str) {
        let wanted = if after == Call::Prepare { &self.prepared } else { &self.released };
        until(&format!("the state of a run without a kill, {when}"), || self.state() == *wanted).await;
    }

    /// Makes a call, and kills the driver before a change. Returns the changes before it, and when it was killed.
    async fn killed(&mut self, call: Call, before: usize) -> (Vec<&'static str>, KillTime) {
        let client = self.client().await;
        let plugin = self.plugin.take().unwrap();
        let tracer = Tracer::attach(plugin.pid(), self.node.place.dir.path(), before);
        let answer = self.call_with(client, call).await;
        let Trace { changes, is_killed } = tracer.end();
        let time = match answer {
            Err(_) if is_killed => KillTime::DuringCall,
            Ok(()) if is_killed => KillTime::AfterAnswer,
            answer => {
                answer.expect("an answer of a driver that lives");
                KillTime::Never
            }
        };
        if is_killed {
            plugin.crash();
            self.plugin = Some(self.node.start());
        } else {
            self.plugin = Some(plugin);
        }
        (changes, time)
    }

    /// Kills before a change of a call, starts again, and makes another call. Returns when the driver was killed.
    async fn survives(&mut self, call: Call, before: usize, then: Call) -> KillTime {
        if call == Call::Unprepare {
            self.call(Call::Prepare).await.unwrap();
            fs::write(self.node.directory(&self.uid).join("fronthaul_shm"), "x").unwrap();
        }
        let (changes, time) = self.killed(call, before).await;
        let when = format!("{call:?} killed ({time:?}) after {changes:?}, then {then:?}");
        self.call(then).await.unwrap();
        if then == Call::Prepare {
            // After an Unprepare that had not begun, the claim has its file.
            let _ = fs::remove_file(self.node.directory(&self.uid).join("fronthaul_shm"));
        }
        self.has(then, &when).await;
        self.call(Call::Unprepare).await.unwrap();
        self.has(Call::Unprepare, &when).await;
        time
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn driver_killed_before_one_of_its_last_changes_is_repaired() {
    let Some(mut scene) = Scene::new().await else { return };
    for call in [Call::Prepare, Call::Unprepare] {
        let (changes, time) = scene.killed(call, MAX_POINTS).await;
        assert_eq!(time, KillTime::Never);
        assert!(
            !changes.iter().any(|change| change.contains("sync")),
            "a disk takes milliseconds: {changes:?}"
        );
        let last = changes.iter().rposition(|change| *change == "rename").unwrap();
        if call == Call::Unprepare {
            scene.has(Call::Unprepare, "without a kill").await;
        } else {
            scene.call(Call::Unprepare).await.unwrap();
        }
        // The garbage collector may have made some of these changes, and makes none now.
        let mut times = Vec::new();
        for before in (0..=last).rev() {
            if !times.contains(&KillTime::DuringCall) {
                times.push(scene.survives(call, before, call).await);
            }
        }
        assert!(times.contains(&KillTime::DuringCall), "{changes:?}: {times:?}");
        if call == Call::Prepare {
            scene.call(Call::Prepare).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: a kill before each change, with either call after it"]
async fn driver_killed_before_any_change_is_repaired() {
    let Some(mut scene) = Scene::new().await else { return };
    for call in [Call::Prepare, Call::Unprepare] {
        for then in [Call::Prepare, Call::Unprepare] {
            let mut times = Vec::new();
            while times.last() != Some(&KillTime::Never) && times.len() <= MAX_POINTS {
                times.push(scene.survives(call, times.len(), then).await);
            }
            let of = |time| times.iter().filter(|other| **other == time).count();
            let (kills, late) = (of(KillTime::DuringCall), of(KillTime::AfterAnswer));
            eprintln!("{call:?}, then {then:?}: {kills} kills, and {late} after the answer");
            assert!(kills >= 5 && times.len() <= MAX_POINTS, "{times:?}");
        }
    }
}
