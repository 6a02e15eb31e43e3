//! Checks that refuse a pod, or warn about settings that may not work.

use serde_json::Value;
use shmesh::Side;
use shmesh::config::{Far, PodLink, Position, Scope};

use crate::config::{Config, Pool, UserNamespaces};
use crate::plan::{Plan, tables};
use crate::pod::{
    self, BRIDGE, BRIDGE_PORT, BRIDGE_TLS, Container, INFO_VOLUME, SHM_DIR, SHM_VOLUME, SIDECAR,
};
use crate::pod_claims::has_own_users;
use crate::quantity::bytes_of;
use crate::refusal::Refusal;
use shmesh_sys::quantity::Bytes;

type RuleResult = Result<(), Refusal>;

/// How a pod says that its claim is not where claims usually are, which the injector does not look up.
pub(crate) const CLAIM_ELSEWHERE: &str =
    "; if the claim has another mountPath, give the container env SHMESH_DIR with it";

impl Plan<'_> {
    /// Returns the first refusal, or all warnings.
    pub(crate) fn check(&self) -> Result<Vec<String>, Refusal> {
        self.check_names()?;
        self.check_namespaces()?;
        self.check_limits()?;
        for container in pod::containers(self.pod) {
            if let Some(scope) = self.directories.get(container.name()) {
                self.check_directory(&container, scope)?;
                self.check_touched(&container)?;
            }
            self.check_shm(&container)?;
        }
        self.check_existing()?;
        let mut warnings = self.claims.warnings(self.pod);
        for container in pod::containers(self.pod) {
            if let Some(Scope::Claim(claim)) = self.directories.get(container.name()) {
                warnings.extend(self.claims.warning_of(claim, &container));
            }
        }
        if self.kept.is_some() {
            self.check_port(self.config.sidecar.admin_port, "TCP", "sidecar", self.kept_place())?;
            self.check_users(&mut warnings)?;
        }
        if let Some(bridge) = &self.bridge {
            self.check_port(self.config.bridge.admin_port, "TCP", "bridge", self.far_place())?;
            if bridge.side == Side::Primary {
                self.check_port(BRIDGE_PORT, "UDP", "bridge", self.far_place())?;
            }
        }
        self.check_labels()?;
        Ok(warnings)
    }

    fn check_names(&self) -> RuleResult {
        let at = self.first_place();
        if let Some(taken) = pod::containers(self.pod).find(|c| c.name() == SIDECAR && !c.is_our_sidecar()) {
            let kind = if taken.is_init { "init container" } else { "container" };
            let what = format!("the pod has a {kind} {SIDECAR:?}, which is the sidecar's name");
            return Err(self.refuse(at, "name", what, "rename it"));
        }
        if self.bridge.is_some()
            && let Some(taken) = pod::containers(self.pod).find(|c| c.name() == BRIDGE && !c.is_bridge())
        {
            let kind = if taken.is_init { "init container" } else { "container" };
            let what = format!("the pod has a {kind} {BRIDGE:?}, which is the bridge's name");
            return Err(self.refuse(at, "name", what, "rename it"));
        }
        let volume = |name| pod::named(self.pod, "/spec/volumes", name);
        let other = |volume: &Value| pod::text(volume, "/secret/secretName") != Some(BRIDGE_TLS);
        if self.bridge.is_some() && volume(BRIDGE_TLS).is_some_and(other) {
            let what = format!("the pod has a volume {BRIDGE_TLS:?} that is not of the Secret of this name");
            return Err(self.refuse(at, "name", what, "rename it"));
        }
        if volume(SHM_VOLUME).is_some_and(|volume| pod::text(volume, "/emptyDir/medium") != Some("Memory")) {
            let what =
                format!("the pod has a volume {SHM_VOLUME:?} that is not an emptyDir with medium Memory");
            return Err(self.refuse(at, "name", what, "rename it"));
        }
        if volume(INFO_VOLUME).is_some_and(|volume| volume.get("downwardAPI").is_none()) {
            let what = format!("the pod has a volume {INFO_VOLUME:?} that is not a downwardAPI volume");
            return Err(self.refuse(at, "name", what, "rename it"));
        }
        Ok(())
    }

    fn check_namespaces(&self) -> RuleResult {
        let at = self.first_place();
        let spec_is = |key: &str| pod::is_true(self.pod, &format!("/spec/{key}"));
        if pod::text(self.pod, "/spec/os/name") == Some("windows") {
            return Err(self.refuse(
                at,
                "os",
                "links need Linux, and spec.os.name is windows",
                "remove the annotation",
            ));
        }
        if spec_is("hostPID") && !self.config.allow_host_pid {
            let what = "with spec.hostPID the pod sees the node's processes, and the sidecar would take their process ids for \
                        those of its peers";
            let remedy = "remove hostPID, which links do not need, or have the operator set allowHostPid";
            return Err(self.refuse(at, "hostPID", what, remedy));
        }
        if spec_is("hostIPC") {
            let what =
                format!("spec.hostIPC puts the node's shared memory at {SHM_DIR}, where the links are");
            return Err(self.refuse(at, "hostIPC", what, "remove hostIPC, which links do not need"));
        }
        for planned in &self.links {
            let Scope::Pool(name) = &planned.link.scope else { continue };
            let refused = self.config.pool(name).and_then(|pool| user_namespace(self.pod, pool));
            if let Some((what, remedy)) = refused {
                return Err(self.refuse(planned.link.places.scope, "userNamespace", what, remedy));
            }
        }
        let sees_processes = spec_is("shareProcessNamespace") || spec_is("hostPID");
        // A pod that was injected by another release, whose nodes have it, keeps the resource.
        let of_domain = format!("{}/", self.config.domain);
        let has_service = pod::containers(self.pod).filter(Container::is_our_sidecar).any(|sidecar| {
            let limits = sidecar.value.pointer("/resources/limits").and_then(Value::as_object);
            limits.is_some_and(|limits| limits.keys().any(|resource| resource.starts_with(&of_domain)))
        });
        let has_none = self.config.agent_resource.is_empty() && !has_service && !sees_processes;
        if self.kept == Some(Scope::Pod) && has_none {
            let what = "the sidecar cannot identify its clients: no agentResource gives it the node's identity service";
            let remedy = "set spec.shareProcessNamespace, or with config.mode dra give the links scope claim/<name>; with the device \
                          plugin, have the operator set agentResource";
            return Err(self.refuse(self.kept_place(), "identity", what, remedy));
        }
        Ok(())
    }

    fn check_limits(&self) -> RuleResult {
        let replicas = self.bridge.as_ref().map_or(0, |bridge| bridge.replicas);
        let (limits, bytes) = (&self.config.limits, self.memory.all().saturating_add(replicas));
        let over = |limit: Bytes, whose: &str| {
            let what = format!(
                "the links of this pod have {}, and the limit of {whose} is {limit}",
                Bytes(bytes).rounded()
            );
            let remedy = "lower a pool_len or buf_size_bytes, or have the operator raise `limits`";
            // Reports the largest link, because shrinking it helps most.
            let takes_memory = |link: &PodLink| link.is_kept_here() || link.far != Far::Never;
            let these = self.links.iter().filter(|planned| takes_memory(&planned.link));
            let largest = these.max_by_key(|planned| planned.link.config.segment_bytes());
            self.refuse(largest.map_or_else(Position::default, |p| p.link.places.link), "size", what, remedy)
        };
        if self.sidecar_memory().is_none() || self.bridge_memory().is_none() {
            let what = format!(
                "the links of this pod have {}, and a container can have less than 8Ei of memory",
                Bytes(bytes).rounded()
            );
            let remedy = format!("lower {}, a pool_len or buf_size_bytes", self.config.annotation("size"));
            return Err(self.refuse(self.kept_place(), "size", what, remedy));
        }
        if let Some(limit) = limits.of_pod(self.namespace).filter(|limit| bytes > limit.0) {
            return Err(over(limit, &format!("namespace {:?}", self.namespace)));
        }
        if let Some(limit) = limits.node.filter(|limit| bytes > limit.0) {
            return Err(over(limit, "a node"));
        }
        Ok(())
    }

    /// Refuses other mounts at the IPC directory.
    fn check_directory(&self, container: &Container<'_>, scope: &Scope) -> RuleResult {
        let (name, directory) = (container.name(), self.directory_in(container, scope));
        let at = self.place_of(name);
        if let Some(volume) = container.mounted_at(directory)
            && (volume != SHM_VOLUME || *scope != Scope::Pod)
        {
            let what = format!("container {name} mounts volume {volume} at {directory}, where its links are");
            let mut remedy = "remove that volumeMount, or leave the container out by `containers`".to_owned();
            if matches!(scope, Scope::Claim(_)) {
                remedy.push_str(CLAIM_ELSEWHERE);
            }
            return Err(self.refuse(at, "mount", what, remedy));
        }
        let own = match scope {
            Scope::Pool(own) => Some(own.as_str()),
            Scope::Pod | Scope::Claim(_) => None,
        };
        if let Some(resource) = other_resource(container, self.config, directory, own) {
            let what = format!(
                "container {name} requests {resource}, which is mounted at {directory}, where its links in scope {scope} are: \
                 two things at one place"
            );
            let remedy = "remove that request, or leave the container out by `containers`";
            return Err(self.refuse(at, "mount", what, remedy));
        }
        Ok(())
    }

    /// Checks the limit of a container against the page tables of its links. The pages themselves are charged
    /// to the sidecar.
    fn check_touched(&self, container: &Container<'_>) -> RuleResult {
        let name = container.name();
        let on = self.links.iter().filter(|planned| planned.participants.contains(name));
        let mapped = on.map(|planned| planned.link.config.segment_bytes()).fold(0, u64::saturating_add);
        let limit = container.value.pointer("/resources/limits/memory").and_then(bytes_of);
        match limit.filter(|&limit| limit < tables(mapped)) {
            None => Ok(()),
            Some(limit) => {
                let what = format!(
                    "container {name} has a memory limit of {}, and the page tables of its links ({}) have {}",
                    Bytes(limit),
                    Bytes(mapped).rounded(),
                    Bytes(tables(mapped)).rounded()
                );
                Err(self.refuse(self.place_of(name), "memory", what, "raise its limit, or lower a pool_len"))
            }
        }
    }

    /// Refuses private shared memory above the memory limit, because filling it would kill the container.
    fn check_shm(&self, container: &Container<'_>) -> RuleResult {
        let (name, domain) = (container.name(), &self.config.domain);
        let Some(units) = container.resource(&format!("{domain}/shm")) else { return Ok(()) };
        let bytes = units.saturating_mul(self.config.shm.unit.0);
        let limit = container.value.pointer("/resources/limits/memory").and_then(bytes_of);
        match limit.filter(|&limit| limit < bytes) {
            None => Ok(()),
            Some(limit) => {
                let what = format!(
                    "container {name} has a memory limit of {} and requests {units} {domain}/shm, which are {}: it would be \
                     killed when it fills them",
                    Bytes(limit),
                    Bytes(bytes)
                );
                Err(self.refuse(self.first_place(), "memory", what, "raise the limit, or request fewer"))
            }
        }
    }

    /// Checks the limits of an existing sidecar, the pod and the volume.
    fn check_existing(&self) -> RuleResult {
        let needed = self.memory.charged();
        let too_small = |whose: &str, found: u64, needed: u64| {
            let at = if self.kept.is_some() { self.kept_place() } else { self.far_place() };
            let what = format!("{whose} is {}, and the links need {}", Bytes(found), Bytes(needed).rounded());
            self.refuse(
                at,
                "memory",
                what,
                format!("set it to {} at least, or lower a pool_len", Bytes(needed).rounded()),
            )
        };
        let limit = |path: &str| self.pod.pointer(path).and_then(bytes_of);
        let of_sidecar =
            if self.kept.is_some() { needed.saturating_add(self.config.sidecar.memory.0) } else { 0 };
        let of_pod = of_sidecar.saturating_add(self.bridge_memory().unwrap_or(u64::MAX));
        if of_pod > 0
            && let Some(found) = limit("/spec/resources/limits/memory").filter(|&found| found < of_pod)
        {
            return Err(too_small("the pod's memory limit", found, of_pod));
        }
        if let Some(ours) = pod::containers(self.pod).find(Container::is_our_sidecar)
            && let Some(found) = ours.value.pointer("/resources/limits/memory").and_then(bytes_of)
            && found < needed
        {
            return Err(too_small("the memory limit of the init container shmesh", found, needed));
        }
        if let Some(bridge) = &self.bridge
            && let Some(ours) = pod::containers(self.pod).find(Container::is_bridge)
            && let Some(found) = ours.value.pointer("/resources/limits/memory").and_then(bytes_of)
            && found < bridge.charged()
        {
            return Err(too_small(
                "the memory limit of the init container shmesh-bridge",
                found,
                bridge.charged(),
            ));
        }
        let volume = pod::named(self.pod, "/spec/volumes", SHM_VOLUME);
        if self.kept == Some(Scope::Pod)
            && let Some(found) =
                volume.and_then(|volume| volume.pointer("/emptyDir/sizeLimit")).and_then(bytes_of)
            && found < self.memory.directory
        {
            return Err(too_small("the sizeLimit of volume shmesh-shm", found, self.memory.directory));
        }
        Ok(())
    }

    /// Refuses labels by which Services and policies would select the pod for links that it does not have, or not select it.
    fn check_labels(&self) -> RuleResult {
        let wanted = self.bridge.as_ref().map_or_else(Vec::new, |bridge| bridge.labels(self));
        let ours = |key: &str| {
            let name = key.strip_prefix(&self.config.domain).and_then(|rest| rest.strip_prefix('/'));
            name.is_some_and(|name| name == "bridge" || name.starts_with("far-"))
        };
        let labels = self.pod.pointer("/metadata/labels").and_then(Value::as_object);
        for (key, value) in labels.into_iter().flatten().filter(|(key, _)| ours(key)) {
            let remedy = match wanted.iter().find(|(wanted, _)| wanted == key) {
                Some((_, wanted)) if value == wanted || value.is_null() => continue,
                Some((_, wanted)) => format!("remove it, or set it to {wanted:?}"),
                None => "remove it".to_owned(),
            };
            let what = format!(
                "the pod has the label {key} with the value {value}, which selects the bridge of another pod's links"
            );
            return Err(self.refuse(self.far_place(), "label", what, remedy));
        }
        Ok(())
    }

    /// Refuses a port of the pod that the sidecar or the bridge needs.
    fn check_port(&self, port: u16, protocol: &str, whose: &str, place: Position) -> RuleResult {
        let is_same = |of_pod: &Value| {
            of_pod.get("containerPort").and_then(Value::as_u64) == Some(port.into())
                && pod::text(of_pod, "/protocol").unwrap_or("TCP") == protocol
        };
        let has_it = |container: &Container<'_>| {
            !container.is_ours() && pod::list(container.value, "/ports").any(is_same)
        };
        match pod::containers(self.pod).find(has_it) {
            None => Ok(()),
            Some(container) => {
                let what = format!("container {} has port {port}, which is the {whose}'s", container.name());
                let remedy = match port {
                    BRIDGE_PORT => "use another".to_owned(),
                    _ => format!("use another, or have the operator set {whose}.adminPort"),
                };
                Err(self.refuse(place, "port", what, remedy))
            }
        }
    }

    /// Requires that containers on a link of mode 0600 run as the sidecar's user, because files have one
    /// owner.
    fn check_users(&self, warnings: &mut Vec<String>) -> RuleResult {
        let has_group = self.pod.pointer("/spec/securityContext/fsGroup").is_some_and(Value::is_number);
        let sidecar = self.sidecar_user();
        for planned in self.links.iter().filter(|planned| planned.link.is_kept_here()) {
            let shares_group =
                planned.link.config.file_mode == 0o660 && (has_group || planned.link.scope != Scope::Pod);
            if shares_group {
                continue;
            }
            let link = &planned.link.config.name;
            let of_link = |container: &Container<'_>| planned.participants.contains(container.name());
            for container in pod::containers(self.pod).filter(of_link) {
                let name = container.name();
                let must_not_be_root =
                    container.security(self.pod, "runAsNonRoot").and_then(Value::as_bool) == Some(true);
                let what = match container.user(self.pod) {
                    Some(0) => continue,
                    Some(user) if sidecar == Some(user) => continue,
                    Some(user) => match sidecar {
                        Some(other) => format!(
                            "link {link}: container {name} runs as user {user} and others as {other}, and one user owns its files"
                        ),
                        None => format!(
                            "link {link}: container {name} runs as user {user}, others as one that the pod does not name, and \
                             one user owns its files"
                        ),
                    },
                    None if must_not_be_root => {
                        format!(
                            "link {link}: the pod does not say as which user container {name} runs, and one user owns its files"
                        )
                    }
                    None => {
                        warnings.push(format!(
                            "link {link}: container {name} has no runAsUser; unless its image runs as root or as user {}, it \
                             cannot open the link",
                            self.config.sidecar.user
                        ));
                        continue;
                    }
                };
                // A pool or a claim has a group.
                let more = if planned.link.scope == Scope::Pod { " and the pod fsGroup" } else { "" };
                let remedy = format!(
                    "give the pod securityContext.runAsUser, or the link memory.file_mode \"0660\"{more}"
                );
                return Err(self.refuse(planned.link.places.link, "user", what, remedy));
            }
        }
        Ok(())
    }

    /// Returns the common user of all containers on the sidecar's links, ignoring root, which can open
    /// everything.
    pub(crate) fn sidecar_user(&self) -> Option<u64> {
        self.user_of(|link| link.is_kept_here())
    }

    /// Returns the common user of all containers on the bridge's links: the sidecar's, where there is one.
    pub(crate) fn bridge_user(&self) -> Option<u64> {
        if self.kept.is_some() {
            return self.sidecar_user();
        }
        self.user_of(|link| link.far != Far::Never)
    }

    fn user_of(&self, is_of: impl Fn(&PodLink) -> bool) -> Option<u64> {
        let links = self.links.iter().filter(|planned| is_of(&planned.link));
        let names: Vec<_> = links.flat_map(|planned| &planned.participants).collect();
        let on =
            pod::containers(self.pod).filter(|container| names.iter().any(|name| *name == container.name()));
        let mut users = on.map(|container| container.user(self.pod)).filter(|user| *user != Some(0));
        let first = users.next()??;
        users.all(|user| user == Some(first)).then_some(first)
    }
}

/// Returns the problem and the remedy if the pool is not for pods with such a user namespace.
pub(crate) fn user_namespace(pod: &Value, pool: &Pool) -> Option<(String, &'static str)> {
    let name = &pool.name;
    let has_own_users = has_own_users(pod);
    match pool.user_namespaces {
        UserNamespaces::Never if has_own_users => Some((
            format!("pool {name} is for pods without a user namespace, and spec.hostUsers is false"),
            "remove hostUsers, or have the operator set the pool's userNamespaces to mixed or always",
        )),
        UserNamespaces::Always if !has_own_users => Some((
            format!("pool {name} is for pods with a user namespace, and this one has none"),
            "set spec.hostUsers to false, or have the operator set the pool's userNamespaces to mixed",
        )),
        _ => None,
    }
}

/// Returns what else the container has at the mount path of a pool or claim: a volume, or a resource other than its `own` pool.
pub(crate) fn other_mount(
    container: &Container<'_>,
    config: &Config,
    directory: &str,
    own: Option<&str>,
) -> Option<String> {
    let name = container.name();
    if let Some(volume) = container.mounted_at(directory) {
        return Some(format!("container {name} mounts volume {volume} at {directory}"));
    }
    let resource = other_resource(container, config, directory, own)?;
    Some(format!("container {name} requests {resource}, which is mounted at {directory}"))
}

/// Returns the resource other than the container's `own` pool that is mounted at this directory.
fn other_resource(
    container: &Container<'_>,
    config: &Config,
    directory: &str,
    own: Option<&str>,
) -> Option<String> {
    let pools = config.pools.iter().map(|pool| (pool.name.as_str(), pool.mount_path.as_str()));
    pools
        .chain([("shm", SHM_DIR)])
        .filter(|(name, mount_path)| Some(*name) != own && *mount_path == directory)
        .map(|(name, _)| format!("{}/{name}", config.domain))
        .find(|resource| container.resource(resource).is_some())
}
