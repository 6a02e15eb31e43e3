//! The identity of this process: user, groups, capabilities, and the sysctl that protects files of other users.

use serde_json::json;

use super::source::{Source, UnknownFact};
use super::{Finding, FindingStatus};
use shmesh_sys::procfs::field;

/// The capability to lock memory beyond RLIMIT_MEMLOCK.
pub(super) const CAP_IPC_LOCK: u32 = 14;

/// All findings about the identity.
pub(super) fn findings(source: &Source, status: &Result<String, UnknownFact>) -> Vec<Finding> {
    vec![user(status), capabilities(status), protected_regular(source)]
}

/// The effective id in a line `Uid: real effective saved fs`.
fn effective(text: &str, name: &str) -> Option<u32> {
    field(text, name)?.split_whitespace().nth(1)?.parse().ok()
}

/// The group ids in the line `Groups:`.
fn groups(text: &str) -> Vec<u32> {
    let list = field(text, "Groups").unwrap_or_default();
    list.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// The effective capabilities as a bit set.
fn effective_capabilities(text: &str) -> Option<u64> {
    u64::from_str_radix(field(text, "CapEff")?, 16).ok()
}

/// Whether `/proc/self/status` shows a capability as effective.
pub(super) fn has_capability(text: &str, number: u32) -> bool {
    effective_capabilities(text).is_some_and(|set| set >> number & 1 == 1)
}

/// User and groups of the process.
fn user(status: &Result<String, UnknownFact>) -> Finding {
    const ID: &str = "identity.user";
    let facts = status.as_ref().map_err(UnknownFact::clone).and_then(|text| {
        let ids = effective(text, "Uid").zip(effective(text, "Gid"));
        ids.map(|(uid, gid)| (uid, gid, groups(text)))
            .ok_or_else(|| UnknownFact("/proc/self/status has no Uid or Gid".into()))
    });
    let (uid, gid, groups) = match facts {
        Ok(facts) => facts,
        Err(why) => return Finding::unknown(ID, &why, "Segments belong to the user that creates them."),
    };
    let list = match groups.as_slice() {
        [] => "no other groups".to_owned(),
        some => format!("groups {}", some.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
    };
    let (status, means) = match uid {
        0 => (
            FindingStatus::Note,
            "Root is not needed, and its segments (mode 0600) are closed to other uids unless they are given \
             a group: run makers and peers as ordinary users.",
        ),
        _ => (
            FindingStatus::Ok,
            "Named segments belong to this uid; a peer with another one needs the directory's group and mode \
             0660, or a broker that passes descriptors.",
        ),
    };
    let value = json!({ "uid": uid, "gid": gid, "groups": groups });
    Finding::new(ID, status, value, format!("uid {uid}, gid {gid}, {list}"), means)
}

/// Effective capabilities of the process.
fn capabilities(status: &Result<String, UnknownFact>) -> Finding {
    const ID: &str = "identity.capabilities";
    let set = status.as_ref().map_err(UnknownFact::clone).and_then(|text| {
        effective_capabilities(text).ok_or_else(|| UnknownFact("/proc/self/status has no CapEff".into()))
    });
    match set {
        Ok(set) => {
            let means = match set {
                0 => "None, and links need none.",
                _ => "Links need none of them: drop ALL.",
            };
            let value = json!({ "effective": format!("{set:016x}"), "count": set.count_ones() });
            let shown = format!("{} effective ({set:#x}), not needed", set.count_ones());
            Finding::new(ID, FindingStatus::Ok, value, shown, means)
        }
        Err(why) => Finding::unknown(ID, &why, "Links need none."),
    }
}

/// The finding about `O_CREAT` on a file of another user in a sticky directory.
fn protected_regular(source: &Source) -> Finding {
    const ID: &str = "kernel.protected_regular";
    match source.number("/proc/sys/fs/protected_regular") {
        Ok(level) => {
            let means = match level {
                0 => "Segments of other uids may be opened even with O_CREAT.",
                _ => {
                    "In a sticky directory a segment of another uid must be opened without O_CREAT; a \
                     program that says shm_open(O_CREAT) to join gets EACCES."
                }
            };
            Finding::new(ID, FindingStatus::Ok, json!(level), level.to_string(), means)
        }
        Err(why) => Finding::unknown(ID, &why, "Join segments of other uids without O_CREAT."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Tree;

    const POD: &str = "\
Name:\tapp
Uid:\t10001\t10002\t10001\t10001
Gid:\t10001\t10003\t10001\t10001
Groups:\t60001 70001 
CapEff:\t0000000000004001
";

    #[test]
    fn pod_shows_its_user_and_capabilities() {
        let found = user(&Ok(POD.into()));
        assert_eq!(
            (found.status, found.shown.as_str()),
            (FindingStatus::Ok, "uid 10002, gid 10003, groups 60001,70001")
        );
        let found = capabilities(&Ok(POD.into()));
        assert_eq!(found.value, json!({ "effective": "0000000000004001", "count": 2 }));
        assert!(has_capability(POD, CAP_IPC_LOCK) && !has_capability(POD, 1));
        assert!(!has_capability("CapEff:\tzz\n", 1));
    }

    #[test]
    fn root_without_groups() {
        let found = user(&Ok("Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t \n".into()));
        assert_eq!(
            (found.status, found.shown.as_str()),
            (FindingStatus::Note, "uid 0, gid 0, no other groups")
        );
    }

    #[test]
    fn unknown_state_is_reported() {
        let none = Err(UnknownFact("no /proc".into()));
        for found in findings(&Tree::new().source(), &none) {
            assert!(found.value["unknown"].is_string(), "{found:?}");
        }
        assert!(user(&Ok("Uid:\t0\n".into())).value["unknown"].is_string());
    }

    #[test]
    fn sysctl() {
        let tree = Tree::new();
        tree.file("proc/sys/fs/protected_regular", "2\n");
        assert!(protected_regular(&tree.source()).means.contains("EACCES"));
    }
}
