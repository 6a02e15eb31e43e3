//! The command as a whole: on a made-up tree, on an empty one, and on the machine at hand.

use std::path::Path;

use super::*;

/// A directory that stands for `/`.
pub(in crate::doctor) struct Tree(tempfile::TempDir);

impl Tree {
    pub(in crate::doctor) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(in crate::doctor) fn source(&self) -> Source {
        Source::new(self.0.path())
    }

    fn place(&self, path: &str) -> PathBuf {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(in crate::doctor) fn file(&self, path: &str, text: &str) -> &Self {
        std::fs::write(self.place(path), text).unwrap();
        self
    }

    pub(in crate::doctor) fn link(&self, path: &str, target: &str) -> &Self {
        std::os::unix::fs::symlink(target, self.place(path)).unwrap();
        self
    }
}

fn by_id<'a>(findings: &'a [Finding], id: &str) -> &'a Finding {
    findings.iter().find(|finding| finding.id == id).unwrap_or_else(|| panic!("no {id}"))
}

/// A restricted pod of containerd on cgroup v2, as far as files tell.
fn pod() -> Tree {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "0::/\n");
    tree.file(
        "proc/self/mountinfo",
        "1 0 0:1 / / rw - overlay o rw\n35 1 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
    );
    let status = "Uid:\t9\t9\t9\t9\nGid:\t9\t9\t9\t9\nGroups:\t\nCapEff:\t0\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    tree.file("proc/self/status", &format!("{status}Cpus_allowed_list:\t0-3\n"));
    tree.file(
        "proc/self/limits",
        "Max locked memory 8388608 8388608 bytes\nMax open files 1048576 1048576 files\n",
    );
    tree.file("proc/self/uid_map", "0 0 4294967295\n");
    tree.file("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n");
    tree.file("proc/cpuinfo", "flags : fpu\n");
    tree.file("proc/sys/kernel/osrelease", "6.8.0\n");
    tree.file("sys/fs/cgroup/memory.max", "268435456\n").file("sys/fs/cgroup/memory.current", "67108864\n");
    tree.file("sys/fs/cgroup/cpu.max", "200000 100000\n");
    tree.file("sys/devices/system/cpu/online", "0-3\n");
    for (name, inode) in [
        ("pid", 4_026_533_001_u64),
        ("user", 4_026_531_837),
        ("ipc", 4_026_533_002),
        ("cgroup", 4_026_533_003),
    ] {
        tree.link(&format!("proc/self/ns/{name}"), &format!("{name}:[{inode}]"));
    }
    tree
}

#[test]
fn pod_has_memory_namespaces_and_cores() {
    let (tree, dir) = (pod(), tempfile::tempdir().unwrap());
    let findings = collect(&tree.source(), dir.path(), Some(100 << 20), None);
    assert_eq!(by_id(&findings, "memory.cgroup").shown, "v2, limit 256 MiB, room 192 MiB");
    assert_eq!(by_id(&findings, "ns.pid").status, FindingStatus::Note);
    assert_eq!(by_id(&findings, "cpu.cores").value["usable_millicores"], 2000);
    assert_eq!(by_id(&findings, "links.need").value["cgroup_room_bytes"], 192 << 20);
    assert_eq!(by_id(&findings, "dir.writable").status, FindingStatus::Ok);
}

#[test]
fn need_beyond_the_limit_fails() {
    let (tree, dir) = (pod(), tempfile::tempdir().unwrap());
    let findings = collect(&tree.source(), dir.path(), Some(200 << 20), None);
    let need = by_id(&findings, "links.need");
    assert_eq!(need.status, FindingStatus::Fail);
    assert!(
        need.means.contains("room for 192 MiB only") && need.means.contains("by 8 MiB"),
        "{}",
        need.means
    );
    assert_eq!(verdict(&findings), ExitVerdict::Fails);
}

#[test]
fn empty_tree_does_not_crash() {
    let (tree, dir) = (Tree::new(), tempfile::tempdir().unwrap());
    let findings = collect(&tree.source(), dir.path(), None, None);
    assert!(findings.iter().filter(|finding| finding.value["unknown"].is_string()).count() >= 15);
    assert!(findings.iter().all(|finding| !finding.means.is_empty() && !finding.shown.is_empty()));
    assert_eq!(verdict(&findings), ExitVerdict::Works);
    let ids: std::collections::BTreeSet<_> = findings.iter().map(|finding| finding.id).collect();
    assert_eq!(ids.len(), findings.len(), "ids are unique");
}

#[test]
fn missing_directory_fails_in_text_and_json() {
    let args = Args {
        dir: PathBuf::from("/nonexistent/shmesh"),
        output: Output::Json,
        need_bytes: Some(Bytes(0)),
        pidfd_open: None,
    };
    let mut out = Vec::new();
    assert_eq!(run(&args, &mut out).unwrap(), ExitVerdict::Fails);
    let report: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(report["verdict"], "fails");
    assert_eq!(report["findings"][0]["id"], "dir.path");
    assert_eq!(report["findings"][0]["value"]["exists"], false);
}

#[test]
fn doctor_runs_on_this_machine() {
    let dir = tempfile::tempdir().unwrap();
    let args = Args { dir: dir.path().into(), output: Output::Text, need_bytes: None, pidfd_open: None };
    let mut out = Vec::new();
    run(&args, &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(out.lines().count() > 40, "{out}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays behind");
}

#[test]
fn arguments() {
    /// As main has it.
    #[derive(clap::Parser, Debug)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }
    use clap::Parser;
    let cli = Cli::try_parse_from(["x", "--dir", "/a", "--output", "json", "--need-bytes", "2Gi"]).unwrap();
    assert_eq!((cli.args.dir.as_path(), cli.args.output), (Path::new("/a"), Output::Json));
    assert_eq!(cli.args.need_bytes, Some(Bytes(2 << 30)));
    assert!(Cli::try_parse_from(["x", "--need-bytes", "lots"]).is_err());
}
