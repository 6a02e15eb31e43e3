//! Rules that the schema cannot express. Every violation is reported with its path and the remedy.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::{Budget, Bytes, Config, FrontEnd, Pool, Problem, Registration, UserNamespaces};
use crate::devices::{Accelerator, AcceleratorKind, Numa, fake};
use crate::resource::{self, MAX_LIST_BYTES, name};

/// Default groups of pools: unused by convention, and valid in a user namespace.
const DEFAULT_GIDS: std::ops::Range<u32> = 60_000..65_000;
/// Highest group id that is mapped in a pod with a user namespace.
const MAX_MAPPED_GID: u32 = 65_535;
/// Maximum path length in `sockaddr_un`.
const MAX_SOCKET_PATH: usize = 107;
/// Longest socket name in the kubelet's directories, without the resource name.
const SOCKET_SUFFIX: usize = 24;
/// Maximum number of slots per device; more are a mistake.
const MAX_SLOTS: u32 = 1024;

/// The smallest budget of claims: the bytes of a claim that does not say how many.
pub(super) const MIN_DRA_BUDGET: u64 = 64 << 20;
/// Longest name of a pool in the name of a device, `pool-<name>`, which is a DNS label.
const MAX_DRA_POOL_NAME: usize = 58;
/// Longest path of a socket below the directory of plugins, without the domain: `/`, `/dra-`, a uid and `.sock`.
const DRA_SOCKET_SUFFIX: usize = 48;

/// Properties of the machine that limit the configuration.
#[derive(Clone, Debug)]
pub(crate) struct ConfigLimits {
    /// Page size in bytes.
    pub(crate) page: u64,
    /// Memory of the node in bytes.
    pub(crate) memory: u64,
    /// NUMA nodes; empty if unknown.
    pub(crate) numa: Vec<Numa>,
    /// Whether the paths of the configuration can be looked at: not away from the node.
    pub(crate) has_paths: bool,
}

/// Derives a group id from the name, the same on every node and after every start.
pub(crate) fn default_gid(name: &str) -> u32 {
    // FNV-1a. Must never change, because it determines group ids on disk.
    let hash =
        name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    DEFAULT_GIDS.start + hash % (DEFAULT_GIDS.end - DEFAULT_GIDS.start)
}

/// Returns every violated rule.
pub(super) fn check(config: &Config, limits: &ConfigLimits) -> Vec<Problem> {
    let mut rules = Rules { config, limits, problems: Vec::new() };
    rules.names();
    rules.shm();
    rules.pools();
    rules.agent();
    rules.slots();
    rules.times();
    rules.paths();
    if config.mode == FrontEnd::Dra {
        rules.dra();
    }
    rules.problems
}

struct Rules<'a> {
    config: &'a Config,
    limits: &'a ConfigLimits,
    problems: Vec<Problem>,
}

impl Rules<'_> {
    fn say(&mut self, path: impl Into<String>, what: impl Into<String>) {
        self.problems.push(Problem { path: path.into(), what: what.into() });
    }

    fn names(&mut self) {
        if let Err(what) = name::check_domain(&self.config.domain) {
            self.say("domain", what);
        }
        for (at, pool) in self.config.pools.iter().enumerate() {
            let path = pool_path(pool);
            if let Err(what) = name::check_name(&pool.name) {
                self.say(format!("{path}.name"), what);
            } else if resource::RESERVED.contains(&pool.name.as_str()) {
                self.say(
                    format!("{path}.name"),
                    format!("is reserved for {}/{}; choose another name", self.config.domain, pool.name),
                );
            }
            if self.config.pools[..at].iter().any(|other| other.name == pool.name) {
                self.say(path, "duplicate pool name; rename or remove one");
            }
        }
    }

    fn shm(&mut self) {
        let (unit, page) = (self.config.shm.unit.0, self.limits.page);
        let budget = self.config.shm.budget.of(self.limits.memory);
        let is_sound = unit > 0 && unit.is_multiple_of(page);
        if !is_sound {
            let what = format!(
                "{} is not a positive multiple of the page size, {page} bytes; write 64Mi",
                Bytes(unit)
            );
            self.say("shm.unit", what);
        }
        if let Budget::Bytes(bytes) = self.config.shm.budget
            && budget > self.limits.memory
        {
            let what = format!(
                "{bytes} is more than the node's memory, {} bytes; lower it, or write a share such as 50%",
                self.limits.memory
            );
            self.say("shm.budget", what);
        }
        if budget == 0 {
            return;
        }
        if is_sound && budget < unit {
            let what = format!(
                "{budget} bytes are less than one unit of {}; raise it, lower shm.unit, or write 0",
                Bytes(unit)
            );
            self.say("shm.budget", what);
        }
        if is_sound && budget <= self.limits.memory && resource::list_bytes(budget / unit) > MAX_LIST_BYTES {
            let mut enough = unit;
            while resource::list_bytes(budget / enough) > MAX_LIST_BYTES {
                enough *= 2;
            }
            let what = format!(
                "{} makes {} devices, whose list takes {} bytes, and the kubelet accepts {MAX_LIST_BYTES}; raise it to {}",
                Bytes(unit),
                budget / unit,
                resource::list_bytes(budget / unit),
                Bytes(enough)
            );
            self.say("shm.unit", what);
        }
        if !self.config.cdi.enabled {
            let what = "a private /dev/shm needs a runtime with CDI, and cdi.enabled is false; enable it in the runtime \
                        (containerd 1.7: enable_cdi = true; containerd 2.0 and CRI-O have it), or set this to 0";
            self.say("shm.budget", what);
        }
    }

    fn pools(&mut self) {
        let mut gids = BTreeMap::<u32, &str>::new();
        let mut directories = Vec::<(PathBuf, &str)>::new();
        for pool in &self.config.pools {
            let path = pool_path(pool);
            let directory = pool.directory(self.config);
            if !is_plain(&directory) {
                self.say(
                    format!("{path}.directory"),
                    format!("{} is not an absolute path without . and ..", directory.display()),
                );
            } else if ["/run", "/var/run"].iter().any(|run| directory.starts_with(run)) {
                let what =
                    "a full /run breaks the node; choose a directory on /dev/shm or on a tmpfs of its own";
                self.say(format!("{path}.directory"), what);
            }
            let related = |other: &Path| directory.starts_with(other) || other.starts_with(&directory);
            if let Some((_, other)) =
                directories.iter().find(|(other, name)| related(other) && *name != pool.name)
            {
                let what = format!(
                    "{} overlaps with the directory of pool {other}; give each pool its own directory",
                    directory.display()
                );
                self.say(format!("{path}.directory"), what);
            }
            if let Err(what) = check_mount_path(&pool.mount_path) {
                self.say(format!("{path}.mountPath"), what);
            }
            if pool.attachments == 0 {
                self.say(
                    format!("{path}.attachments"),
                    "no container could mount the pool; write 1 or more, or remove the pool",
                );
            }
            self.attachments(&path, pool.attachments);
            self.gid(pool, &path, &mut gids);
            if let Some(node) = pool.numa_node
                && !self.limits.numa.is_empty()
                && !self.limits.numa.iter().any(|numa| numa.id == node)
            {
                let nodes =
                    self.limits.numa.iter().map(|numa| numa.id.to_string()).collect::<Vec<_>>().join(", ");
                self.say(
                    format!("{path}.numaNode"),
                    format!("NUMA node {node} does not exist; this node has: {nodes}"),
                );
            }
            self.command(&pool.health_command, &path);
            directories.push((directory, &pool.name));
        }
    }

    fn gid<'a>(&mut self, pool: &'a Pool, path: &str, gids: &mut BTreeMap<u32, &'a str>) {
        let gid = pool.gid();
        let path = format!("{path}.gid");
        if gid == 0 || gid == u32::MAX {
            self.say(&path, format!("{gid} is reserved; write an unused group id, such as 60001"));
        }
        if pool.user_namespaces != UserNamespaces::Never && gid > MAX_MAPPED_GID {
            let what = format!(
                "{gid} is above {MAX_MAPPED_GID}, the highest group id in a pod with a user namespace; write a lower one"
            );
            self.say(&path, what);
        }
        if pool.gid.is_some() && !self.config.cdi.enabled {
            self.say(
                &path,
                "without CDI containers get no group, and cdi.enabled is false; remove one of the two settings",
            );
        }
        match gids.insert(gid, &pool.name) {
            Some(other) if other != pool.name => {
                self.say(
                    path,
                    format!("{gid} is also the group of pool {other}; give each pool its own group"),
                );
            }
            _ => {}
        }
    }

    fn agent(&mut self) {
        self.attachments("identity", self.config.identity.attachments);
    }

    fn attachments(&mut self, path: &str, count: u32) {
        let bytes = resource::list_bytes(count.into());
        if bytes > MAX_LIST_BYTES {
            let what = format!(
                "a list of {count} devices takes {bytes} bytes, and the kubelet accepts {MAX_LIST_BYTES}; write a few hundred"
            );
            self.say(format!("{path}.attachments"), what);
        }
    }

    fn slots(&mut self) {
        let mut listed = Vec::new();
        if let Some(file) = self.config.fake_inventory.as_ref().filter(|_| self.limits.has_paths) {
            match fake::read(&self.config.seen(file)) {
                Ok(found) => listed = found,
                Err(what) => self.say("fakeInventory", what),
            }
        }
        for (path, kind, slots) in [
            ("gpuIpc", AcceleratorKind::Gpu, &self.config.gpu_ipc),
            ("npuIpc", AcceleratorKind::Npu, &self.config.npu_ipc),
        ] {
            let count = slots.slots_per_device;
            let of_kind = |one: &&Accelerator| one.kind == kind;
            let bytes = |count| -> u64 {
                listed.iter().filter(of_kind).map(|one| resource::slots_bytes(&one.id, count)).sum()
            };
            if count > MAX_SLOTS {
                let what = format!("{count} is more than the maximum of {MAX_SLOTS}");
                self.say(format!("{path}.slotsPerDevice"), what);
            } else if bytes(count) > MAX_LIST_BYTES {
                let most = (1..count).rev().find(|&less| bytes(less) <= MAX_LIST_BYTES).unwrap_or(0);
                let what = format!(
                    "a list with {count} slots per device takes {} bytes, and the kubelet accepts {MAX_LIST_BYTES}; \
                     write {most} or less",
                    bytes(count)
                );
                self.say(format!("{path}.slotsPerDevice"), what);
            }
            self.command(&slots.health_command, path);
        }
    }

    fn command(&mut self, command: &[String], path: &str) {
        if let Some(program) = command.first()
            && !Path::new(program).is_absolute()
        {
            self.say(
                format!("{path}.healthCommand"),
                format!("{program:?} is not an absolute path; the command runs without a shell and PATH"),
            );
        }
    }

    fn times(&mut self) {
        let Config { health, sweep, .. } = self.config;
        for (path, seconds, most) in [
            ("health.intervalSeconds", health.interval_seconds, 3600),
            ("health.commandTimeoutSeconds", health.command_timeout_seconds, 60),
            ("sweep.intervalSeconds", sweep.interval_seconds, 3600),
            ("sweep.graceSeconds", sweep.grace_seconds, 86_400),
        ] {
            if seconds == 0 || seconds > most {
                self.say(path, format!("{seconds} is not between 1 and {most}"));
            }
        }
    }

    fn paths(&mut self) {
        let config = self.config;
        let plugins = &config.kubelet.device_plugins_dir;
        let registry = &config.kubelet.plugins_registry_dir;
        let absolute: [(&str, &Path); 7] = [
            ("hostRoot", &config.host_root),
            ("kubelet.devicePluginsDir", plugins),
            ("kubelet.pluginsRegistryDir", registry),
            ("kubelet.podResourcesSocket", &config.kubelet.pod_resources_socket),
            ("cdi.directory", &config.cdi.directory),
            ("poolsDirectory", &config.pools_directory),
            ("identity.directory", &config.identity.directory),
        ];
        for (path, value) in absolute {
            if !is_plain(value) {
                self.say(path, format!("{} is not an absolute path without . and ..", value.display()));
            }
        }
        let (path, seen) = match (config.mode, config.kubelet.registration) {
            (FrontEnd::Dra, _) => ("kubelet.pluginsRegistryDir", registry.clone()),
            (_, Registration::Legacy) => ("kubelet.devicePluginsDir", config.seen(plugins)),
            (_, Registration::PluginsRegistry) => ("kubelet.pluginsRegistryDir", config.seen(registry)),
        };
        if let Err(error) = self.writable(&seen) {
            self.say(
                path,
                format!("{}: {error}; mount the kubelet's directory there, and run as root", seen.display()),
            );
        }
        let longest = config.pools.iter().map(|pool| pool.name.len()).max().unwrap_or(0).max("gpu-ipc".len());
        let longest = seen.as_os_str().len() + config.domain.len() + longest + SOCKET_SUFFIX;
        if longest > MAX_SOCKET_PATH {
            let what = format!(
                "the path of a socket would have {longest} bytes, and the maximum is {MAX_SOCKET_PATH}; shorten it"
            );
            self.say(path, what);
        }
        if config.cdi.enabled {
            self.can_be_made("cdi.directory", &config.cdi.directory);
        }
        if config.identity.enabled {
            self.can_be_made("identity.directory", &config.identity.directory);
        }
        for pool in &config.pools {
            self.can_be_made(&format!("{}.directory", pool_path(pool)), &pool.directory(config));
        }
    }

    fn dra(&mut self) {
        let (config, memory) = (self.config, self.limits.memory);
        let dra = &config.dra;
        if !config.cdi.enabled {
            self.say("mode", "the DRA driver needs a runtime with CDI, and cdi.enabled is false; enable it, or write mode: devicePlugin");
        }
        let budget = dra.budget.of(memory);
        if budget < MIN_DRA_BUDGET || budget > memory {
            let what = format!(
                "{} are {budget} bytes, which are not between {} and the node's memory, {memory} bytes; write a share such as 50%",
                dra.budget,
                Bytes(MIN_DRA_BUDGET)
            );
            self.say("dra.budget", what);
        }
        let gids = dra.gids;
        if dra.attachments > gids.count {
            let what = format!(
                "{} claims cannot have a directory at the same time, because each needs a group, and dra.gids.count is {}; raise that, or write {} or less",
                dra.attachments, gids.count, gids.count
            );
            self.say("dra.attachments", what);
        }
        let last = gids.first.saturating_add(gids.count).saturating_sub(1);
        if gids.first == 0 || last > MAX_MAPPED_GID {
            let what = format!(
                "the groups {} to {last} are not between 1 and {MAX_MAPPED_GID}, the highest group id in a pod with a user namespace; \
                 write a lower one",
                gids.first
            );
            self.say("dra.gids.first", what);
        }
        let directory = &dra.directory;
        if !is_plain(directory) || directory.components().count() < 4 || directory.starts_with("/run") {
            let what = format!(
                "{} is not an absolute path of three parts or more without . and .., outside /run; write /dev/shm/shmesh-claims",
                directory.display()
            );
            self.say("dra.directory", what);
        }
        for pool in &config.pools {
            let (path, pools) = (pool_path(pool), pool.directory(config));
            if pools.starts_with(directory) || directory.starts_with(&pools) {
                let what = format!(
                    "overlaps with {}, the directory of claims; choose another one",
                    directory.display()
                );
                self.say(format!("{path}.directory"), what);
            }
            if gids.range().contains(&pool.gid()) {
                let what = format!(
                    "{} is one of the groups of claims, {} to {last}; choose another one",
                    pool.gid(),
                    gids.first
                );
                self.say(format!("{path}.gid"), what);
            }
            if pool.user_namespaces == UserNamespaces::Mixed {
                let what = "the mount of a claim works with or without user namespaces, not both; write never or always";
                self.say(format!("{path}.userNamespaces"), what);
            }
            let is_label =
                pool.name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-');
            if !is_label || pool.name.len() > MAX_DRA_POOL_NAME {
                let what = format!(
                    "the name of the pool becomes part of a device's name: write up to {MAX_DRA_POOL_NAME} lower-case letters, digits and -"
                );
                self.say(format!("{path}.name"), what);
            }
        }
        let state = config.state_directory();
        for (path, value) in [("dra.pluginsDir", &dra.plugins_dir), ("dra.stateDirectory", &state)] {
            if !is_plain(value) {
                self.say(path, format!("{} is not an absolute path without . and ..", value.display()));
            }
        }
        let longest = dra.plugins_dir.as_os_str().len() + config.domain.len() + DRA_SOCKET_SUFFIX;
        if longest > MAX_SOCKET_PATH {
            let what = format!(
                "the path of a socket would have {longest} bytes, and the maximum is {MAX_SOCKET_PATH}; shorten it"
            );
            self.say("dra.pluginsDir", what);
        }
        self.can_be_made("dra.directory", directory);
        self.seen_can_be_made("dra.stateDirectory", &state);
    }

    fn can_be_made(&mut self, path: &str, directory: &Path) {
        self.seen_can_be_made(path, &self.config.seen(directory));
    }

    fn seen_can_be_made(&mut self, path: &str, seen: &Path) {
        let nearest = seen.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(seen);
        if let Err(error) = self.writable(nearest) {
            let what =
                format!("cannot create or write to {}: {}: {error}", seen.display(), nearest.display());
            self.say(path, what);
        }
    }

    fn writable(&self, dir: &Path) -> Result<(), String> {
        if self.limits.has_paths { writable(dir) } else { Ok(()) }
    }
}

fn writable(dir: &Path) -> Result<(), String> {
    let found = dir.metadata().map_err(|error| error.to_string())?;
    if !found.is_dir() {
        return Err("is not a directory".into());
    }
    shmesh_sys::user::may_write_in(dir).map_err(|error| error.desc().to_owned())
}

fn pool_path(pool: &Pool) -> String {
    format!("pools[{}]", pool.name)
}

fn is_plain(path: &Path) -> bool {
    // `components` drops `.` in the middle, which is harmless here.
    path.is_absolute()
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

/// Refuses a path at which containers cannot have a mount.
pub(crate) fn check_mount_path(path: &Path) -> Result<(), String> {
    let named = path.display();
    if !is_plain(path) || path.parent().is_none() {
        return Err(format!("{named} is not an absolute path below /, without . and .."));
    }
    let of_the_runtime = ["/proc", "/sys", "/dev"].iter().any(|dir| path.starts_with(dir));
    if of_the_runtime && !path.starts_with("/dev/shm") {
        return Err(format!(
            "{named} belongs to the container runtime; write /dev/shm, or another directory"
        ));
    }
    Ok(())
}
