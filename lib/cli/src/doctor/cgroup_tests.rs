//! Trees as real nodes show them: v2 in a private namespace, v2 on a host, v1 under containerd, a hybrid.

use super::*;
use crate::doctor::tests::Tree;

const V2_MOUNT: &str =
    "35 24 0:30 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n";

#[test]
fn v2_private_namespace() {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "0::/\n").file("proc/self/mountinfo", V2_MOUNT);
    tree.file("sys/fs/cgroup/memory.max", "268435456\n").file("sys/fs/cgroup/memory.current", "104857600\n");
    tree.file("sys/fs/cgroup/memory.stat", "anon 1\nfile 9\ninactive_file 20971520\nactive_file 5\n");
    let memory = memory(&tree.source());
    assert_eq!(memory.as_ref().unwrap().room(), Some(((256 - 100 + 20) << 20) + 5));
    let found = finding(&memory);
    assert_eq!(found.status, FindingStatus::Ok);
    assert_eq!(found.value["limit_bytes"], 268_435_456_u64);
    assert_eq!(found.shown, "v2, limit 256 MiB, room 176 MiB");
}

#[test]
fn v2_limit_is_the_smallest_of_all_ancestors() {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-a.scope\n");
    tree.file("proc/self/mountinfo", V2_MOUNT);
    let pod = "sys/fs/cgroup/kubepods.slice/kubepods-pod1.slice";
    tree.file(&format!("{pod}/cri-containerd-a.scope/memory.max"), "max\n");
    tree.file(&format!("{pod}/cri-containerd-a.scope/memory.current"), "1048576\n");
    tree.file(&format!("{pod}/memory.max"), "67108864\n");
    tree.file(&format!("{pod}/memory.current"), "50331648\n");
    tree.file("sys/fs/cgroup/kubepods.slice/memory.max", "1073741824\n");
    tree.file("sys/fs/cgroup/kubepods.slice/memory.current", "536870912\n");
    let memory = memory(&tree.source());
    assert_eq!(memory.as_ref().unwrap().place.dirs.len(), 4);
    assert_eq!(memory.as_ref().unwrap().room(), Some(16 << 20));
    assert_eq!(finding(&memory).status, FindingStatus::Warn);
}

#[test]
fn v2_without_a_limit() {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "0::/user.slice\n").file("proc/self/mountinfo", V2_MOUNT);
    tree.file("sys/fs/cgroup/user.slice/memory.max", "max\n");
    tree.file("sys/fs/cgroup/user.slice/memory.current", "5\n");
    let found = finding(&memory(&tree.source()));
    assert_eq!((found.status, found.shown.as_str()), (FindingStatus::Note, "v2, no limit"));
    assert!(found.value["room_bytes"].is_null());
    assert_eq!(found.value["used_bytes"], 5);
}

#[test]
fn v1_limit_of_container_and_pod() {
    let tree = Tree::new();
    let path = "/kubepods/pod0d1f/7aa0";
    tree.file("proc/self/cgroup", &format!("9:name=systemd:{path}\n4:cpu,memory:{path}\n0::/\n"));
    tree.file(
        "proc/self/mountinfo",
        &format!(
            "30 2 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw\n31 30 0:32 {path} /sys/fs/cgroup/memory ro \
             master:9 - cgroup cgroup rw,cpu,memory\n"
        ),
    );
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    tree.file("sys/fs/cgroup/memory/memory.usage_in_bytes", "10485760\n");
    tree.file(
        "sys/fs/cgroup/memory/memory.stat",
        "inactive_file 1\nhierarchical_memory_limit 134217728\ntotal_inactive_file 2097152\n",
    );
    let memory = memory(&tree.source());
    let known = memory.as_ref().unwrap();
    assert_eq!((known.place.version, known.place.dirs.len()), (1, 1));
    assert_eq!(known.limit(), Some(128 << 20));
    assert_eq!(known.room(), Some(120 << 20));
    assert_eq!(finding(&memory).value["path"], path);
}

#[test]
fn paths_outside_the_visible_hierarchy() {
    let mount = &mountinfo::parse("31 30 0:32 /a /m rw - cgroup cgroup rw,memory\n")[0];
    assert_eq!(directory(mount, "/a/b"), Path::new("/m/b"));
    assert_eq!(directory(mount, "/ab"), Path::new("/m"));
    assert_eq!(directory(mount, "/a/../../x"), Path::new("/m"));
    let mount = &mountinfo::parse("31 30 0:32 / /m rw - cgroup2 c rw\n")[0];
    assert_eq!(directory(mount, "/../../pod1/c"), Path::new("/m"));
    assert_eq!(directory(mount, "/"), Path::new("/m"));
}

#[test]
fn memberships() {
    let hybrid = "4:memory:/process_api/94\n1:cpu:/\n0::/unified\n";
    assert_eq!(membership(hybrid, "memory"), Some((1, "/process_api/94")));
    assert_eq!(membership(hybrid, "hugetlb"), Some((2, "/unified")));
    assert_eq!(membership("", "memory"), None);
    assert_eq!(membership("0::/a:b\n", "memory"), Some((2, "/a:b")));
}

#[test]
fn nothing_to_read() {
    let tree = Tree::new();
    let found = finding(&memory(&tree.source()));
    assert_eq!(found.status, FindingStatus::Note);
    assert!(found.value["unknown"].as_str().unwrap().contains("/proc/self/cgroup"));
    tree.file("proc/self/cgroup", "0::/\n").file("proc/self/mountinfo", "");
    assert!(memory(&tree.source()).unwrap_err().0.contains("not mounted"));
}

#[test]
fn node() {
    let tree = Tree::new();
    assert_eq!(node_finding(&node_memory(&tree.source())).status, FindingStatus::Note);
    tree.file("proc/meminfo", "MemTotal:       24684096 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n");
    assert_eq!(node_memory(&tree.source()).unwrap().available, 20_000_000 * 1024);
}
