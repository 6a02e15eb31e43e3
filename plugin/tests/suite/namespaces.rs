//! Clients, sidecars and the service in real namespaces.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::*;
use k8s_openapi::api::core::v1::Pod as PodObject;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MsFlags, mount};
use nix::sched::CloneFlags;
use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::stat::fstat;
use nix::unistd::ForkResult;
use shmesh_fake_kubelet::{ApiServer, Clock};
use shmesh_proto::identity::{PeerIdentity, Subject, Unknown};
use shmesh_testing::until;

/// Connects to each path that it reads from its input, and holds the connections.
pub(crate) fn client() {
    tell("ready");
    let mut held = Vec::new();
    while let Some(path) = told() {
        held.push(connect_to(Path::new(&path)));
        tell(&std::process::id().to_string());
    }
}

/// Accepts one client, sees no pid of it, and asks the service: first about the pidfd, then about the socket.
pub(crate) fn sidecar() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sidecar.sock");
    let listener = listen_on(&path);
    tell("ready");
    tell(path.to_str().unwrap());
    let service = told().unwrap();
    let accepted = accept(&listener);
    let peer = getsockopt(&accepted, sockopt::PeerCredentials).unwrap();
    assert_eq!(peer.pid(), 0, "a client in a sibling pid namespace has no number here");
    let pidfd = peer_pidfd(&accepted);
    let mut asker = Asker::new(Path::new(&service));
    let by_pidfd = asker.ask(Subject::Pidfd, &pidfd).unwrap();
    let by_socket = asker.ask(Subject::Socket, &accepted).unwrap();
    assert_eq!(by_pidfd, by_socket);
    assert_eq!(by_pidfd.pidfd_inode, fstat(&pidfd).unwrap().st_ino, "the same for every observer");
    tell(&format!("{} {}", by_pidfd.bare_tgid, by_pidfd.start_time));
    while told().is_some() {}
}

#[test]
fn process_1_of_a_namespace_gets_its_node_pid() {
    if !is_root() {
        return;
    }
    let service = Service::start();
    let mut sidecar = Helper::start("sidecar", "the sidecar", true);
    let path = sidecar.hear();
    sidecar.say(service.path().to_str().unwrap());
    let mut client = Helper::start("client", "the client", true);
    client.say(&path);
    assert_eq!(client.hear(), "1", "its own number");
    let answer = sidecar.hear();
    let (tgid, start_time) = answer.split_once(' ').unwrap();
    let tgid: i32 = tgid.parse().unwrap();
    assert_eq!(token_of(tgid), "the client");
    assert_eq!(start_time_of(tgid).to_string(), start_time);
    let status = fs::read_to_string(format!("/proc/{tgid}/status")).unwrap();
    assert!(status.contains(&format!("NSpid:\t{tgid}\t1\n")), "{status}");
    let counters = service.stop();
    assert_eq!(counters["identified"], 2);
}

#[test]
fn equal_pids_in_two_namespaces_are_distinguished() {
    if !is_root() {
        return;
    }
    let service = Service::start();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let listener = listen_on(&path);
    let mut asker = service.asker();
    let mut held = Vec::new();
    let answers: Vec<PeerIdentity> = ["first", "second"]
        .into_iter()
        .map(|token| {
            let mut client = Helper::start("client", token, true);
            client.say(path.to_str().unwrap());
            let accepted = accept(&listener);
            assert_eq!(client.hear(), "1");
            let peer = asker.ask(Subject::Pidfd, &peer_pidfd(&accepted)).unwrap();
            assert_eq!(token_of(peer.bare_tgid), token);
            held.push((client, accepted));
            peer
        })
        .collect();
    assert_ne!(answers[0].bare_tgid, answers[1].bare_tgid);
    assert_ne!(answers[0].pidfd_inode, answers[1].pidfd_inode);
}

#[test]
fn pid_question_reveals_only_the_identity() {
    let service = Service::start();
    let mut asker = service.asker();
    let me = std::process::id().cast_signed();
    let known = asker.ask(Subject::Pidfd, &pidfd_open(me, 0).unwrap()).unwrap();
    let PeerIdentity { bare_tgid, start_time, pidfd_inode, .. } = known;
    let told = PeerIdentity { bare_tgid, start_time, pidfd_inode, ..PeerIdentity::default() };
    assert_eq!(asker.ask_about(me), Ok(told), "neither user nor pod");
    let thread = std::thread::spawn(|| nix::unistd::gettid().as_raw()).join().unwrap();
    for unused in [0, -1, i32::MAX, thread] {
        assert_eq!(asker.ask_about(unused), Err(Unknown::Gone), "{unused}");
    }
    let file = fs::File::open("/dev/null").unwrap().into();
    assert_eq!(asker.ask(Subject::Number, &file), Err(Unknown::BadQuestion));
}

#[test]
fn sibling_namespace_is_out_of_sight() {
    if !is_root() {
        return;
    }
    // Its /proc is still that of the outer namespace: it must notice, and not answer with numbers that are not its own.
    let mut command = Command::new("unshare");
    command.args([
        "--pid",
        "--fork",
        env!("CARGO_BIN_EXE_shmesh-plugin"),
        "identity",
        "--socket",
        "/nowhere/x",
    ]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("/proc belongs to another pid namespace"), "{log}");

    // With a /proc of its own it serves, and is honest about it.
    let service = Service::start_with(&[], |command| {
        let inner: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        let program = command.get_program().to_owned();
        let mut outer = Command::new("unshare");
        outer.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(program).args(inner);
        outer.env("SHMESH_LOG", "info").stderr(Stdio::piped());
        *command = outer;
    });
    let me = pidfd_open(std::process::id().cast_signed(), 0).unwrap();
    assert_eq!(service.asker().ask(Subject::Pidfd, &me), Err(Unknown::OutOfSight));
    let (accepted, _client) = {
        let dir = tempfile::tempdir().unwrap();
        let listener = listen_on(&dir.path().join("x"));
        let client = connect_to(&dir.path().join("x"));
        (accept(&listener), client)
    };
    assert_eq!(service.asker().ask(Subject::Socket, &accepted), Err(Unknown::OutOfSight));
}

#[test]
fn nested_pid_namespace_is_refused_only_with_the_flag() {
    if !is_root() {
        return;
    }
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_shmesh-plugin"), "identity"]);
    command.args(["--require-initial-pid-namespace", "--socket", "/nowhere/x"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("run with hostPID") && log.contains("\"initial_pid_namespace\":false"), "{log}");
}

#[test]
fn forwarded_socket_identifies_the_connecting_process() {
    if !is_root() {
        return;
    }
    let service = Service::start();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let listener = listen_on(&path);
    // This process connects; another one inherits the connection and is all that holds it in the end.
    let connection = connect_to(&path);
    fcntl(&connection, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let heir = Helper::start("client", "the heir", false);
    drop(connection);
    let accepted = accept(&listener);
    let peer = service.asker().ask(Subject::Socket, &accepted).unwrap();
    assert_eq!(peer.bare_tgid, std::process::id().cast_signed());
    assert_eq!(service.asker().ask(Subject::Pidfd, &peer_pidfd(&accepted)).unwrap(), peer);
    heir.end();
}

/// Connects, forks, and ends: the child lives on with the connection.
#[expect(unsafe_code, reason = "fork")]
pub(crate) fn forks() {
    tell("ready");
    let connection = connect_to(Path::new(&told().unwrap()));
    tell("connected");
    assert_eq!(told().unwrap(), "fork");
    // SAFETY: the child only waits for the end of its input and leaves.
    match unsafe { nix::unistd::fork() }.unwrap() {
        ForkResult::Parent { .. } => {
            tell("forked");
            #[expect(clippy::exit, reason = "the child keeps everything open")]
            std::process::exit(0)
        }
        ForkResult::Child => {
            let mut byte = [0; 1];
            while nix::unistd::read(std::io::stdin(), &mut byte).unwrap_or(0) > 0 {}
            drop(connection);
            // SAFETY: leaves at once.
            unsafe { libc::_exit(0) }
        }
    }
}

#[test]
fn connection_of_a_fork_identifies_the_parent_until_it_exits() {
    let service = Service::start();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let listener = listen_on(&path);
    let mut parent = Helper::start("forks", "the parent", false);
    parent.say(path.to_str().unwrap());
    assert_eq!(parent.hear(), "connected");
    let accepted = accept(&listener);
    let pidfd = peer_pidfd(&accepted);
    let mut asker = service.asker();
    let peer = asker.ask(Subject::Socket, &accepted).unwrap();
    assert_eq!(peer.bare_tgid, parent.child.id().cast_signed());
    parent.say("fork");
    assert_eq!(parent.hear(), "forked");
    // First as a zombie, which its parent (this test) has not waited for; then reaped.
    wait_for_end(pidfd.as_fd());
    assert_eq!(asker.ask(Subject::Pidfd, &pidfd), Err(Unknown::Gone));
    assert_eq!(asker.ask(Subject::Socket, &accepted), Err(Unknown::Gone));
    parent.child.wait().unwrap();
    assert_eq!(asker.ask(Subject::Pidfd, &pidfd), Err(Unknown::Gone));
    assert_eq!(asker.ask(Subject::Socket, &accepted), Err(Unknown::Gone));
    assert_eq!(service.stop()["gone"], 4);
}

/// A pid namespace of its own with its own `/proc`: no other process takes pids. It is the node, as kind's is.
pub(crate) fn arena() {
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), None::<&str>).unwrap();
    tell("ready");
    reuse_of_a_number();
    tell("done");
}

fn reuse_of_a_number() {
    let service = Service::start();
    let mut asker = service.asker();
    let sleeper = || Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut old = sleeper();
    let number = old.id().cast_signed();
    let old_pidfd = pidfd_open(number, 0).unwrap();
    let before = asker.ask(Subject::Pidfd, &old_pidfd).unwrap();
    assert_eq!((before.bare_tgid, before.start_time), (number, start_time_of(number)));
    // Start times count in ticks: the next process must start in another one.
    let start = before.start_time;
    drop(old.stdin.take());
    old.wait().unwrap();
    assert_eq!(asker.ask(Subject::Pidfd, &old_pidfd), Err(Unknown::Gone));

    let mut new = loop {
        fs::write("/proc/sys/kernel/ns_last_pid", (number - 1).to_string()).unwrap();
        let mut new = sleeper();
        assert_eq!(new.id().cast_signed(), number, "no other process takes the pid");
        if start_time_of(number) > start {
            break new;
        }
        drop(new.stdin.take());
        new.wait().unwrap();
    };
    assert_eq!(
        asker.ask(Subject::Pidfd, &old_pidfd),
        Err(Unknown::Gone),
        "the number lives, the process does not"
    );
    let new_pidfd = pidfd_open(number, 0).unwrap();
    let after = asker.ask(Subject::Pidfd, &new_pidfd).unwrap();
    assert_eq!((after.bare_tgid, after.start_time), (number, start_time_of(number)));
    assert!(after.start_time > before.start_time);
    assert!(after.pidfd_inode != before.pidfd_inode || after.pidfd_inode == 0);
    drop(new.stdin.take());
    new.wait().unwrap();
    service.stop();
}

#[test]
fn reused_pid_is_not_the_old_process() {
    if !is_root() {
        return;
    }
    let mut arena = Helper::start_prepared("arena", "", true, |command| {
        in_namespaces(command, CloneFlags::CLONE_NEWNS);
    });
    assert_eq!(arena.hear(), "done");
}

/// A cgroup with what is in it, removed when dropped. The processes must have ended by then.
struct Cgroup {
    top: PathBuf,
    leaves: Vec<PathBuf>,
}

impl Cgroup {
    /// Below whichever hierarchy this machine lets us write: version 2, or one of version 1.
    fn new() -> Option<Self> {
        let name = format!("shmesh-test-{}", std::process::id());
        let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"];
        let top = roots
            .iter()
            .filter(|root| Path::new(root).join("cgroup.procs").exists())
            .map(|root| Path::new(root).join(&name))
            .find(|top| fs::create_dir(top).is_ok());
        if top.is_none() {
            eprintln!("skipped: no cgroup can be made here");
        }
        Some(Self { top: top?, leaves: Vec::new() })
    }

    fn make(&mut self, path: &str) -> PathBuf {
        let leaf = self.top.join(path);
        fs::create_dir_all(&leaf).unwrap();
        self.leaves.push(leaf.clone());
        leaf
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for leaf in &self.leaves {
            let mut dir = leaf.as_path();
            while dir != self.top.parent().unwrap() && fs::remove_dir(dir).is_ok() {
                dir = dir.parent().unwrap();
            }
        }
    }
}

/// The command joins a cgroup before it begins, and then makes that the root of a cgroup namespace if it is to.
#[expect(unsafe_code, reason = "pre_exec")]
fn join(command: &mut Command, cgroup: &Path, private: bool) {
    use std::os::unix::process::CommandExt;
    let procs: OwnedFd = fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.procs")).unwrap().into();
    // SAFETY: two system calls, nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::write(&procs, b"0")?;
            if private {
                nix::sched::unshare(CloneFlags::CLONE_NEWCGROUP)?;
            }
            Ok(())
        });
    }
}

const POD: &str = "9a5f0e5c-7d6b-4c1e-8f3a-2b6d1c0e4f57";
const SERVICE_POD: &str = "00000000-1111-2222-3333-444444444444";

#[test]
fn pod_comes_from_the_cgroup_and_is_confirmed_by_the_file() {
    let (container, other) = ("c".repeat(64), "d".repeat(64));
    let Some(mut cgroups) = is_root().then(Cgroup::new).flatten() else { return };
    let client_cgroup = cgroups.make(&format!("kubepods/burstable/pod{POD}/{container}"));
    let service_cgroup = cgroups.make(&format!("kubepods/pod{SERVICE_POD}/{other}"));
    let dir = tempfile::tempdir().unwrap();
    let pods = dir.path().join("pods.yaml");
    let yaml = |id: &str| {
        format!(
            "pods:\n- uid: {POD}\n  namespace: radio\n  name: du-0\n  containers: [{{name: phy, id: 'containerd://{id}'}}]\n"
        )
    };
    let listener = listen_on(&dir.path().join("x"));

    // The service on the host, then in a private cgroup namespace, where it sees `/../../burstable/pod…`.
    for private in [false, true] {
        fs::write(&pods, yaml(&container)).unwrap();
        let mut service = Service::start_with(&["--pods", pods.to_str().unwrap()], |command| {
            join(command, &service_cgroup, private);
        });
        let mut client =
            Helper::start_prepared("client", "", false, |command| join(command, &client_cgroup, false));
        client.say(dir.path().join("x").to_str().unwrap());
        let accepted = accept(&listener);
        let peer = service.asker().ask(Subject::Socket, &accepted).unwrap();
        let pod = peer.pod.unwrap();
        assert_eq!(
            (pod.uid.as_str(), pod.container_id.as_str()),
            (POD, container.as_str()),
            "private: {private}"
        );
        assert_eq!(
            (pod.namespace.as_str(), pod.name.as_str(), pod.container.as_str()),
            ("radio", "du-0", "phy")
        );
        assert!(pod.confirmed);

        // A broken file changes nothing; a new one does, at once.
        let hangup =
            || nix::sys::signal::kill(nix::unistd::Pid::from_raw(service.pid()), nix::sys::signal::SIGHUP);
        fs::write(&pods, "pods: 7").unwrap();
        hangup().unwrap();
        service.line("cannot reload the file of pods; keeping the previous one");
        assert!(service.asker().ask(Subject::Socket, &accepted).unwrap().pod.unwrap().confirmed);
        fs::write(&pods, yaml(&other)).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(service.pid()), nix::sys::signal::SIGHUP).unwrap();
        service.line("file of pods loaded");
        let pod = service.asker().ask(Subject::Socket, &accepted).unwrap().pod.unwrap();
        assert_eq!((pod.name.as_str(), pod.container.as_str(), pod.confirmed), ("du-0", "", false));
        client.end();
        service.stop();
    }
    assert!(fs::read_to_string(client_cgroup.join("cgroup.procs")).unwrap().is_empty());
    let _ = listener.as_raw_fd();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_is_confirmed_by_the_api_server() {
    let Some(mut cgroups) = is_root().then(Cgroup::new).flatten() else { return };
    let server = ApiServer::new(Clock::runtime());
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    fs::write(&kubeconfig, ApiServer::kubeconfig(server.listen().await.unwrap())).unwrap();
    let pod = serde_json::json!({
        "metadata": {"namespace": "radio", "name": "du-0"},
        "spec": {"nodeName": "n1", "serviceAccountName": "du", "containers": [{"name": "phy"}]},
    });
    let pod: PodObject = serde_json::from_value(pod).unwrap();
    let uid = server.create(&pod).unwrap().metadata.uid.unwrap();
    let cgroup = cgroups.make(&format!("kubepods/burstable/pod{uid}/{}", "c".repeat(64)));
    let service = Service::start_with(&["--node", "n1"], |command| {
        command.env("KUBECONFIG", &kubeconfig);
    });
    let listener = listen_on(&dir.path().join("x"));
    let mut client = Helper::start_prepared("client", "", false, |command| join(command, &cgroup, false));
    client.say(dir.path().join("x").to_str().unwrap());
    let accepted = accept(&listener);
    let mut asker = service.asker();
    let mut ask = || asker.ask(Subject::Socket, &accepted).unwrap().pod.unwrap();
    // A service on a busy machine answers without a name until it has listed the pods, at first for half a second.
    until("the pod is confirmed", || ask().confirmed);
    let found = ask();
    assert_eq!((found.uid.as_str(), found.namespace.as_str(), found.name.as_str()), (&*uid, "radio", "du-0"));
    assert_eq!((found.service_account.as_str(), found.confirmed), ("du", true));
    server.delete::<PodObject>("radio", "du-0").unwrap();
    until("the deleted pod has no name", || {
        let found = ask();
        (found.uid == uid && found.name.is_empty()) && !found.confirmed
    });
    client.end();
    service.stop();
}
