//! Resource limits of the process: locked memory and open files.

use serde_json::json;

use super::identity::{self, CAP_IPC_LOCK};
use super::source::{Source, UnknownFact};
use super::{Finding, FindingStatus, isolation};
use crate::human;

/// Descriptors of a participant per link: six segments, the lock file, its bell and the sidecar's connection, and a
/// reserve for the bells of others, or for a link without names.
const FDS_PER_LINK: u64 = 16;
/// Fewer open files than this cause a warning.
const FEW_FILES: u64 = 256;

/// A soft and a hard limit; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OpenLimit {
    /// The limit in force.
    soft: Option<u64>,
    /// The maximum to which the process may raise it.
    hard: Option<u64>,
}

/// A line of `/proc/self/limits` that starts with `name`.
fn parse(text: &str, name: &str) -> Option<OpenLimit> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut one = || match words.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some(OpenLimit { soft: one()?, hard: one()? })
}

/// The findings about both limits.
pub(super) fn findings(source: &Source, status: &Result<String, UnknownFact>) -> Vec<Finding> {
    let text = source.text("/proc/self/limits");
    let limit = |name: &str| {
        let text = text.as_ref().map_err(UnknownFact::clone)?;
        parse(text, name).ok_or_else(|| UnknownFact(format!("/proc/self/limits has no {name:?}")))
    };
    // The kernel requires the capability in the initial user namespace; root of another one does not have it.
    let may_lock = isolation::in_initial_user_namespace(source)
        && status.as_ref().is_ok_and(|status| identity::has_capability(status, CAP_IPC_LOCK));
    vec![memlock(limit("Max locked memory"), may_lock), nofile(limit("Max open files"))]
}

/// The finding about locked memory, which links do not need, but pinning for a device does.
fn memlock(limit: Result<OpenLimit, UnknownFact>, may_lock: bool) -> Finding {
    const ID: &str = "limits.memlock";
    let limit = match limit {
        Ok(limit) => limit,
        Err(why) => {
            return Finding::unknown(
                ID,
                &why,
                "Links need no locked memory; pinning pools for a device does.",
            );
        }
    };
    let value = json!({ "soft_bytes": limit.soft, "hard_bytes": limit.hard, "cap_ipc_lock": may_lock });
    match limit.soft {
        Some(soft) if !may_lock => {
            let means = format!(
                "Links need no locked memory, but mlock and cudaHostRegister of pools larger than {} are \
                 refused: raise RLIMIT_MEMLOCK in the container runtime (or systemd's LimitMEMLOCK) to pin \
                 them.",
                human::bytes(soft)
            );
            Finding::new(ID, FindingStatus::Note, value, human::bytes(soft), means)
        }
        soft => {
            let shown = soft
                .map_or("unlimited".into(), |soft| format!("{}, lifted by CAP_IPC_LOCK", human::bytes(soft)));
            Finding::new(
                ID,
                FindingStatus::Ok,
                value,
                shown,
                "Pools of any size can be locked or pinned for a device.",
            )
        }
    }
}

/// The finding about open files, which limit the number of links.
fn nofile(limit: Result<OpenLimit, UnknownFact>) -> Finding {
    const ID: &str = "limits.nofile";
    let limit = match limit {
        Ok(limit) => limit,
        Err(why) => {
            return Finding::unknown(
                ID,
                &why,
                "Each link takes up to about 16 descriptors in each participant.",
            );
        }
    };
    let value = json!({ "soft": limit.soft, "hard": limit.hard });
    let Some(soft) = limit.soft else {
        return Finding::new(
            ID,
            FindingStatus::Ok,
            value,
            "unlimited",
            "Descriptors do not bound the number of links.",
        );
    };
    let links = soft / FDS_PER_LINK;
    let status = if soft < FEW_FILES { FindingStatus::Warn } else { FindingStatus::Ok };
    let mut means = format!(
        "Room for about {links} links in one process, at {FDS_PER_LINK} descriptors each; beyond the limit, \
         creating and attaching fail."
    );
    if limit.hard != limit.soft {
        let hard = limit.hard.map_or("without bound".into(), |hard| format!("to {hard}"));
        means.push_str(&format!(" The process may raise it {hard} by itself (ulimit -n)."));
    }
    Finding::new(ID, status, value, format!("{soft} open files"), means)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Tree;

    const TEXT: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max open files            1024                 524288               files     
Max locked memory         8388608              unlimited            bytes     
";

    #[test]
    fn parses() {
        let open = OpenLimit { soft: Some(1024), hard: Some(524_288) };
        assert_eq!(parse(TEXT, "Max open files"), Some(open));
        assert_eq!(parse(TEXT, "Max locked memory"), Some(OpenLimit { soft: Some(8 << 20), hard: None }));
        assert_eq!(parse(TEXT, "Max cpu time"), Some(OpenLimit { soft: None, hard: None }));
        assert_eq!(parse(TEXT, "Max nothing"), None);
        assert_eq!(parse("Max open files many", "Max open files"), None);
    }

    #[test]
    fn meanings() {
        let tree = Tree::new();
        tree.file("proc/self/limits", TEXT);
        let found = findings(&tree.source(), &Ok("CapEff:\t0000000000000000\n".into()));
        assert_eq!((found[0].status, found[0].shown.as_str()), (FindingStatus::Note, "8 MiB"));
        assert!(found[1].means.starts_with("Room for about 64 links"));
        assert!(found[1].means.contains("raise it to 524288"));
        let capable = Ok("CapEff:\t0000000000004000\n".into());
        assert_eq!(
            findings(&tree.source(), &capable)[0].status,
            FindingStatus::Note,
            "root of a user namespace"
        );
        tree.link("proc/self/ns/user", "user:[4026531837]");
        assert_eq!(findings(&tree.source(), &capable)[0].status, FindingStatus::Ok);
        let few = nofile(Ok(OpenLimit { soft: Some(100), hard: Some(100) }));
        assert_eq!(few.status, FindingStatus::Warn);
    }

    #[test]
    fn missing() {
        let found = findings(&Tree::new().source(), &Err(UnknownFact("x".into())));
        assert!(
            found.iter().all(|one| one.status == FindingStatus::Note && one.value["unknown"].is_string())
        );
    }
}
