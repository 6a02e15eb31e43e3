//! Plans the links of a pod: containers, directory and size.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use shmesh::Side;
use shmesh::config::{
    Backing, Far, HugePages, PodLink, PoolId, Position, Receivers, RingMode, Scope, pod_links,
};

use crate::config::Config;
use crate::edit::escaped;
use crate::pod::{self, Container, SHM_DIR};
use crate::pod_claims::{self, PodClaims};
use crate::quantity::bytes_of;
use crate::refusal::Refusal;
use shmesh_sys::quantity::Bytes;

/// A link and the containers on it.
#[derive(Debug)]
pub(crate) struct PlannedLink {
    pub(crate) link: PodLink,
    pub(crate) participants: BTreeSet<String>,
}

/// The links that a pod requests.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) pod: &'a Value,
    pub(crate) config: &'a Config,
    pub(crate) namespace: &'a str,
    /// Key of the annotation with the links.
    pub(crate) annotation: String,
    pub(crate) links: Vec<PlannedLink>,
    /// Scope of each container that is on a link.
    pub(crate) directories: BTreeMap<String, Scope>,
    /// The claims of these scopes.
    pub(crate) claims: PodClaims,
    /// Scope of the links that the sidecar keeps; `None` means that there is no sidecar.
    pub(crate) kept: Option<Scope>,
    pub(crate) memory: MemoryPlan,
    /// The bridge for links to other nodes.
    pub(crate) bridge: Option<BridgePlan>,
}

/// A bridge for links to other nodes: all of one side, and in one IPC directory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct BridgePlan {
    pub(crate) scope: Scope,
    pub(crate) side: Side,
    /// Bytes of the replicas, which the bridge of the secondary's pod makes: files, whatever has the memory of the links.
    pub(crate) replicas: u64,
    /// Bytes of the frames that the bridge holds at most, and of the buffers for the next ones.
    pub(crate) held: u64,
}

impl BridgePlan {
    /// Returns the bytes charged to the bridge's cgroup as soon as it has made the replicas: pages and page tables.
    pub(crate) fn charged(&self) -> u64 {
        self.replicas.saturating_add(tables(self.replicas))
    }
}

/// Messages of one direction that a bridge holds for one far node at most: `WINDOW_MAX` of its `session.rs`.
const BRIDGE_WINDOW: u64 = 256;
/// Bytes from which on it takes no further one: `MAX_BYTES` of its `stream.rs`.
const BRIDGE_WINDOW_BYTES: u64 = 32 << 20;
/// Bytes of one message besides its parts: `ITEM_HEAD_BYTES` of its `frame.rs` and `FRAME_OVERHEAD` of its `stream.rs`.
const BRIDGE_MESSAGE_BYTES: u64 = 53 + 64;
/// Bytes of one far node besides messages: `STATUSES_BYTES` of its `session.rs` and `SPARE_BYTES` of its `stream.rs`.
const BRIDGE_NODE_BYTES: u64 = (32 << 10) + (2 << 20);

/// Returns the bytes of a link's frames that the bridge holds at most, in both directions, with so many far nodes at the primary. The
/// bridge's `set_limits` in `session.rs` has the same sum for what it receives, wherever it waits.
fn held_bytes(link: &PodLink, nodes: u32) -> u64 {
    let config = &link.config;
    let size = |pool: PoolId| u64::from(config.pool(pool).buf_size_bytes);
    let data = PoolId::ALL.into_iter().filter(|pool| *pool != PoolId::CpuMsg).map(size).max();
    let largest = size(PoolId::CpuMsg).saturating_add(data.unwrap_or(0)).saturating_add(BRIDGE_MESSAGE_BYTES);
    let messages = u64::from(config.ring_len.next_power_of_two()).min(BRIDGE_WINDOW);
    let is_single = config.ring_mode == RingMode::Spsc || config.receivers == Receivers::One;
    let nodes = if link.side == Side::Secondary || is_single { 1 } else { u64::from(nodes) };
    let of_node = messages.saturating_mul(largest).min(BRIDGE_WINDOW_BYTES.saturating_add(largest));
    of_node.saturating_mul(2).saturating_add(BRIDGE_NODE_BYTES).saturating_mul(nodes)
}

/// Memory that a sidecar reserves.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct MemoryPlan {
    /// Bytes of files in the IPC directory; for the pod's own directory, its size.
    pub(crate) directory: u64,
    /// Bytes of memfds with base pages.
    pub(crate) memfds: u64,
    /// Bytes of memfds with reserved huge pages, which are a separate resource.
    pub(crate) huge: u64,
}

/// Minimum size of a directory, because 0 means unlimited.
const LEAST_DIRECTORY: u64 = 1 << 20;

impl MemoryPlan {
    /// Returns the bytes charged to the sidecar's cgroup: pages and page tables.
    pub(crate) fn charged(&self) -> u64 {
        let pages = self.directory.saturating_add(self.memfds);
        pages.saturating_add(tables(pages))
    }

    /// Adds the memory of a link.
    fn add(&mut self, link: &PodLink) {
        let bytes = link.config.segment_bytes();
        let part = match (link.config.backing, link.config.huge_pages) {
            (Backing::Named, _) => &mut self.directory,
            (Backing::Memfd, HugePages::Hugetlb) => &mut self.huge,
            (Backing::Memfd, _) => &mut self.memfds,
        };
        *part = part.saturating_add(bytes);
    }

    pub(crate) fn all(&self) -> u64 {
        self.directory.saturating_add(self.memfds).saturating_add(self.huge)
    }
}

/// Returns the size of page tables: 8 bytes per 4 KiB page, in whole pages.
pub(crate) fn tables(bytes: u64) -> u64 {
    (bytes / 512).next_multiple_of(4096)
}

impl<'a> Plan<'a> {
    /// Reads the annotations. Returns `None` if the pod requests no links.
    pub(crate) fn of(
        pod: &'a Value,
        namespace: &'a str,
        config: &'a Config,
    ) -> Result<Option<Self>, Refusal> {
        let annotation = config.annotation("links");
        let text = match read(pod, &annotation)? {
            None => return Ok(None),
            Some(text) => text,
        };
        let links = pod_links(text).map_err(|error| Refusal::of_text(&annotation, &error))?;
        let mut plan = Self::of_links(pod, namespace, config, links)?;
        plan.size()?;
        Ok(Some(plan))
    }

    /// Plans links, whatever the annotation for their size.
    pub(crate) fn of_links(
        pod: &'a Value,
        namespace: &'a str,
        config: &'a Config,
        links: Vec<PodLink>,
    ) -> Result<Self, Refusal> {
        let annotation = config.annotation("links");
        let claims = links.iter().filter_map(|link| match &link.scope {
            Scope::Claim(claim) => Some(claim.clone()),
            Scope::Pod | Scope::Pool(_) => None,
        });
        let claims = PodClaims::new(claims);
        let chosen = chosen(pod, config, |container| !container.is_init)?;
        let mut plan = Self {
            pod,
            config,
            namespace,
            annotation,
            links: Vec::with_capacity(links.len()),
            directories: BTreeMap::new(),
            claims,
            kept: None,
            memory: MemoryPlan::default(),
            bridge: None,
        };
        for link in links {
            plan.add(link, &chosen)?;
        }
        Ok(plan)
    }

    /// Returns the memory limit of the sidecar, in whole MiB; `None` if Kubernetes cannot count so many bytes.
    pub(crate) fn sidecar_memory(&self) -> Option<u64> {
        let needed = self.memory.charged().saturating_add(self.config.sidecar.memory.0);
        needed.checked_next_multiple_of(1 << 20).filter(|bytes| i64::try_from(*bytes).is_ok())
    }

    fn add(&mut self, link: PodLink, chosen: &BTreeSet<String>) -> Result<(), Refusal> {
        let name = &link.config.name;
        let participants = match &link.containers {
            None => chosen.clone(),
            Some(names) => {
                for name in names {
                    known(self.pod, name).map_err(|(what, remedy)| {
                        Refusal::new(&self.annotation, link.places.containers, "containers", what, remedy)
                    })?;
                }
                names.iter().cloned().collect()
            }
        };
        if let Scope::Pool(pool) = &link.scope
            && self.config.pool(pool).is_none()
        {
            let remedy = pool_names(self.config, "use scope pod");
            let what = format!("link {name}: there is no pool {pool:?}");
            return Err(self.refuse(link.places.scope, "pool", what, remedy));
        }
        if let Scope::Claim(claim) = &link.scope {
            self.claims.add(self.pod, claim).map_err(|(what, remedy)| {
                self.refuse(link.places.scope, "claim", format!("link {name}: {what}"), remedy)
            })?;
        }
        for container in &participants {
            let scope = self.directories.entry(container.clone()).or_insert_with(|| link.scope.clone());
            if *scope != link.scope {
                let what = format!(
                    "link {name} is in scope {}, and container {container} is on a link in scope {scope}: two things at \
                     one IPC directory",
                    link.scope
                );
                let remedy = "give links of one container one scope, or name other `containers`";
                return Err(self.refuse(link.places.scope, "scope", what, remedy));
            }
        }
        if link.is_kept_here() {
            match &self.kept {
                Some(scope) if *scope != link.scope => {
                    let what = format!(
                        "link {name} is in scope {}, and the sidecar keeps links in scope {scope}: it has one IPC directory",
                        link.scope
                    );
                    let remedy = "give the links that this pod keeps one scope, or split the pod";
                    return Err(self.refuse(link.places.scope, "scope", what, remedy));
                }
                _ => self.kept = Some(link.scope.clone()),
            }
            self.memory.add(&link);
        }
        if link.far != Far::Never {
            self.add_far(&link)?;
        }
        self.links.push(PlannedLink { link, participants });
        Ok(())
    }

    fn add_far(&mut self, link: &PodLink) -> Result<(), Refusal> {
        let (name, namespace) = (&link.config.name, self.namespace);
        if !self.config.bridge.has(namespace, name.as_str()) {
            let what = format!(
                "link {name}: far {} needs a Service and certificates in namespace {namespace:?}, which the chart does not make for it",
                link.far
            );
            let remedy =
                "have the operator add the link to the chart's bridge.namespaces, or remove far".to_owned();
            return Err(self.refuse(link.places.far, "far", what, remedy));
        }
        let (scope, side) = (link.scope.clone(), link.side);
        let bridge = self.bridge.get_or_insert(BridgePlan { scope, side, replicas: 0, held: 0 });
        if link.side == Side::Secondary {
            bridge.replicas = bridge.replicas.saturating_add(link.config.segment_bytes());
        }
        bridge.held = bridge.held.saturating_add(held_bytes(link, self.config.bridge.peers));
        let what = match &*bridge {
            bridge if bridge.scope != link.scope => format!(
                "link {name} is in scope {}, and the bridge has links in scope {}: it has one IPC directory",
                link.scope, bridge.scope
            ),
            bridge if bridge.side != link.side => {
                format!(
                    "link {name}: the pod is primary of one link with far, and secondary of another: its bridge has one side"
                )
            }
            _ => return Ok(()),
        };
        Err(self.refuse(link.places.far, "far", what, "split the pod, or remove far from one of the links"))
    }

    /// Returns the links to other nodes.
    pub(crate) fn far(&self) -> impl Iterator<Item = &PodLink> {
        self.links.iter().map(|planned| &planned.link).filter(|link| link.far != Far::Never)
    }

    /// Returns the memory limit of the bridge, in whole MiB; `None` if Kubernetes cannot count so many bytes. It is the sum of
    /// `bridge.memory`, the replicas with their page tables, and the messages that the bridge holds.
    pub(crate) fn bridge_memory(&self) -> Option<u64> {
        let Some(bridge) = &self.bridge else { return Some(0) };
        let needed = bridge.charged().saturating_add(bridge.held).saturating_add(self.config.bridge.memory.0);
        needed.checked_next_multiple_of(1 << 20).filter(|bytes| i64::try_from(*bytes).is_ok())
    }

    /// Returns the position of the first link to another node.
    pub(crate) fn far_place(&self) -> Position {
        self.far().next().map_or_else(Position::default, |link| link.places.far)
    }

    /// Determines the size of the pod's own directory from the links or the annotation.
    pub(crate) fn size(&mut self) -> Result<(), Refusal> {
        let key = self.config.annotation("size");
        let refuse = |reason, what: String, remedy: String| {
            Err(Refusal::new(&key, Position::default(), reason, what, remedy))
        };
        let given = match read(self.pod, &key)? {
            None => None,
            Some(text) => match bytes_of(&Value::from(text)) {
                Some(bytes) if bytes > 0 => Some(bytes),
                _ => {
                    return refuse(
                        "size",
                        format!("{text:?} is not a size"),
                        "write one such as 96Mi".into(),
                    );
                }
            },
        };
        if self.kept != Some(Scope::Pod) {
            return match given {
                None => Ok(()),
                Some(_) => refuse(
                    "size",
                    "no link has scope pod, so the pod has no directory of its own".into(),
                    "remove the annotation, or give a link scope pod".into(),
                ),
            };
        }
        let needed = self.memory.directory;
        match given {
            Some(given) if given < needed => refuse(
                "size",
                format!("{} are less than the {} of the links", Bytes(given), Bytes(needed).rounded()),
                format!("write at least {}, or remove the annotation", Bytes(needed).rounded()),
            ),
            given => {
                self.memory.directory = given.unwrap_or(needed.max(LEAST_DIRECTORY));
                Ok(())
            }
        }
    }

    /// Returns the mount path of a scope's directory; `None` for a claim, whose configuration has the path.
    pub(crate) fn directory(&self, scope: &Scope) -> Option<&str> {
        match scope {
            Scope::Pod => Some(SHM_DIR),
            Scope::Pool(name) => Some(self.config.pool(name).map_or(SHM_DIR, |pool| &pool.mount_path)),
            Scope::Claim(_) => None,
        }
    }

    /// Returns where a container has the directory of its scope.
    pub(crate) fn directory_in<'p>(&'p self, container: &Container<'p>, scope: &Scope) -> &'p str {
        self.directory(scope).unwrap_or_else(|| pod_claims::directory(container))
    }

    /// Returns the position of a container's first link, for refusals.
    pub(crate) fn place_of(&self, container: &str) -> Position {
        let on = |planned: &&PlannedLink| planned.participants.contains(container);
        self.links.iter().find(on).map_or_else(|| self.first_place(), |planned| planned.link.places.link)
    }

    pub(crate) fn first_place(&self) -> Position {
        self.links.first().map_or_else(Position::default, |planned| planned.link.places.link)
    }

    /// Returns the position of the first link that the sidecar keeps.
    pub(crate) fn kept_place(&self) -> Position {
        let kept = self.links.iter().find(|planned| planned.link.is_kept_here());
        kept.map_or_else(Position::default, |planned| planned.link.places.link)
    }

    /// Returns the links in pools with this pod on the given side, and their pools.
    pub(crate) fn in_pools(&self, side: Side) -> impl Iterator<Item = (&PlannedLink, &str)> {
        self.links.iter().filter_map(move |planned| match &planned.link.scope {
            Scope::Pool(pool) if planned.link.side == side => Some((planned, pool.as_str())),
            _ => None,
        })
    }

    pub(crate) fn refuse(
        &self,
        place: Position,
        reason: &'static str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Refusal {
        Refusal::new(&self.annotation, place, reason, what, remedy)
    }
}

/// Returns the remedy for an unknown pool, with `other` as what can be done without one.
pub(crate) fn pool_names(config: &Config, other: &str) -> String {
    let pools: Vec<_> = config.pools.iter().map(|pool| pool.name.as_str()).collect();
    if pools.is_empty() {
        format!("no pool is configured: add it to the chart's `pools`, or {other}")
    } else {
        format!("known here: {}; choose one, or add it to the chart's `pools`", pools.join(", "))
    }
}

/// Returns the text of an annotation.
pub(crate) fn read<'a>(pod: &'a Value, key: &str) -> Result<Option<&'a str>, Refusal> {
    match pod.pointer(&format!("/metadata/annotations/{}", escaped(key))) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => {
            let (what, remedy) = ("its value is not a string", "quote it, or write it as a block with `|`");
            Err(Refusal::new(key, Position::default(), "annotation", what, remedy))
        }
    }
}

/// Returns the containers that the annotation `containers` lists, or all but the sidecar for which `default` holds.
pub(crate) fn chosen(
    pod: &Value,
    config: &Config,
    default: impl Fn(&Container<'_>) -> bool,
) -> Result<BTreeSet<String>, Refusal> {
    let key = config.annotation("containers");
    let refuse = |what, remedy| Refusal::new(&key, Position::default(), "containers", what, remedy);
    let Some(text) = read(pod, &key)? else {
        return Ok(pod::containers(pod)
            .filter(|container| default(container) && !container.is_ours())
            .map(|container| container.name().to_owned())
            .collect());
    };
    let names: BTreeSet<_> = text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Err(refuse("it lists no container".to_owned(), "name at least one, or remove it".to_owned()));
    }
    for name in &names {
        known(pod, name).map_err(|(what, remedy)| refuse(what, remedy))?;
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// Checks that the pod has this container.
fn known(pod: &Value, name: &str) -> Result<(), (String, String)> {
    let names: Vec<_> = pod::containers(pod)
        .filter(|container| !container.is_ours())
        .map(|container| container.name())
        .collect();
    if names.contains(&name) {
        return Ok(());
    }
    let what = format!("there is no container {name:?}");
    Err((what, format!("this pod has: {}; correct the name", names.join(", "))))
}
