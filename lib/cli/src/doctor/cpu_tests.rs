//! Lists, quotas and kernels.

use super::*;
use crate::doctor::tests::Tree;

fn cores(tree: &Tree, allowed: &str) -> Cores {
    tree.file("sys/devices/system/cpu/online", "0-7\n");
    Cores::gather(&tree.source(), &Ok(format!("Cpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n")))
}

#[test]
fn lists() {
    assert_eq!(list("0-3,8,10-11\n").unwrap().len(), 7);
    assert_eq!(list("0").unwrap().len(), 1);
    for bad in ["", "x", "0-4294967295", "3-", "7-3"] {
        assert!(list(bad).is_err(), "{bad}");
    }
}

#[test]
fn quotas() {
    assert_eq!(millicores("150000", "100000\n"), Some(1500));
    assert_eq!(millicores("max", "100000"), None);
    assert_eq!(millicores("-1", "100000"), None);
    assert_eq!(millicores("5", "0"), None);
    assert_eq!((decimal(1500), decimal(2000), decimal(50)), ("1.5".into(), "2".into(), "0.05".into()));
}

#[test]
fn v2_quota_of_the_smallest_level() {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "0::/pod/app\n");
    tree.file("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    tree.file("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n");
    tree.file("sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
    let found = core_finding(&cores(&tree, "0-7"));
    assert_eq!((found.status, found.shown.as_str()), (FindingStatus::Warn, "8 online, 8 allowed, quota 1.5"));
    assert!(found.means.contains("spin_us: 0"));
    tree.file("sys/fs/cgroup/pod/cpu.max", "400000 100000\n");
    assert_eq!(core_finding(&cores(&tree, "0-7")).status, FindingStatus::Note);
    assert_eq!(
        core_finding(&cores(&tree, "0-1")).status,
        FindingStatus::Ok,
        "the mask binds before the quota"
    );
}

#[test]
fn v1_quota() {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "3:cpu,cpuacct:/kubepods/podx/y\n");
    tree.file(
        "proc/self/mountinfo",
        "3 2 0:9 /kubepods/podx/y /sys/fs/cgroup/cpu ro - cgroup c rw,cpu,cpuacct\n",
    );
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        .file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_eq!(quota(&tree.source()), None);
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n");
    assert_eq!(quota(&tree.source()), Some(500));
}

#[test]
fn masks() {
    let tree = Tree::new();
    assert_eq!(core_finding(&cores(&tree, "3")).status, FindingStatus::Warn);
    assert_eq!(core_finding(&cores(&tree, "6-9")).value["allowed"], 2, "cores that are off do not count");
    let nothing = Cores::gather(&Tree::new().source(), &Err(UnknownFact("x".into())));
    assert!(core_finding(&nothing).value["unknown"].is_string());
}

#[test]
fn kernels() {
    assert_eq!(version("6.18.44-fc-v595\n"), Some((6, 18)));
    assert_eq!(version("5.4"), Some((5, 4)));
    assert_eq!(version("linux"), None);
    let tree = Tree::new();
    assert!(kernel(&tree.source()).value["unknown"].is_string());
    for (release, status, missing) in [
        ("6.5.0", FindingStatus::Ok, 0),
        ("5.15.0-1-aws", FindingStatus::Note, 2),
        ("4.18.0-553.el8", FindingStatus::Warn, 5),
    ] {
        tree.file("proc/sys/kernel/osrelease", release);
        let found = kernel(&tree.source());
        assert_eq!((found.status, found.value["missing"].as_array().unwrap().len()), (status, missing));
    }
}

#[test]
fn machines() {
    assert_eq!(virtual_machine("processor: 0\nflags\t\t: fpu hypervisor lahf_lm\n", None), Some(true));
    assert_eq!(virtual_machine("flags\t\t: fpu lahf_lm\n", Some("QEMU")), Some(false));
    assert_eq!(virtual_machine("Features: fp asimd\n", Some("QEMU\n")), Some(true));
    assert_eq!(virtual_machine("Features: fp asimd\n", Some("Ampere\n")), Some(false));
    assert_eq!(virtual_machine("Features: fp asimd\n", None), None);
    let tree = Tree::new();
    tree.file("proc/cpuinfo", "flags : hypervisor\n");
    assert!(machine(&tree.source(), &cores(&tree, "0-1")).means.contains("raise spin_us"));
    assert!(machine(&tree.source(), &cores(&tree, "0")).means.contains("no remedy"));
}
