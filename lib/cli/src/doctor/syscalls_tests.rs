//! Verdicts for outcomes made up, and the trials no sandbox refuses.

use super::*;
use crate::doctor::tests::Tree;

#[test]
fn verdicts() {
    assert_eq!(MEMFD.judge(Ok(())).status, FindingStatus::Ok);
    let refused = MEMFD.judge(Err(Errno::EPERM));
    assert_eq!((refused.status, &refused.value["errno"]), (FindingStatus::Fail, &json!("EPERM")));
    assert_eq!(PEER_PIDFD.judge(Err(Errno::ENOPROTOOPT)).status, FindingStatus::Note);
}

#[test]
fn harmless_system_calls_succeed() {
    assert_eq!(seals(&memfd().unwrap()), Ok(()));
    eventfd().unwrap();
    scm_rights().unwrap();
    ofd_lock(&memfd().unwrap()).unwrap();
}

#[test]
fn pidfd_open_is_tried_or_inferred() {
    let (tree, status) = (Tree::new(), |mode| Ok(format!("Seccomp:\t{mode}\n")));
    assert!(inferred(&tree.source(), &status(0)).value["unknown"].is_string());
    tree.file("proc/sys/kernel/osrelease", "6.8.0-31-generic\n");
    assert_eq!(inferred(&tree.source(), &status(0)).value["inferred"], true);
    assert!(inferred(&tree.source(), &status(2)).value["unknown"].is_string());
    assert!(inferred(&tree.source(), &Err(UnknownFact("x".into()))).value["unknown"].is_string());
    tree.file("proc/sys/kernel/osrelease", "4.18.0\n");
    assert_eq!(inferred(&tree.source(), &status(0)).value["errno"], "ENOSYS");
    let scratch = Scratch { file: Err(Errno::ENOENT), anonymous: Err(Errno::ENOENT) };
    let refuse: PidfdOpen = |_| Err(io::Error::from_raw_os_error(Errno::EPERM as i32));
    let found = findings(&tree.source(), &status(2), &scratch, Some(refuse));
    assert_eq!(found.last().unwrap().value["errno"], "EPERM");
}
