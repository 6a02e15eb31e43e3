//! The pods of this node from the API server: a list, then a watch of its changes.
//!
//! Kubernetes never uses a uid again, so an entry cannot become wrong. While the API server is unavailable, known pods keep
//! their names, and new ones are unconfirmed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http_body_util::{BodyExt, Limited};
use kube::Client;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::client::Body;
use kube::core::Request;
use serde::Deserialize;
use shmesh_proto::identity::Pod;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::StreamExt;
use tracing::{debug, info, warn};

use super::limits::{MAX_CONTAINERS_PER_POD, MAX_LIST_BYTES, MAX_PODS};
use super::pods::Pods;
use crate::REPEATED_LOG;

/// Path of the pods of all namespaces.
const PATH: &str = "/api/v1/pods";
/// Time limit for a list, and for opening a watch.
const REQUEST: Duration = Duration::from_secs(10);
/// Maximum size of the reason for which a list was refused.
const MAX_REASON_BYTES: usize = 8 << 10;
/// Seconds after which the API server ends a watch.
const WATCH_SECONDS: u32 = 290;
/// Time without an event or bookmark after which the connection counts as lost. The API server sends a bookmark every minute.
const SILENCE: Duration = Duration::from_secs(150);
/// Age from which a watch counts as one that worked.
const WORKED: Duration = Duration::from_secs(30);
/// Number of failures in sequence after which the pods are listed again.
const WATCH_FAILURES: u32 = 3;
/// Longest delay between attempts. Delays double from one second, and are random between a half and all of that, so that
/// the nodes of a cluster do not come back together.
const LONGEST_DELAY: Duration = Duration::from_secs(30);

/// The pods that are bound to this node.
#[derive(Debug)]
pub(crate) struct NodePods {
    by_uid: RefCell<HashMap<String, NodePod>>,
    /// Maximum size of a list in bytes.
    list_limit: usize,
    is_listed: watch::Sender<bool>,
}

#[derive(Debug)]
struct NodePod {
    /// The pod, without the fields of a container.
    pod: Pod,
    /// Id and name of each container.
    containers: Vec<(String, String)>,
}

/// The fields of a pod that are read. The parser skips all others.
#[derive(Clone, Debug, Deserialize)]
struct PodObject {
    metadata: PodMetadata,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodMetadata {
    uid: String,
    namespace: String,
    name: String,
    resource_version: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    service_account_name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodStatus {
    init_container_statuses: Vec<ContainerStatus>,
    container_statuses: Vec<ContainerStatus>,
    ephemeral_container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    #[serde(rename = "containerID")]
    container_id: String,
}

#[derive(Debug, Deserialize)]
struct PodList {
    metadata: ListMetadata,
    items: Vec<PodObject>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: String,
}

impl NodePods {
    pub(crate) fn new() -> Self {
        Self { by_uid: RefCell::default(), list_limit: MAX_LIST_BYTES, is_listed: watch::Sender::new(false) }
    }

    /// Becomes true after the first list.
    pub(crate) fn is_listed(&self) -> watch::Receiver<bool> {
        self.is_listed.subscribe()
    }

    /// Follows the pods of `node` for ever.
    pub(crate) async fn follow(&self, node: &str, connect: impl AsyncFn() -> Result<Client>) {
        let (mut failures, mut complaints) = (0, REPEATED_LOG);
        loop {
            let Err(error) = self.list_and_watch(node, &connect, &mut failures).await;
            if let Some(suppressed) = complaints.allow(std::time::Instant::now()) {
                let error = format!("{error:#}");
                warn!(
                    error,
                    suppressed, "cannot follow the pods of this node; new pods have no names until then"
                );
            }
            failures = failures.saturating_add(1);
            sleep(delay(failures)).await;
        }
    }

    async fn list_and_watch(
        &self,
        node: &str,
        connect: impl AsyncFn() -> Result<Client>,
        failures: &mut u32,
    ) -> Result<std::convert::Infallible> {
        let client = connect().await?;
        // Without those that have ended, of which a node can have any number.
        let selector = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
        let mut version = self.list(&client, &selector).await?;
        loop {
            let opened = Instant::now();
            let ended = self.watch(&client, &selector, &mut version).await;
            *failures = if opened.elapsed() >= WORKED { 0 } else { failures.saturating_add(1) };
            if let Err(error) = ended {
                debug!(error = format!("{error:#}"), "the watch of pods ended");
                if is_expired(&error) || *failures > WATCH_FAILURES {
                    return Err(error);
                }
            }
            if *failures > 0 {
                sleep(delay(*failures)).await;
            }
        }
    }

    /// Replaces all pods, and returns the version of the list.
    async fn list(&self, client: &Client, selector: &str) -> Result<String> {
        // The API server's cache may be a moment behind, and the watch brings the rest. Its cache has an index by node; etcd
        // would read the pods of the whole cluster.
        let params = ListParams::default().fields(selector).match_any();
        let request = Request::new(PATH).list(&params)?;
        let list = async {
            let answer = client.send(request.map(Body::from)).await?;
            // The body of an error has the reason, which is logged.
            let status = answer.status();
            let limit = if status.is_success() { self.list_limit } else { MAX_REASON_BYTES };
            let mut body = Limited::new(answer.into_body(), limit);
            let mut bytes = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| anyhow!(error)).with_context(|| {
                    format!("the list of pods was not read ({status}, at most {limit} bytes are)")
                })?;
                bytes.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
            }
            if !status.is_success() {
                bail!("the list of pods was refused: {}", String::from_utf8_lossy(&bytes));
            }
            serde_json::from_slice::<PodList>(&bytes).context("the list of pods cannot be read")
        };
        let list = timeout(REQUEST, list).await.context("the list of pods timed out")??;
        let count = list.items.len();
        let kept = list.items.into_iter().take(MAX_PODS);
        let pods: HashMap<_, _> = kept.filter_map(NodePod::of).collect();
        if count > pods.len() {
            warn!(
                pods = count,
                known = pods.len(),
                "some pods of this node have no uid, or there are too many"
            );
        }
        self.by_uid.replace(pods);
        if !self.is_listed.send_replace(true) {
            info!(pods = count, "pods of this node listed");
        }
        Ok(list.metadata.resource_version)
    }

    /// Follows the changes after `version` until the watch ends.
    async fn watch(&self, client: &Client, selector: &str, version: &mut String) -> Result<()> {
        let params = WatchParams::default().fields(selector).timeout(WATCH_SECONDS);
        let request = Request::new(PATH).watch(&params, version)?;
        let opened = timeout(REQUEST, client.request_events::<PodObject>(request)).await;
        let mut events = std::pin::pin!(opened.context("opening the watch of pods timed out")??);
        loop {
            let event = timeout(SILENCE, events.next()).await.context("the watch of pods is silent")?;
            match event.transpose()? {
                None => return Ok(()),
                Some(WatchEvent::Added(pod) | WatchEvent::Modified(pod)) => {
                    version.clone_from(&pod.metadata.resource_version);
                    let mut known = self.by_uid.borrow_mut();
                    if let Some((uid, pod)) = NodePod::of(pod)
                        && (known.len() < MAX_PODS || known.contains_key(&uid))
                    {
                        known.insert(uid, pod);
                    }
                }
                Some(WatchEvent::Deleted(pod)) => {
                    *version = pod.metadata.resource_version;
                    self.by_uid.borrow_mut().remove(&pod.metadata.uid);
                }
                Some(WatchEvent::Bookmark(bookmark)) => *version = bookmark.metadata.resource_version,
                Some(WatchEvent::Error(status)) => return Err(kube::Error::Api(status).into()),
            }
        }
    }
}

impl NodePod {
    /// Returns the uid, and what is kept; `None` without a uid.
    fn of(object: PodObject) -> Option<(String, Self)> {
        let PodMetadata { uid, namespace, name, .. } = object.metadata;
        let PodStatus { init_container_statuses, container_statuses, ephemeral_container_statuses } =
            object.status;
        let statuses =
            init_container_statuses.into_iter().chain(container_statuses).chain(ephemeral_container_statuses);
        // As in `containerd://<id>`; containers that have not started have none.
        let id = |status: &ContainerStatus| Some(status.container_id.split_once("://")?.1.to_owned());
        let containers = statuses
            .filter_map(|status| Some((id(&status)?, status.name)))
            .take(MAX_CONTAINERS_PER_POD)
            .collect();
        let service_account = object.spec.service_account_name;
        let pod =
            Pod { uid: uid.clone(), namespace, name, service_account, confirmed: true, ..Pod::default() };
        (!uid.is_empty()).then_some((uid, Self { pod, containers }))
    }

    fn name_of(&self, container_id: &str) -> Option<&str> {
        self.containers.iter().find(|(id, _)| id == container_id).map(|(_, name)| name.as_str())
    }
}

impl Pods for NodePods {
    /// A pod is confirmed by its uid. Its container has no name until the kubelet has reported that it started.
    fn find(&self, uid: Option<&str>, container_id: &str) -> Option<Pod> {
        let known = self.by_uid.borrow();
        let pod = match uid {
            Some(uid) => known.get(uid)?,
            None => known.values().find(|pod| pod.name_of(container_id).is_some())?,
        };
        let container = pod.name_of(container_id).unwrap_or_default().to_owned();
        Some(Pod { container, container_id: container_id.to_owned(), ..pod.pod.clone() })
    }
}

/// Whether the changes after the version are no longer known, so that the pods must be listed.
fn is_expired(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 410)
}

fn delay(failures: u32) -> Duration {
    let longest = LONGEST_DELAY.min(Duration::from_secs(1 << failures.saturating_sub(1).min(5)));
    // Each of these hashes nothing with keys of its own, which are random.
    let random = u32::try_from(RandomState::new().hash_one(()) >> 32).unwrap_or_default();
    longest.mul_f64(0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}

#[cfg(test)]
#[path = "tests/node_pods.rs"]
mod tests;
