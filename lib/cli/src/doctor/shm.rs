//! The findings about the IPC directory: size, permissions, mount, and the remedies.

use serde_json::json;
use shmesh_sys::errno::Errno;

use super::dir::{DirOwner, Facts, Space};
use super::source::UnknownFact;
use super::{Finding, FindingStatus};
use crate::human;
use shmesh_sys::mountinfo::Mount;

/// The default size of `/dev/shm` in container runtimes.
const DEFAULT: u64 = 64 << 20;
/// Less free space than this causes a warning.
const LITTLE: u64 = 1 << 20;
/// Files of a link: six segments, a socket, and a reserve.
const INODES_PER_LINK: u64 = 8;
/// The remedy for a directory that is too small.
const REMEDY: &str =
    "mount an emptyDir of medium Memory with a sizeLimit at /dev/shm, or request shmesh.io/shm units";

/// All findings; only the first one if there is no directory.
pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let owner = match &facts.owner {
        Ok(owner) => owner,
        Err(why) => {
            let means = format!(
                "Links cannot be made or found without this directory: create it or name another one with \
                 --dir or SHMESH_DIR; in a pod, {REMEDY}."
            );
            let value = json!({ "path": facts.dir.to_string_lossy(), "exists": false, "reason": why.0 });
            return vec![Finding::new("dir.path", FindingStatus::Fail, value, show(facts, &why.0), means)];
        }
    };
    let mut findings = vec![path(facts, owner)];
    match &facts.space {
        Ok(space) => {
            findings.push(kind(space, facts.mount()));
            findings.push(size(space, facts.mount()));
            findings.push(inodes(space));
        }
        Err(why) => findings.push(Finding::unknown(
            "dir.space",
            why,
            "Try a link: it fails at start if it does not fit.",
        )),
    }
    findings.extend(nvipc_links(&facts.nvipc_links));
    findings.push(mount(&facts.seen));
    findings.push(writable(facts, owner));
    findings
}

/// The path with a remark.
fn show(facts: &Facts, remark: &str) -> String {
    format!("{} ({remark})", facts.dir.display())
}

/// The finding about permissions of the directory.
fn path(facts: &Facts, owner: &DirOwner) -> Finding {
    let DirOwner { mode, uid, gid } = *owner;
    let (status, means) = match mode {
        mode if mode & 0o002 != 0 && mode & 0o1000 == 0 => (
            FindingStatus::Warn,
            "Every user may remove segments of other users here: set the sticky bit (chmod +t).".to_owned(),
        ),
        mode if mode & 0o002 != 0 => (
            FindingStatus::Ok,
            "Every user may create links here and cannot remove links of other users.".to_owned(),
        ),
        mode if mode & 0o020 != 0 => {
            (FindingStatus::Ok, format!("Members of group {gid} may make links here, others may not."))
        }
        _ => (
            FindingStatus::Note,
            format!(
                "Only uid {uid} may make links here; a peer needs that uid, or a mode of 3770 with a common \
                 group."
            ),
        ),
    };
    let value = json!({
        "path": facts.dir.to_string_lossy(), "exists": true, "mode": format!("{mode:04o}"),
        "sticky": mode & 0o1000 != 0, "uid": uid, "gid": gid,
    });
    Finding::new("dir.path", status, value, show(facts, &format!("{mode:04o} {uid}:{gid}")), means)
}

/// The finding about the file system.
fn kind(space: &Space, mount: Option<&Mount>) -> Finding {
    let name = match space.kind.as_str() {
        known @ ("tmpfs" | "hugetlbfs") => known,
        magic => mount.map_or(magic, |mount| &mount.kind),
    };
    let (status, means) = match space.kind.as_str() {
        "tmpfs" => (FindingStatus::Ok, "Segments are memory and nothing else.".to_owned()),
        "hugetlbfs" => (
            FindingStatus::Warn,
            "Every segment takes whole huge pages here and sockets cannot be made: use a tmpfs, and \
             huge_pages for single links."
                .to_owned(),
        ),
        _ => (
            FindingStatus::Warn,
            format!(
                "Named segments would be written to a disk in the background, which costs time and wears \
                     it: {REMEDY}, or use `backing: memfd`."
            ),
        ),
    };
    Finding::new("dir.filesystem", status, json!(name), name, means)
}

/// The finding about free space.
fn size(space: &Space, mount: Option<&Mount>) -> Finding {
    let value = json!({ "size_bytes": space.size, "free_bytes": space.free });
    let (Some(size), Some(free)) = (space.size, space.free) else {
        let means = "The directory has no limit of its own: memory is the only bound, so mind memory.cgroup.";
        return Finding::new("dir.space", FindingStatus::Note, value, "no limit", means);
    };
    let shown = format!("{}, {} free", human::bytes(size), human::bytes(free));
    // The runtimes call their default "shm"; one unit of shmesh.io/shm has the same size and is called "tmpfs".
    let by_default = mount.is_none_or(|mount| mount.origin == "shm");
    let (status, means) = if size == DEFAULT && by_default {
        (
            FindingStatus::Warn,
            format!(
                "This is the 64 MiB every container gets by default; larger links fail with ENOSPC: {REMEDY}."
            ),
        )
    } else if free < LITTLE {
        (
            FindingStatus::Warn,
            format!(
                "Hardly anything is free: look for forgotten links (`shmesh ls`, `shmesh rm`), or {REMEDY}."
            ),
        )
    } else {
        (
            FindingStatus::Ok,
            format!("Links of up to {} in total fit here; more is an error at start.", human::bytes(free)),
        )
    };
    Finding::new("dir.space", status, value, shown, means)
}

/// The finding about the number of files.
fn inodes(space: &Space) -> Finding {
    const ID: &str = "dir.inodes";
    match space.inodes {
        None => Finding::new(
            ID,
            FindingStatus::Ok,
            json!({ "free": null }),
            "no limit",
            "Files do not bound the number of links.",
        ),
        Some(free) => {
            let links = free / INODES_PER_LINK;
            let status = if links == 0 { FindingStatus::Warn } else { FindingStatus::Ok };
            let means = format!("Room for about {links} links, at up to {INODES_PER_LINK} files each.");
            Finding::new(ID, status, json!({ "free": free }), format!("{free} free"), means)
        }
    }
}

/// The finding about links in NVIPC's layout, if there are any: while they are in use, their files must stay.
fn nvipc_links(links: &[String]) -> Option<Finding> {
    let means = "NVIPC's own layout, of NVIPC or of libshmesh_nvipc with layout nvipc: leave their files alone while a process \
                 uses them; `shmesh dump` shows what is queued.";
    (!links.is_empty()).then(|| {
        Finding::new("dir.nvipc", FindingStatus::Note, json!(links), links.join(", "), means.to_owned())
    })
}

/// The finding about the mount.
fn mount(seen: &Result<(Mount, usize), UnknownFact>) -> Finding {
    const ID: &str = "dir.mount";
    let (mount, hidden) = match seen {
        Ok((mount, hidden)) => (mount, *hidden),
        Err(why) => {
            return Finding::unknown(ID, why, "Make sure that nothing else is mounted over the directory.");
        }
    };
    let value = json!({
        "point": mount.point.to_string_lossy(), "type": mount.kind, "source": mount.origin,
        "options": mount.options, "super_options": mount.super_options, "hidden_below": hidden,
    });
    let shown =
        format!("{} on {} ({}; {})", mount.origin, mount.point.display(), mount.options, mount.super_options);
    let (status, means) = if hidden > 0 {
        let means = format!(
            "{hidden} other mount(s) at the same place are hidden below this one: peers that see the lower \
             one share no link with you; give a container exactly one of emptyDir, pool or sized shm at this \
             path."
        );
        (FindingStatus::Warn, means)
    } else if mount.has("ro") {
        (FindingStatus::Warn, "Mounted read-only: no link can be made here; mount it rw.".to_owned())
    } else if ["nosuid", "nodev", "noexec"].iter().all(|option| mount.has(option)) {
        (FindingStatus::Ok, "Nothing put here can be run; links need no more.".to_owned())
    } else {
        (
            FindingStatus::Ok,
            "One mount, and it is on top; nosuid,nodev,noexec would be stricter and costs links nothing."
                .to_owned(),
        )
    };
    Finding::new(ID, status, value, shown, means)
}

/// The finding about creating a file.
fn writable(facts: &Facts, owner: &DirOwner) -> Finding {
    const ID: &str = "dir.writable";
    let why = match &facts.scratch.file {
        Ok(_) => return Finding::new(ID, FindingStatus::Ok, json!(true), "yes", "Links can be made here."),
        Err(why) => *why,
    };
    let remedy = match why {
        Errno::EACCES | Errno::EPERM if owner.mode & 0o002 != 0 => {
            "its mode allows it, so look for a security module (SELinux, AppArmor) that refuses".to_owned()
        }
        Errno::EACCES | Errno::EPERM if owner.mode & 0o020 != 0 => format!(
            "join group {} (additionalGids, or fsGroup for an emptyDir) or run as uid {}",
            owner.gid, owner.uid
        ),
        Errno::EACCES | Errno::EPERM => {
            format!("run as uid {}, or loosen mode {:04o} to 3770 with a common group", owner.uid, owner.mode)
        }
        Errno::EROFS => "mount it read-write".to_owned(),
        Errno::ENOSPC | Errno::EDQUOT => {
            "remove forgotten links (`shmesh ls`, `shmesh rm`) or enlarge it".to_owned()
        }
        _ => "name another directory with --dir or SHMESH_DIR".to_owned(),
    };
    let means = format!("No link can be created here; only a link of a broker can be joined: {remedy}.");
    Finding::new(ID, FindingStatus::Fail, json!(false), format!("no ({})", why.desc()), means)
}

#[cfg(test)]
#[path = "shm_tests.rs"]
mod tests;
