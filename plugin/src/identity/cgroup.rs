//! Maps the text of `/proc/PID/cgroup` to a pod and container. Pure: no I/O.
//!
//! The *first* pod on the path from the root counts, because a container can create and name cgroups below
//! its own. In a nested kubelet (kind, or a cluster in a pod) the search starts below the root of the
//! service's own cluster, which [`CgroupRoots`] derives from the service's own cgroups.

/// The container of a process, according to its cgroups.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct ContainerRef {
    /// Pod uid with dashes, or 32 hex digits for a static pod; `None` if the runtime's cgroup layout lacks
    /// it.
    pub(crate) pod_uid: Option<String>,
    /// Container id: 64 hex digits.
    pub(crate) container_id: String,
}

/// Why the cgroups do not identify a container.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NoContainer {
    /// The process is not in a pod.
    NotInPod,
    /// The hierarchies name different containers.
    Ambiguous,
}

/// Path prefix of this cluster's pods per hierarchy.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct CgroupRoots(Vec<(String, Vec<String>)>);

impl CgroupRoots {
    /// Derives the roots from the service's own `/proc/self/cgroup`; outside a pod they are empty.
    pub(crate) fn of_own(text: &str) -> Self {
        let lines = lines(text).filter_map(|(controllers, path)| {
            let parts: Vec<&str> = parts(path).collect();
            let own_pod = parts.iter().rposition(|part| pod_uid(part).is_some())?;
            let above = parts[..own_pod].iter().take_while(|part| !is_kubepods(part));
            // Pods of an outer cluster are above the last `kubepods` that precedes our own pod.
            let last_kubepods = parts[..own_pod].iter().rposition(|part| is_top_kubepods(part));
            let root: Vec<String> = match last_kubepods {
                Some(at) => parts[..at].iter().map(|part| (*part).to_owned()).collect(),
                None => above.map(|part| (*part).to_owned()).collect(),
            };
            Some((controllers.to_owned(), root))
        });
        Self(lines.collect())
    }

    /// Returns the container of the process with this `/proc/PID/cgroup`.
    pub(crate) fn container(&self, text: &str) -> Result<ContainerRef, NoContainer> {
        let mut found: Option<ContainerRef> = None;
        for (controllers, path) in lines(text) {
            let Some(container) = self.container_in(controllers, path) else { continue };
            match &found {
                Some(other) if *other != container => return Err(NoContainer::Ambiguous),
                _ => found = Some(container),
            }
        }
        found.ok_or(NoContainer::NotInPod)
    }

    fn container_in(&self, controllers: &str, path: &str) -> Option<ContainerRef> {
        let parts: Vec<&str> = parts(path).collect();
        let root = self.0.iter().find(|(known, _)| known == controllers).map(|(_, root)| root);
        let below = root.map_or(parts.as_slice(), |root| strip(&parts, root));
        let Some(at) = below.iter().position(|part| pod_uid(part).is_some()) else {
            // CRI-O without a pod slice: `/machine.slice/crio-ID.scope`.
            let id = below.iter().find_map(|part| scope_id(part, &["crio"]))?;
            return Some(ContainerRef { pod_uid: None, container_id: id.to_owned() });
        };
        let uid = pod_uid(below[at])?;
        // `…pod<uid>.slice:cri-containerd:<id>` is one component: containerd and the kubelet use different
        // cgroup drivers.
        let container_id = match below[at].split_once(':') {
            Some((_, rest)) => hex(rest.rsplit(':').next()?, 64)?,
            None => container_id(below.get(at + 1)?)?,
        };
        Some(ContainerRef { pod_uid: Some(uid), container_id: container_id.to_owned() })
    }
}

/// Splits lines of `hierarchy:controllers:path`; the path may contain colons.
fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        // The kernel appends this to the path of a removed cgroup.
        Some((controllers, path.strip_suffix(" (deleted)").unwrap_or(path)))
    })
}

/// Splits a path into components, without the `..` of a private cgroup namespace.
fn parts(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty() && *part != "..")
}

fn strip<'p, 's>(parts: &'p [&'s str], root: &[String]) -> &'p [&'s str] {
    let same = parts.len() >= root.len() && parts.iter().zip(root).all(|(part, root)| part == root);
    if same { &parts[root.len()..] } else { parts }
}

fn is_kubepods(part: &str) -> bool {
    is_top_kubepods(part) || part.starts_with("kubepods-") || matches!(part, "burstable" | "besteffort")
}

/// Matches `kubepods`, `kubepods.slice`, and kind's `kubelet-kubepods.slice`.
fn is_top_kubepods(part: &str) -> bool {
    matches!(part, "kubepods" | "kubepods.slice" | "kubelet-kubepods.slice")
}

/// Extracts the uid from `pod<uid>` or `kubepods-burstable-pod<uid with _>.slice`, optionally followed by
/// `:…`.
fn pod_uid(part: &str) -> Option<String> {
    let name = part.split_once(':').map_or(part, |(name, _)| name);
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1,
        None => name.strip_prefix("pod")?,
    };
    uuid(uid).or_else(|| hex(uid, 32).map(str::to_owned))
}

/// Parses 8-4-4-4-12 hex digits separated by dashes or underscores; returns dashes.
fn uuid(text: &str) -> Option<String> {
    const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
    let groups: Vec<&str> = text.split(['-', '_']).collect();
    let fits = groups.len() == GROUPS.len()
        && groups.iter().zip(GROUPS).all(|(group, len)| hex(group, len).is_some());
    fits.then(|| groups.join("-"))
}

/// Extracts the id from `<id>` or `cri-containerd-<id>.scope` and similar. `crio-conmon-<id>.scope` belongs
/// to the runtime.
fn container_id(part: &str) -> Option<&str> {
    hex(part, 64).or_else(|| scope_id(part, &["cri-containerd", "crio", "docker"])).or_else(|| {
        // crun with CRI-O and cgroupfs omits `.scope`.
        hex(part.strip_prefix("crio-")?, 64)
    })
}

fn scope_id<'p>(part: &'p str, runtimes: &[&str]) -> Option<&'p str> {
    let (runtime, id) = part.strip_suffix(".scope")?.rsplit_once('-')?;
    if runtimes.contains(&runtime) { hex(id, 64) } else { None }
}

/// Returns `text` if it consists of `len` lower-case hex digits.
fn hex(text: &str, len: usize) -> Option<&str> {
    let digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (digits && text.len() == len).then_some(text)
}

#[cfg(test)]
#[path = "tests/cgroup.rs"]
mod tests;
