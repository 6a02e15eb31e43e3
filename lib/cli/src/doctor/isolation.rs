//! Isolation of this process from others: seccomp, no_new_privs and the namespaces.

use serde_json::json;

use super::source::{Source, UnknownFact};
use super::{Finding, FindingStatus};
use shmesh_sys::procfs::field;

/// The socket of the node's identity service, if the container may use it.
const AGENT: &str = "/run/shmesh/agent/agent.sock";

/// Inodes of the initial namespaces, fixed by the kernel since 3.8 (`include/linux/proc_ns.h`).
const INITIAL_IPC: u64 = 4_026_531_839;
const INITIAL_USER: u64 = 4_026_531_837;
const INITIAL_PID: u64 = 4_026_531_836;
const INITIAL_CGROUP: u64 = 4_026_531_835;

/// All findings about isolation.
pub(super) fn findings(source: &Source, status: &Result<String, UnknownFact>) -> Vec<Finding> {
    vec![
        seccomp(status),
        no_new_privs(status),
        pid_namespace(source),
        user_namespace(source),
        ipc_namespace(source),
        cgroup_namespace(source),
    ]
}

/// A numeric field of `/proc/self/status`.
fn number(status: &Result<String, UnknownFact>, name: &str) -> Result<u64, UnknownFact> {
    let text = status.as_ref().map_err(UnknownFact::clone)?;
    let found = field(text, name).and_then(|value| value.parse().ok());
    found.ok_or_else(|| UnknownFact(format!("/proc/self/status has no number {name}")))
}

/// The finding about filtered system calls.
fn seccomp(status: &Result<String, UnknownFact>) -> Finding {
    const ID: &str = "isolation.seccomp";
    let mode = match number(status, "Seccomp") {
        Ok(mode) => mode,
        Err(why) => return Finding::unknown(ID, &why, "The system calls tried below tell what is allowed."),
    };
    let (word, status, means) = match mode {
        0 => (
            "off",
            FindingStatus::Ok,
            "No system call is filtered; links work under RuntimeDefault too, so set that in pods.",
        ),
        1 => (
            "strict",
            FindingStatus::Warn,
            "Only read, write and exit are allowed; links cannot be made by such a process.",
        ),
        _ => (
            "filter",
            FindingStatus::Ok,
            "System calls are filtered; those that links need are tried below, and RuntimeDefault allows \
             them all.",
        ),
    };
    Finding::new(ID, status, json!({ "mode": mode, "name": word }), word, means)
}

/// The finding about no_new_privs.
fn no_new_privs(status: &Result<String, UnknownFact>) -> Finding {
    const ID: &str = "isolation.no_new_privs";
    match number(status, "NoNewPrivs") {
        Ok(set) => Finding::new(
            ID,
            FindingStatus::Ok,
            json!(set == 1),
            if set == 1 { "set" } else { "not set" },
            "Links need no privileges and work either way (allowPrivilegeEscalation: false is fine).",
        ),
        Err(why) => Finding::unknown(ID, &why, "Links work either way."),
    }
}

/// The inode in a text such as `pid:[4026531836]`.
fn inode(link: &str) -> Option<u64> {
    link.split_once(":[")?.1.strip_suffix(']')?.parse().ok()
}

/// The inode of one of this process's namespaces.
fn namespace(source: &Source, name: &str) -> Result<u64, UnknownFact> {
    let link = source.link(&format!("/proc/self/ns/{name}"))?;
    inode(&link).ok_or_else(|| UnknownFact(format!("{link:?} is not a namespace")))
}

/// Whether this process is in the initial user namespace, in which alone its capabilities apply to the whole kernel.
pub(super) fn in_initial_user_namespace(source: &Source) -> bool {
    namespace(source, "user") == Ok(INITIAL_USER)
}

/// A namespace as text.
fn shown(inode: u64, initial: bool) -> String {
    format!("{} ({inode})", if initial { "initial" } else { "own" })
}

/// The finding about process ids of other containers.
fn pid_namespace(source: &Source) -> Finding {
    const ID: &str = "ns.pid";
    let inode = match namespace(source, "pid") {
        Ok(inode) => inode,
        Err(why) => {
            return Finding::unknown(ID, &why, "Do not rely on PIDs; links follow pidfds and sockets.");
        }
    };
    let (initial, agent) = (inode == INITIAL_PID, source.exists(AGENT));
    let value = json!({
        "inode": inode, "initial": initial, "identity_service": agent, "can_judge_pids": initial || agent,
    });
    let (status, means) = if initial {
        (
            FindingStatus::Ok,
            "PIDs of every container on this machine can be judged here: a broker resolves its peers alone."
                .to_owned(),
        )
    } else if agent {
        (
            FindingStatus::Ok,
            format!(
                "A process of another container is pid 0 here, but the identity service at {AGENT} names it \
                 for the broker."
            ),
        )
    } else {
        let means = format!(
            "PIDs of other containers cannot be judged here (a sibling is pid 0): links and deaths are not \
             concerned, but device keys cannot be granted to a PID; request a shmesh.io pool so that the \
             plugin mounts {AGENT}."
        );
        (FindingStatus::Note, means)
    };
    Finding::new(ID, status, value, shown(inode, initial), means)
}

/// Whether `/proc/self/uid_map` is the identity over all uids.
fn maps_everything(text: &str) -> bool {
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.next().is_some_and(|first| first == ["0", "0", "4294967295"]) && lines.next().is_none()
}

/// The finding about uids of other containers.
fn user_namespace(source: &Source) -> Finding {
    const ID: &str = "ns.user";
    let facts = namespace(source, "user").and_then(|inode| Ok((inode, source.text("/proc/self/uid_map")?)));
    let (inode, map) = match facts {
        Ok(facts) => facts,
        Err(why) => return Finding::unknown(ID, &why, "Do not take a peer's uid for its identity."),
    };
    let (initial, identity) = (inode == INITIAL_USER, maps_everything(&map));
    let map: Vec<_> = map.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let value = json!({ "inode": inode, "initial": initial, "uid_map": map, "maps_all_uids": identity });
    let (status, means) = if identity {
        (FindingStatus::Ok, "Uids are the host's: file modes and peers' uids mean what they say.")
    } else {
        (
            FindingStatus::Note,
            "Uids of other pods look like 65534 here, so a group cannot protect a shared directory unless \
             its mount is idmapped, as Allocate mounts are; identity comes from the plugin's service, never \
             from the uid.",
        )
    };
    Finding::new(ID, status, value, shown(inode, initial), means)
}

/// The finding about the IPC namespace. Links use no System V IPC.
fn ipc_namespace(source: &Source) -> Finding {
    const ID: &str = "ns.ipc";
    let means = "Links do not depend on it: they use files and descriptors, no System V memory, so hostIPC \
                 is not needed.";
    match namespace(source, "ipc") {
        Ok(inode) => {
            let initial = inode == INITIAL_IPC;
            let value = json!({ "inode": inode, "initial": initial });
            Finding::new(ID, FindingStatus::Ok, value, shown(inode, initial), means)
        }
        Err(why) => Finding::unknown(ID, &why, means),
    }
}

/// The finding about the visibility of limits above this container.
fn cgroup_namespace(source: &Source) -> Finding {
    const ID: &str = "ns.cgroup";
    match namespace(source, "cgroup") {
        Ok(inode) => {
            let initial = inode == INITIAL_CGROUP;
            let means = match initial {
                true => "Cgroup paths are the host's; which limits are visible depends on what is mounted.",
                false => {
                    "Limits above this container (the pod's) are invisible here; memory.cgroup may promise \
                     too much."
                }
            };
            let value = json!({ "inode": inode, "initial": initial });
            Finding::new(ID, FindingStatus::Ok, value, shown(inode, initial), means)
        }
        Err(why) => Finding::unknown(ID, &why, "Limits above this container may be invisible."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tests::Tree;

    #[test]
    fn namespace_links_are_parsed() {
        assert_eq!(inode("pid:[4026531836]"), Some(INITIAL_PID));
        assert_eq!(inode("pid:[]"), None);
        assert_eq!(inode("pid"), None);
    }

    #[test]
    fn pid_namespaces_are_compared() {
        let tree = Tree::new();
        assert!(pid_namespace(&tree.source()).value["unknown"].is_string());
        tree.link("proc/self/ns/pid", "pid:[4026533001]");
        let found = pid_namespace(&tree.source());
        assert_eq!((found.status, &found.value["can_judge_pids"]), (FindingStatus::Note, &json!(false)));
        tree.file("run/shmesh/agent/agent.sock", "");
        assert_eq!(pid_namespace(&tree.source()).status, FindingStatus::Ok);
        let tree = Tree::new();
        tree.link("proc/self/ns/pid", "pid:[4026531836]");
        assert_eq!(pid_namespace(&tree.source()).shown, "initial (4026531836)");
    }

    #[test]
    fn users() {
        assert!(maps_everything("         0          0 4294967295\n"));
        assert!(!maps_everything("0 2500591616 65536\n"));
        assert!(!maps_everything("0 1000 1\n1 100000 65536\n"));
        assert!(!maps_everything(""));
        let tree = Tree::new();
        tree.link("proc/self/ns/user", "user:[4026533002]").file("proc/self/uid_map", "0 2500591616 65536\n");
        let found = user_namespace(&tree.source());
        assert_eq!(
            (found.status, &found.value["uid_map"][0]),
            (FindingStatus::Note, &json!("0 2500591616 65536"))
        );
    }

    #[test]
    fn filters_and_privileges() {
        let status = Ok("Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n".to_owned());
        assert_eq!(seccomp(&status).shown, "filter");
        assert_eq!(no_new_privs(&status).value, json!(true));
        assert_eq!(seccomp(&Ok("Seccomp:\t1\n".into())).status, FindingStatus::Warn);
        assert!(seccomp(&Ok(String::new())).value["unknown"].is_string());
        assert!(no_new_privs(&Err(UnknownFact("gone".into()))).value["unknown"].is_string());
    }

    #[test]
    fn other_namespaces() {
        let tree = Tree::new();
        tree.link("proc/self/ns/ipc", "ipc:[1]").link("proc/self/ns/cgroup", "cgroup:[4026531835]");
        assert_eq!(ipc_namespace(&tree.source()).shown, "own (1)");
        assert_eq!(cgroup_namespace(&tree.source()).value["initial"], true);
        assert_eq!(findings(&tree.source(), &Err(UnknownFact("x".into()))).len(), 6);
    }
}
