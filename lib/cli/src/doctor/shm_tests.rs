//! Directories made up: the runtimes' default, pools, full ones, refusals.

use super::*;
use crate::doctor::dir::Scratch;
use shmesh_sys::mountinfo;

fn facts() -> Facts {
    Facts {
        dir: "/dev/shm".into(),
        owner: Ok(DirOwner { mode: 0o1777, uid: 0, gid: 0 }),
        space: Ok(Space { kind: "tmpfs".into(), size: Some(1 << 30), free: Some(1 << 29), inodes: Some(80) }),
        seen: parsed("9 1 0:9 / /dev/shm rw,nosuid,nodev,noexec - tmpfs tmpfs rw,size=1048576k"),
        scratch: Scratch { file: Ok(std::fs::File::open("/").unwrap().into()), anonymous: Ok(()) },
        nvipc_links: Vec::new(),
    }
}

fn parsed(line: &str) -> Result<(Mount, usize), UnknownFact> {
    Ok((mountinfo::parse(line)[0].clone(), 0))
}

fn by_id<'a>(findings: &'a [Finding], id: &str) -> &'a Finding {
    findings.iter().find(|finding| finding.id == id).unwrap()
}

#[test]
fn healthy_directory_has_no_problems() {
    let found = findings(&facts());
    assert!(found.iter().all(|one| one.status == FindingStatus::Ok), "{found:#?}");
    assert_eq!(by_id(&found, "dir.space").shown, "1 GiB, 512 MiB free");
    assert_eq!(by_id(&found, "dir.path").shown, "/dev/shm (1777 0:0)");
    assert!(by_id(&found, "dir.inodes").means.contains("about 10 links"));
}

#[test]
fn links_in_nvipcs_layout_are_noted() {
    let mut facts = facts();
    facts.nvipc_links = vec!["fapi (no primary)".to_owned()];
    let found = findings(&facts);
    let note = by_id(&found, "dir.nvipc");
    assert_eq!((note.status, note.shown.as_str()), (FindingStatus::Note, "fapi (no primary)"));
}

#[test]
fn default_size_and_one_unit_are_recognised() {
    let mut facts = facts();
    facts.space.as_mut().unwrap().size = Some(64 << 20);
    assert_eq!(by_id(&findings(&facts), "dir.space").status, FindingStatus::Ok, "one unit of shmesh.io/shm");
    facts.seen = parsed("9 1 0:9 / /dev/shm rw - tmpfs shm rw,size=65536k");
    let found = findings(&facts);
    assert_eq!(by_id(&found, "dir.space").status, FindingStatus::Warn);
    assert!(
        by_id(&found, "dir.space").means.contains("emptyDir")
            && by_id(&found, "dir.space").means.contains("shmesh.io/shm")
    );
    facts.seen = Err(UnknownFact("hidden".into()));
    assert_eq!(by_id(&findings(&facts), "dir.space").status, FindingStatus::Warn);
    assert_eq!(by_id(&findings(&facts), "dir.mount").status, FindingStatus::Note);
}

#[test]
fn unlimited_unknown_and_missing_space() {
    let mut facts = facts();
    facts.space = Ok(Space { kind: "0xef53".into(), size: None, free: None, inodes: None });
    let found = findings(&facts);
    assert_eq!(by_id(&found, "dir.filesystem").status, FindingStatus::Warn);
    assert_eq!(by_id(&found, "dir.space").status, FindingStatus::Note);
    facts.space = Ok(Space { kind: "tmpfs".into(), size: Some(1 << 30), free: Some(0), inodes: Some(0) });
    let found = findings(&facts);
    assert_eq!(by_id(&found, "dir.space").status, FindingStatus::Warn);
    assert_eq!(by_id(&found, "dir.inodes").status, FindingStatus::Warn);
    facts.space = Err(UnknownFact("statfs: refused".into()));
    assert!(by_id(&findings(&facts), "dir.space").value["unknown"].is_string());
}

#[test]
fn modes_and_mounts() {
    let mut facts = facts();
    for (mode, status) in
        [(0o777, FindingStatus::Warn), (0o3770, FindingStatus::Ok), (0o700, FindingStatus::Note)]
    {
        facts.owner = Ok(DirOwner { mode, uid: 7, gid: 60001 });
        assert_eq!(by_id(&findings(&facts), "dir.path").status, status, "{mode:o}");
    }
    facts.seen.as_mut().unwrap().1 = 1;
    assert_eq!(by_id(&findings(&facts), "dir.mount").status, FindingStatus::Warn);
    facts.seen = parsed("9 1 0:9 / /dev/shm ro - tmpfs tmpfs rw");
    assert!(by_id(&findings(&facts), "dir.mount").means.contains("read-only"));
}

#[test]
fn refusals_name_the_remedy() {
    let mut facts = facts();
    for (why, word) in [
        (Errno::EACCES, "SELinux"),
        (Errno::EROFS, "read-write"),
        (Errno::ENOSPC, "shmesh rm"),
        (Errno::EIO, "SHMESH_DIR"),
    ] {
        facts.scratch.file = Err(why);
        let found = findings(&facts);
        let found = by_id(&found, "dir.writable");
        assert_eq!(found.status, FindingStatus::Fail);
        assert!(found.means.contains(word), "{}", found.means);
    }
    facts.owner = Ok(DirOwner { mode: 0o755, uid: 0, gid: 0 });
    facts.scratch.file = Err(Errno::EACCES);
    assert!(by_id(&findings(&facts), "dir.writable").means.contains("to 3770"));
    facts.owner = Ok(DirOwner { mode: 0o3770, uid: 0, gid: 60001 });
    assert!(by_id(&findings(&facts), "dir.writable").means.contains("join group 60001"));
}
