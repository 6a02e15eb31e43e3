//! Health checks of advertised devices. Each check starts from scratch, so devices recover by themselves.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::process::Command;
use tokio::time::timeout;

use crate::cdi::SpecFiles;
use crate::config::{Config, seen};
use crate::devices::{Accelerator, AcceleratorKind, DeviceInventory};
use crate::metrics::Metrics;
use crate::pools;
use crate::resource::allocate::AGENT_SOCKET;
use crate::resource::{Pool, Resource, ResourceKind};

/// Checks the health of all advertised resources once.
#[derive(Debug)]
pub(crate) struct HealthChecker<'a> {
    pub(crate) config: &'a Config,
    pub(crate) files: Option<&'a SpecFiles>,
    pub(crate) known: &'a DeviceInventory,
    /// The last scan of the devices has not returned.
    pub(crate) is_driver_hung: bool,
    pub(crate) metrics: &'a Metrics,
}

impl HealthChecker<'_> {
    /// Runs the health commands of all pools concurrently and returns the outcomes by resource.
    pub(crate) async fn run_commands(&self) -> BTreeMap<String, Result<()>> {
        let mut said = BTreeMap::new();
        let mut commands = tokio::task::JoinSet::new();
        for pool in self.config.pools.iter().filter(|pool| !pool.health_command.is_empty()) {
            let name = format!("{}/{}", self.config.domain, pool.name);
            let command = self.command(&pool.health_command, &name, &pool.name);
            commands.spawn(async move { (name, command.await) });
        }
        while let Some(ended) = commands.join_next().await {
            said.extend(ended);
        }
        said
    }

    /// Returns the unhealthy devices of a resource with the reason. Resources without devices use index 0.
    pub(crate) async fn check(
        &self,
        resource: &Resource,
        repaired: &Result<()>,
        command: Result<()>,
    ) -> BTreeMap<usize, String> {
        let mut unhealthy = BTreeMap::new();
        let mut judge = |device: usize, outcome: Result<()>| {
            if let Err(error) = outcome {
                unhealthy.insert(device, format!("{error:#}"));
            }
        };
        let described = || match (repaired, self.files) {
            // The previous CDI specification is still valid.
            (Err(error), Some(files)) if !files.describes(resource) => bail!("{error:#}"),
            _ => Ok(()),
        };
        match &resource.kind {
            ResourceKind::Shm { .. } => judge(0, described()),
            ResourceKind::Pool(pool) => {
                judge(0, described().and_then(|()| self.pool(pool)).and(command));
            }
            ResourceKind::Agent => judge(0, described().and_then(|()| self.agent())),
            ResourceKind::Slots(kind, devices) => {
                // Concurrently, because a command may run for long.
                let mut looks = tokio::task::JoinSet::new();
                for (at, device) in devices.iter().enumerate() {
                    if self.is_driver_hung {
                        judge(at, Err(anyhow!("the driver does not respond")));
                        continue;
                    }
                    if self.known.is_gone(device) {
                        judge(at, Err(anyhow!("the device is no longer listed by the driver")));
                        continue;
                    }
                    let look = self.device(*kind, device, &resource.name);
                    looks.spawn(async move { (at, look.await) });
                }
                while let Some(ended) = looks.join_next().await {
                    if let Ok((at, outcome)) = ended {
                        judge(at, outcome);
                    }
                }
            }
        }
        unhealthy
    }

    fn pool(&self, pool: &Pool) -> Result<()> {
        let directory = self.config.seen(&pool.directory);
        pools::prepare("pool", &directory, pool.gid, self.config.cdi.enabled)?;
        let free = pools::free(&directory)?;
        self.metrics.pool_free(&pool.name, free);
        let Some(asked) = self.config.pools.iter().find(|one| one.name == pool.name) else { return Ok(()) };
        ensure!(
            free >= asked.min_free.0,
            "{} has {free} bytes free, less than minFree ({}): remove files, or enlarge the tmpfs",
            directory.display(),
            asked.min_free
        );
        Ok(())
    }

    fn agent(&self) -> Result<()> {
        let socket = self.config.seen(&self.config.identity.directory).join(AGENT_SOCKET);
        let found = socket.try_exists().with_context(|| format!("cannot look at {}", socket.display()))?;
        ensure!(found, "{} does not exist: start the identity service", socket.display());
        Ok(())
    }

    fn device(
        &self,
        kind: AcceleratorKind,
        device: &Accelerator,
        resource: &str,
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let root = self.config.host_root.clone();
        let slots = match kind {
            AcceleratorKind::Gpu => &self.config.gpu_ipc,
            AcceleratorKind::Npu => &self.config.npu_ipc,
        };
        let (file, id) = (device.file.clone(), device.id.clone());
        let command = self.command(&slots.health_command, resource, &id);
        async move {
            if let Some(file) = file {
                let file = seen(&root, &file);
                let found =
                    Path::try_exists(&file).with_context(|| format!("cannot look at {}", file.display()))?;
                ensure!(found, "the device file {} does not exist", file.display());
            }
            command.await
        }
    }

    fn command(
        &self,
        command: &[String],
        resource: &str,
        device: &str,
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let limit = Duration::from_secs(self.config.health.command_timeout_seconds.into());
        let mut words = command.iter().cloned();
        let to_run = words.next().map(|program| {
            let mut command = Command::new(program);
            command.args(words).env("SHMESH_RESOURCE", resource).env("SHMESH_DEVICE", device);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
            command
        });
        async move {
            let Some(mut command) = to_run else { return Ok(()) };
            let named = format!("{:?}", command.as_std().get_program());
            let status = timeout(limit, command.status())
                .await
                .with_context(|| format!("the health command {named} timed out after {} s", limit.as_secs()))?
                .with_context(|| format!("the health command {named} cannot be run"))?;
            ensure!(status.success(), "the health command {named} failed: {status}");
            Ok(())
        }
    }
}
