//! The scenarios, in the order in which they run. Each has its own namespace with Pod Security *restricted*.
//!
//! | scenario | what it shows |
//! |---|---|
//! | `allocate` | nodes advertise resources; the tests of the chart get memory and a link |
//! | `sized` | a `/dev/shm` with exactly the requested units |
//! | `two_containers` | a link inside a pod |
//! | `two_pods` | a link through a pool between pods of different users |
//! | `share` | a pool for programs of two pods that know nothing of shmesh |
//! | `device_keys` | a device key works only for the admitted process, or the admitted service account |
//! | `kills` | sidecar, applications, plugin, identity service and kubelet are killed in turn, then all processes of pods together |
//! | `upgrade` | the chart is upgraded and rolled back while messages flow |
//! | `rollout` | the plugin is replaced ten times while pods are created, of which none fails; only if asked for |
//! | `claim` | a link in a ResourceClaim between pods of different users, in both orders of creation; only if asked for |
//! | `uninstall` | only documented files remain on the nodes |

mod allocate;
mod claim;
mod device_keys;
mod kills;
mod rollout;
mod share;
mod sized;
mod two_containers;
mod two_pods;
mod uninstall;
mod upgrade;

use std::cell::Cell;
use std::collections::BTreeMap;

use anyhow::Result;
use clap::ValueEnum;
use k8s_openapi::api::core::v1::Pod;

use crate::args::Args;
use crate::cluster::Cluster;
use crate::pods;
use crate::release::Release;
use crate::wait::PollResult;

/// A guarantee that is tested on a cluster.
#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Scenario {
    /// Nodes advertise memory and the pool, and the tests of the chart pass
    Allocate,
    /// Two units give a /dev/shm of 128 MiB, all of it usable and no more
    Sized,
    /// Two containers of a pod exchange messages over an injected link
    TwoContainers,
    /// Two pods of different users in a restricted namespace exchange messages through a pool
    TwoPods,
    /// Two pods of different users share /dev/shm by one annotation, with programs that know nothing of shmesh
    Share,
    /// A device key works for the admitted pod or service account and is refused to another pod that has it
    DeviceKeys,
    /// Sidecar, both applications, plugin, identity service and kubelet are killed in turn, then all processes of pods together, without losing messages
    Kills,
    /// The chart is upgraded and rolled back while pods exchange messages
    Upgrade,
    /// The plugin is replaced ten times while pods are created, of which none fails (with --only)
    Rollout,
    /// With config.mode=dra, two pods of one ResourceClaim are on one node whichever comes first (Kubernetes 1.36; with --only)
    Claim,
    /// After uninstalling, nodes have no sockets, no files in pools, and advertise nothing
    Uninstall,
}

/// The environment of a scenario.
pub(crate) struct Setup<'a> {
    pub(crate) args: &'a Args,
    pub(crate) cluster: Cluster,
    pub(crate) release: Release,
    /// Counter for unique names of tool pods.
    pub(crate) tools: Cell<u32>,
}

impl Scenario {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns a description for `--list`.
    pub(crate) fn shows(self) -> String {
        self.to_possible_value().and_then(|value| Some(value.get_help()?.to_string())).unwrap_or_default()
    }

    /// Whether it runs without being asked for. Clusters before Kubernetes 1.36 have no claims of this kind, and ten replacements
    /// take minutes.
    pub(crate) fn is_default(self) -> bool {
        !matches!(self, Self::Claim | Self::Rollout)
    }

    /// Returns the namespace of the scenario's pods.
    pub(crate) fn namespace(self, args: &Args) -> String {
        format!("{}-{}", args.namespace, self.name())
    }

    /// Runs the scenario in its existing namespace.
    pub(crate) async fn run(self, setup: &Setup<'_>) -> Result<()> {
        let namespace = &self.namespace(setup.args);
        match self {
            Self::Allocate => allocate::run(setup).await,
            Self::Sized => sized::run(setup, namespace).await,
            Self::TwoContainers => two_containers::run(setup, namespace).await,
            Self::TwoPods => two_pods::run(setup, namespace).await,
            Self::Share => share::run(setup, namespace).await,
            Self::DeviceKeys => device_keys::run(setup, namespace).await,
            Self::Kills => kills::run(setup, namespace).await,
            Self::Upgrade => upgrade::run(setup, namespace).await,
            Self::Rollout => rollout::run(setup, namespace).await,
            Self::Claim => claim::run(setup, namespace).await,
            Self::Uninstall => uninstall::run(setup, namespace).await,
        }
    }

    /// Restores the release when the namespace of the scenario is gone.
    pub(crate) async fn after(self, setup: &Setup<'_>) -> Result<()> {
        if self == Self::Claim { claim::after(setup).await } else { Ok(()) }
    }
}

impl Setup<'_> {
    /// Applies pods and waits until each has the wanted state.
    async fn start(&self, text: &str, namespace: &str, wanted: fn(Pod) -> PollResult<Pod>) -> Result<()> {
        let all = pods::prepared(text, namespace, self.args)?;
        for pod in &all {
            self.cluster.apply(pod).await?;
        }
        for pod in &all {
            self.wait_for(namespace, pod["metadata"]["name"].as_str().unwrap_or_default(), wanted).await?;
        }
        Ok(())
    }

    async fn wait_for(&self, namespace: &str, name: &str, wanted: fn(Pod) -> PollResult<Pod>) -> Result<Pod> {
        let look = async || Ok(wanted(self.cluster.pod(namespace, name).await?));
        self.cluster.pace.until(&format!("the pod {name}"), look).await
    }

    /// Waits until the log of a container contains a text.
    async fn said(&self, namespace: &str, pod: &str, container: &str, words: &str) -> Result<()> {
        let what = format!("{words:?} in the log of {pod}/{container}");
        self.cluster
            .pace
            .until(&what, async || {
                let log = self.cluster.log(namespace, pod, container, false).await?;
                Ok(if log.contains(words) {
                    PollResult::There(())
                } else {
                    PollResult::NotYet(log.trim().to_owned())
                })
            })
            .await
    }

    /// Returns the restart count of each container of a namespace.
    async fn restarts(&self, namespace: &str) -> Result<BTreeMap<String, i32>> {
        let pods = self.cluster.pods(namespace, "").await?;
        let of = |pod: &Pod| {
            let named = |name: &str| format!("{}/{name}", pods::name(pod));
            pods::containers(pod).map(|one| (named(&one.name), one.restart_count)).collect::<Vec<_>>()
        };
        Ok(pods.iter().flat_map(of).collect())
    }
}
