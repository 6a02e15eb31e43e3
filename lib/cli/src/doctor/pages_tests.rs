//! Huge page trees: none, 2 MiB and 1 GiB pools, a cgroup that allows nothing, every THP switch.

use super::*;
use crate::doctor::tests::Tree;
use shmesh_sys::mountinfo;

fn with_pool(tree: &Tree, name: &str, total: u64, free: u64, reserved: u64) {
    for (file, number) in [("nr_hugepages", total), ("free_hugepages", free), ("resv_hugepages", reserved)] {
        tree.file(&format!("sys/kernel/mm/hugepages/{name}/{file}"), &format!("{number}\n"));
    }
}

#[test]
fn pools() {
    let tree = Tree::new();
    assert!(hugetlb(&tree.source()).value["unknown"].is_string());
    with_pool(&tree, "hugepages-1048576kB", 0, 0, 0);
    with_pool(&tree, "hugepages-2048kB", 0, 0, 0);
    assert_eq!(hugetlb(&tree.source()).status, FindingStatus::Note);
    with_pool(&tree, "hugepages-2048kB", 100, 80, 30);
    let found = hugetlb(&tree.source());
    assert_eq!(
        (found.status, found.shown.as_str()),
        (FindingStatus::Ok, "1 GiB: 0 of 0 free, 2 MiB: 50 of 100 free")
    );
    assert!(found.means.contains("up to 100 MiB (pages of 2 MiB)") && found.means.contains("hugepages-2Mi"));
}

#[test]
fn cgroup_without_huge_pages() {
    let tree = Tree::new();
    with_pool(&tree, "hugepages-2048kB", 100, 100, 0);
    tree.file("proc/self/cgroup", "0::/\n");
    tree.file("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    tree.file("sys/fs/cgroup/hugetlb.2MB.max", "max\n");
    assert_eq!(hugetlb(&tree.source()).status, FindingStatus::Ok);
    tree.file("sys/fs/cgroup/hugetlb.2MB.max", "0\n");
    let found = hugetlb(&tree.source());
    assert_eq!(
        (found.status, &found.value["sizes"][0]["cgroup_limit_bytes"]),
        (FindingStatus::Note, &json!(0))
    );
    assert!(found.means.contains("allows none"));
}

#[test]
fn names() {
    assert_eq!(page_bytes("hugepages-2048kB"), Some(2 << 20));
    assert_eq!(page_bytes("hugepages-xkB"), None);
    assert_eq!((cgroup_name(2 << 20), cgroup_name(1 << 30)), ("2MB".into(), "1GB".into()));
    assert_eq!(cgroup_name(64 << 10), "64KB");
    assert_eq!(chosen("always within_size advise [never] deny force\n"), Some("never"));
    assert_eq!(chosen("nothing"), None);
}

#[test]
fn switches() {
    let tree = Tree::new();
    assert!(transparent(&tree.source(), None).value["unknown"].is_string());
    let set = |word: &str| {
        tree.file("sys/kernel/mm/transparent_hugepage/shmem_enabled", &format!("a [{word}] b\n"));
        transparent(&tree.source(), None)
    };
    assert_eq!(set("never").status, FindingStatus::Note);
    assert_eq!(set("deny").status, FindingStatus::Note);
    assert!(set("advise").means.starts_with("`huge_pages: transparent` works for memfd"));
    assert!(set("always").means.starts_with("Memfd segments get huge pages even without"));
    assert_eq!(set("force").value["dir"], "force");
    let mounted = &mountinfo::parse("1 0 0:1 / /dev/shm rw - tmpfs tmpfs rw,huge=advise\n")[0];
    set("never");
    let found = transparent(&tree.source(), Some(mounted));
    assert_eq!((found.status, found.shown.as_str()), (FindingStatus::Ok, "memfd never, directory advise"));
    set("deny");
    assert_eq!(transparent(&tree.source(), Some(mounted)).value["dir"], "deny");
    for (release, status) in [
        ("5.15.0-1", FindingStatus::Note),
        ("6.0", FindingStatus::Note),
        ("6.1.0-13-amd64\n", FindingStatus::Ok),
    ] {
        tree.file("proc/sys/kernel/osrelease", release);
        assert_eq!(set("deny").status, FindingStatus::Note);
        assert_eq!(set("never").status, status, "{release}");
    }
}

#[test]
fn switch_of_one_page_size() {
    let tree = Tree::new();
    let base = "sys/kernel/mm/transparent_hugepage";
    tree.file(&format!("{base}/shmem_enabled"), "always within_size advise [never] deny force\n");
    let own = format!("{base}/hugepages-2048kB/shmem_enabled");
    tree.file(&own, "always [inherit] within_size advise never\n");
    assert_eq!(transparent(&tree.source(), None).value["memfd"], "never");
    tree.file(&own, "always inherit within_size [advise] never\n");
    assert_eq!(transparent(&tree.source(), None).value["memfd"], "advise");
}
