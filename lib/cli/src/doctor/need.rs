//! `--need-bytes`: whether links of this total size fit.

use serde_json::json;

use super::{Finding, FindingStatus};
use crate::human;

/// Needed and available memory; `None` is unlimited or unknown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    /// Total bytes of all links.
    pub(super) need: u64,
    /// Free bytes in the IPC directory.
    pub(super) free: Option<u64>,
    /// Remaining bytes in the memory cgroup.
    pub(super) room: Option<u64>,
    /// Available bytes of the node.
    pub(super) available: Option<u64>,
}

/// The finding that answers the question.
pub(super) fn finding(capacity: &Capacity) -> Finding {
    let Capacity { need, free, room, available } = *capacity;
    let short = |have: Option<u64>| have.filter(|have| *have < need);
    let mut reasons = Vec::new();
    if let Some(have) = short(room) {
        reasons.push(format!(
            "the memory cgroup has room for {} only, so creating them causes an OOM kill and not an error: raise \
             the memory limit by {}",
            human::bytes(have),
            human::bytes(need - have)
        ));
    }
    if let Some(have) = short(available) {
        reasons.push(format!(
            "the node has only {} available: use a larger node or smaller links",
            human::bytes(have)
        ));
    }
    if let Some(have) = short(free) {
        reasons.push(format!(
            "the IPC directory has {} free: enlarge it (sizeLimit of the emptyDir, or more units of \
             shmesh.io/shm) or use `backing: memfd`, which does not count there",
            human::bytes(have)
        ));
    }
    let value = json!({
        "need_bytes": need, "fits": reasons.is_empty(),
        "dir_free_bytes": free, "cgroup_room_bytes": room, "node_available_bytes": available,
    });
    let shown = format!("{} needed", human::bytes(need));
    if reasons.is_empty() {
        let means = "Links of this size fit now, if this container makes them; in a pod the sidecar makes \
                     and pays for them, so ask there.";
        Finding::new("links.need", FindingStatus::Ok, value, format!("{shown}, fits"), means)
    } else {
        let means = format!("Links of this size do not fit: {}.", reasons.join("; "));
        Finding::new("links.need", FindingStatus::Fail, value, format!("{shown}, does not fit"), means)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(need: u64, free: Option<u64>, room: Option<u64>, available: Option<u64>) -> Finding {
        finding(&Capacity { need, free, room, available })
    }

    #[test]
    fn exactly_fits() {
        assert_eq!(ask(10, Some(10), Some(10), Some(10)).status, FindingStatus::Ok);
        assert_eq!(ask(u64::MAX, None, None, None).status, FindingStatus::Ok);
        assert_eq!(ask(0, Some(0), Some(0), Some(0)).status, FindingStatus::Ok);
    }

    #[test]
    fn each_shortage_is_reported() {
        let found = ask(11, Some(10), Some(10), Some(10));
        assert_eq!((found.status, &found.value["fits"]), (FindingStatus::Fail, &json!(false)));
        for word in ["OOM kill", "node has only", "backing: memfd"] {
            assert!(found.means.contains(word), "{word}");
        }
        assert!(!ask(11, None, Some(10), None).means.contains("memfd"));
        assert_eq!(ask(11, Some(10), None, None).status, FindingStatus::Fail);
    }
}
