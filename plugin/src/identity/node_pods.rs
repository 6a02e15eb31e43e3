//! The pods of this node from the API server, by a watch that begins with those that exist.
//!
//! A list would have all pods in one answer, of which users decide how large it is; a watch has one pod in each line, and a line that is
//! too long costs the name of that pod only. Kubernetes never uses a uid again, so an entry cannot become wrong. While the API server
//! is unavailable, known pods keep their names, and new ones are unconfirmed.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http_body_util::{BodyExt, Limited};
use kube::Client;
use kube::api::{WatchEvent, WatchParams};
use kube::client::Body;
use kube::core::Request;
use kubelet_dra::backoff::{Backoff, up_to};
use serde::Deserialize;
use shmesh_daemon::log_limit::LogLimit;
use shmesh_proto::identity::Pod;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::limits::{MAX_CONTAINERS_PER_POD, MAX_EVENT_BYTES, MAX_PODS};
use super::pods::Pods;
use crate::REPEATED_LOG;

/// Path of the pods of all namespaces.
const PATH: &str = "/api/v1/pods";
/// Time limit for opening a watch.
const REQUEST: Duration = Duration::from_secs(10);
/// Maximum size of the reason for which a watch was refused.
const MAX_REASON_BYTES: usize = 8 << 10;
/// Seconds after which the API server ends a watch.
const WATCH_SECONDS: u32 = 290;
/// Time without an event or bookmark after which the connection counts as lost. The API server sends a bookmark every minute.
const SILENCE: Duration = Duration::from_secs(150);
/// Age from which a watch that ended is opened again without a delay.
const WORKED: Duration = Duration::from_secs(30);
/// Delays between attempts, of which a random half is left out, so that the nodes of a cluster do not all ask at one moment.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The pods that are bound to this node.
#[derive(Debug)]
pub(crate) struct NodePods {
    by_uid: RefCell<HashMap<String, NodePod>>,
    /// Maximum size of an event in bytes.
    event_limit: usize,
    is_listed: watch::Sender<bool>,
}

/// How far the watch has come.
#[derive(Debug, Default)]
struct Progress {
    /// The version of the last bookmark. Before the first one there is none: pods that exist come in any order of their versions.
    version: Option<String>,
    /// The uids that came since the watch began anew.
    seen: HashSet<String>,
    /// Whether the API server cannot be asked for a bookmark at the end of the pods that exist, as versions before 1.34. It then comes
    /// within a minute.
    is_end_unmarked: bool,
    /// Whether an event was too long to be read. A pod may have been deleted by it, so the next watch begins anew.
    is_incomplete: bool,
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

impl NodePods {
    pub(crate) fn new() -> Self {
        Self {
            by_uid: RefCell::default(),
            event_limit: MAX_EVENT_BYTES,
            is_listed: watch::Sender::new(false),
        }
    }

    /// Becomes true when the pods that existed at the start are known.
    pub(crate) fn is_listed(&self) -> watch::Receiver<bool> {
        self.is_listed.subscribe()
    }

    /// Follows the pods of `node` for ever.
    pub(crate) async fn follow(&self, node: &str, connect: impl AsyncFn() -> Result<Client>) {
        // Without those that have ended, of which a node can have any number.
        let selector = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
        let (mut progress, mut backoff) = (Progress::default(), Backoff::new(RETRY.0, RETRY.1));
        let mut complaints = REPEATED_LOG;
        loop {
            let opened = Instant::now();
            let ended = self.watch(&selector, &connect, &mut progress).await;
            if let Err(error) = &ended
                && let Some(suppressed) = complaints.allow(std::time::Instant::now())
            {
                let error = format!("{error:#}");
                warn!(
                    error,
                    suppressed, "cannot follow the pods of this node; new pods have no names until then"
                );
            }
            if ended.is_err() || opened.elapsed() < WORKED {
                let delay = backoff.delay();
                sleep(delay / 2 + up_to(delay / 2)).await;
            }
        }
    }

    /// Goes on from where the last watch was, until this one ends.
    async fn watch(
        &self,
        selector: &str,
        connect: impl AsyncFn() -> Result<Client>,
        progress: &mut Progress,
    ) -> Result<()> {
        let client = connect().await?;
        let opened = timeout(REQUEST, self.open(&client, selector, progress)).await;
        let mut events = opened.context("opening the watch of pods timed out")??;
        loop {
            let line = timeout(SILENCE, events.next()).await;
            progress.is_incomplete |= events.has_skipped;
            let line = line.context("the watch of pods is silent")?;
            let Some(line) = line.context("the watch of pods broke off")? else { return Ok(()) };
            let event = serde_json::from_slice(&line).context("an event of the watch of pods cannot be read");
            self.apply(event.inspect_err(|_| progress.version = None)?, progress)?;
        }
    }

    async fn open(&self, client: &Client, selector: &str, progress: &mut Progress) -> Result<WatchLines> {
        if std::mem::take(&mut progress.is_incomplete) {
            progress.version = None;
        }
        let mut params = WatchParams::default().fields(selector).timeout(WATCH_SECONDS);
        if progress.version.is_none() {
            progress.seen.clear();
            if !progress.is_end_unmarked {
                params = params.initial_events();
            }
        }
        // Version 0 is answered from the API server's cache, which may be a moment behind. etcd would read the pods of the whole cluster.
        let version = progress.version.as_deref().unwrap_or("0");
        let answer = client.send(Request::new(PATH).watch(&params, version)?.map(Body::from)).await?;
        let (status, body) = (answer.status(), answer.into_body());
        if status.is_success() {
            let limit = self.event_limit;
            return Ok(WatchLines {
                body,
                buffer: Vec::new(),
                limit,
                is_too_long: false,
                has_skipped: false,
                complaints: REPEATED_LOG,
            });
        }
        // 400 Bad Request or 422 Unprocessable Entity, by version.
        progress.is_end_unmarked |= progress.version.is_none() && matches!(status.as_u16(), 400 | 422);
        // 410 Gone, for example: the changes since then are no longer known. An API server that is overloaded still knows them.
        if matches!(status.as_u16(), 400 | 410 | 422) {
            progress.version = None;
        }
        let reason = Limited::new(body, MAX_REASON_BYTES).collect().await;
        let reason =
            reason.map_or_else(|error| error.to_string().into(), http_body_util::Collected::to_bytes);
        bail!("the watch of pods was refused ({status}): {}", String::from_utf8_lossy(&reason));
    }

    fn apply(&self, event: WatchEvent<PodObject>, progress: &mut Progress) -> Result<()> {
        let mut known = self.by_uid.borrow_mut();
        match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                let Some((uid, pod)) = NodePod::of(pod) else { return Ok(()) };
                let is_listing = progress.version.is_none();
                if is_listing && progress.seen.len() < MAX_PODS {
                    progress.seen.insert(uid.clone());
                }
                // Until the end of the list, as many pods of before may be known that are gone.
                let limit = if is_listing { 2 * MAX_PODS } else { MAX_PODS };
                if known.len() < limit || known.contains_key(&uid) {
                    known.insert(uid, pod);
                }
            }
            WatchEvent::Deleted(pod) => drop(known.remove(&pod.metadata.uid)),
            WatchEvent::Bookmark(bookmark) => {
                if progress.version.replace(bookmark.metadata.resource_version).is_none() {
                    let seen = std::mem::take(&mut progress.seen);
                    known.retain(|uid, _| seen.contains(uid));
                    if !self.is_listed.send_replace(true) {
                        info!(pods = known.len(), "pods of this node listed");
                    }
                }
            }
            WatchEvent::Error(status) => {
                progress.version = None;
                return Err(kube::Error::Api(status).into());
            }
        }
        Ok(())
    }
}

/// The lines of a watch, of which one is in memory.
struct WatchLines {
    body: Body,
    /// The bytes that were received after the last line.
    buffer: Vec<u8>,
    /// Maximum length of a line in bytes.
    limit: usize,
    is_too_long: bool,
    /// Whether a line was skipped.
    has_skipped: bool,
    complaints: LogLimit,
}

impl WatchLines {
    /// Returns the next line that is not too long; `None` at the end.
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(searched + end + 1);
                let line = std::mem::replace(&mut self.buffer, rest);
                if !std::mem::take(&mut self.is_too_long) && line.len() <= self.limit {
                    return Ok(Some(line));
                }
                self.has_skipped = true;
                if let Some(suppressed) = self.complaints.allow(std::time::Instant::now()) {
                    let limit = self.limit;
                    warn!(
                        limit,
                        suppressed,
                        "a pod of this node has more bytes of JSON than the limit; it may have no name"
                    );
                }
                searched = 0;
                continue;
            }
            if self.buffer.len() > self.limit {
                self.is_too_long = true;
                self.buffer = Vec::new();
            }
            searched = self.buffer.len();
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            self.buffer.extend_from_slice(
                frame.map_err(|error| anyhow!(error))?.data_ref().map_or(&[], |data| data),
            );
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

#[cfg(test)]
#[path = "tests/node_pods.rs"]
mod tests;
