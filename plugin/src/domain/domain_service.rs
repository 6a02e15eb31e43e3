//! Serves the DRA driver: registration, claims, slices and health, until the plugin stops.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use kube::Client;
use kubelet_dra::{DriverSettings, SlicePublisher, serve};
use shmesh_sys::mount::{FsKind, file_system};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::claim_metrics::ClaimMetrics;
use super::claim_store::{ClaimStore, StoreSettings};
use super::directory_owner::DirectoryOwner;
use super::directory_watch::DirectoryWatch;
use super::drain::is_draining;
use super::driver::{DomainDriver, SharedClaims, device_health};
use super::slice::{budget, devices};
use crate::cdi::SpecFiles;
use crate::config::{Bytes, Config};

/// The kernel's identification of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Opens the store of claims and repairs what a crash or a reboot left.
pub(crate) fn open_claims(config: &Config, metrics: ClaimMetrics) -> Result<SharedClaims> {
    let boot_id = std::fs::read_to_string(BOOT_ID).context("cannot read the boot id")?.trim().to_owned();
    ensure!(!boot_id.is_empty(), "{BOOT_ID} is empty");
    let seen_directory = config.seen(&config.dra.directory);
    check_file_system(&seen_directory)?;
    let owner = DirectoryOwner::claim(config)?;
    let store = ClaimStore::open(StoreSettings {
        directory: config.dra.directory.clone(),
        seen_directory,
        state_directory: config.state_directory(),
        gids: config.dra.gids.range(),
        files: SpecFiles { directory: config.seen(&config.cdi.directory), domain: config.domain.clone() },
        agent: config.identity.directory.clone(),
        seen_agent: config.seen(&config.identity.directory),
        boot_id,
    })?;
    Ok(SharedClaims::new(store, metrics, Some(owner)))
}

/// Requires memory under the directories of claims, so that a reboot removes them and nothing is written to a disk.
fn check_file_system(directory: &Path) -> Result<()> {
    let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(directory);
    let found = file_system(existing).with_context(|| format!("cannot look at {}", existing.display()))?;
    ensure!(
        !matches!(found.kind, FsKind::Other(_)),
        "dra.directory: {} is not on a tmpfs; choose a directory below /dev/shm, or mount a tmpfs there",
        existing.display()
    );
    Ok(())
}

/// A DRA driver with everything that it needs to run.
#[derive(Debug)]
pub(crate) struct DomainService {
    pub(crate) driver: DomainDriver,
    /// Distinguishes this process from others on the node: the uid of the pod.
    pub(crate) instance: String,
    /// Memory of the node in bytes.
    pub(crate) memory: u64,
}

impl DomainService {
    /// Runs until `stop`. Calls `ready` when the kubelet has registered the driver and the slices are published, for the first
    /// time.
    pub(crate) async fn run(
        self,
        ready: impl FnOnce() + Send + 'static,
        stop: CancellationToken,
    ) -> Result<()> {
        let Self { driver, instance, memory } = self;
        let mut resources = driver.resources.clone();
        let node = driver.node.clone();
        let (config, offered) = resources.borrow_and_update().clone();
        log_offer(&config, memory);
        let settings = DriverSettings {
            driver: config.domain.clone(),
            node: node.clone(),
            instance,
            plugins_dir: config.dra.plugins_dir.clone(),
            registry_dir: config.kubelet.plugins_registry_dir.clone(),
        };
        let client = kube::Config::infer().await.context("no API server is configured")?;
        let client = Client::try_from(client).context("cannot connect to the API server")?;

        let state_directory = config.state_directory();
        let claims = driver.claims.clone();
        // The watch first, so that no change after the look is missed.
        let mut watched = DirectoryWatch::new([state_directory.clone(), config.seen(&config.dra.directory)]);
        let (draining, problem) = (is_draining(&state_directory), claims.problem(&config));
        let (to_slices, listed) =
            watch::channel(devices(&config, &offered, memory, draining, problem.is_some()));
        let (to_health, health) = watch::channel(device_health(&node, &offered, problem.as_deref()));
        let follow = async move {
            let (mut was_draining, mut had_problem) = (draining, problem);
            loop {
                tokio::select! {
                    changed = resources.changed() => if changed.is_err() {
                        // The plugin stops.
                        return std::future::pending().await;
                    },
                    () = watched.changed() => {}
                }
                let (config, offered) = resources.borrow_and_update().clone();
                let (draining, problem) = (is_draining(&state_directory), claims.problem(&config));
                if problem != had_problem {
                    warn!(problem, "the health of the domain device changed");
                    had_problem = problem;
                }
                if draining != was_draining {
                    info!(draining, "draining changed: a draining node gets no new claims");
                    was_draining = draining;
                }
                // Unchanged values are not sent: nothing is written while nothing changes.
                let has_problem = had_problem.is_some();
                replace(&to_slices, devices(&config, &offered, memory, draining, has_problem));
                replace(&to_health, device_health(&node, &offered, had_problem.as_deref()));
            }
        };
        let publisher = SlicePublisher::new(client.clone(), &settings);
        let mut state = publisher.state();
        let mut registered = driver.registered.subscribe();
        tokio::spawn(async move {
            if state.wait_for(|state| state.published).await.is_ok()
                && registered.wait_for(|is_registered| *is_registered).await.is_ok()
            {
                info!("ready: the kubelet has registered the driver, and the node's slices are published");
                ready();
            }
        });
        let (statuses, status_client) = (driver.statuses.clone(), client.clone());
        let writing = statuses.run(&status_client, &config.domain);
        let publishing = publisher.run(listed, stop.clone());
        let serving = serve(settings, client, Arc::new(driver), health, stop.clone());
        tokio::select! {
            served = async { tokio::join!(serving, publishing).0 } => {
                served.map_err(|error| anyhow!(error).context("the DRA driver cannot be served"))
            }
            () = follow => Ok(()),
            () = writing => Ok(()),
        }
    }
}

/// Sends a value if it is another one.
fn replace<T: PartialEq>(to: &watch::Sender<T>, new: T) {
    to.send_if_modified(|old| {
        let is_changed = new != *old;
        if is_changed {
            *old = new;
        }
        is_changed
    });
}

/// Logs what the node offers to claims.
fn log_offer(config: &Config, memory: u64) {
    let bytes = Bytes(budget(config, memory)).to_string();
    let directory = config.dra.directory.display();
    let (first, count) = (config.dra.gids.first, config.dra.gids.count);
    info!(bytes, %directory, first, count, "claims of {} get a directory and a group of their own", config.domain);
}
