//! Kubernetes Events about the node, which `kubectl describe node` shows.
//!
//! Nothing blocks on the API server: an Event that cannot be written soon is dropped and counted. The client
//! exists only while there are Events to write, so an idle node uses neither a connection nor memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Config};
use shmesh_daemon::log_limit::LogLimit;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::metrics::Metrics;

/// Namespace for Events about cluster-scoped objects.
const NAMESPACE: &str = "default";
/// Capacity of the queue of Events to write.
const MAX_QUEUED: usize = 64;
/// Ten at once and then two per minute: a flapping resource must not load the API server.
const PACE: LogLimit = LogLimit::new(10, Duration::from_secs(30));
/// Delays between attempts; after the last one the Event is dropped.
const RETRY_DELAYS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(16)];
/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a note in the API.
const MAX_NOTE: usize = 1024;

/// The type of a Kubernetes Event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum EventType {
    Normal,
    Warning,
}

/// One Event to be written.
#[derive(Clone, Debug)]
pub(crate) struct Notice {
    kind: EventType,
    /// One word in CamelCase, as Kubernetes requires.
    reason: &'static str,
    note: String,
}

/// Queues Events for the writer task; without a node name it discards them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events(Option<(mpsc::Sender<Notice>, Metrics)>);

impl Events {
    /// Starts the writer task for Events about `node`.
    pub(crate) fn about(node: &str, domain: &str, metrics: Metrics) -> Self {
        let (to, notices) = mpsc::channel(MAX_QUEUED);
        let writer = EventWriter {
            node: node.to_owned(),
            controller: format!("{domain}/plugin"),
            // Unique on the node and within the length limit.
            instance: format!("shmesh-plugin-{}", node.chars().take(100).collect::<String>()),
            metrics: metrics.clone(),
        };
        tokio::spawn(writer.run(notices));
        Self(Some((to, metrics)))
    }

    /// Queues an Event, or counts it as dropped if the queue is full.
    pub(crate) fn say(&self, kind: EventType, reason: &'static str, note: impl Into<String>) {
        let Some((to, metrics)) = &self.0 else { return };
        if to.try_send(Notice { kind, reason, note: note.into() }).is_err() {
            metrics.event("dropped");
        }
    }
}

struct EventWriter {
    node: String,
    controller: String,
    instance: String,
    metrics: Metrics,
}

impl EventWriter {
    async fn run(self, mut notices: mpsc::Receiver<Notice>) {
        let (mut pace, mut complaints) = (PACE, crate::REPEATED_LOG);
        while let Some(first) = notices.recv().await {
            let mut client = None;
            let mut next = Some(first);
            while let Some(mut notice) = next {
                next = None;
                match pace.allow(Instant::now()) {
                    None => self.metrics.event("dropped"),
                    Some(suppressed) => {
                        if suppressed > 0 {
                            notice.note = format!("{} ({suppressed} more suppressed)", notice.note);
                        }
                        let outcome = self.write(&mut client, &notice).await;
                        self.metrics.event(if outcome.is_ok() { "ok" } else { "failed" });
                        if let Err(error) = outcome
                            && let Some(suppressed) = complaints.allow(Instant::now())
                        {
                            let (error, reason) = (format!("{error:#}"), notice.reason);
                            warn!(error, reason, suppressed, "cannot write an Event");
                        }
                    }
                }
                next = next.or_else(|| notices.try_recv().ok());
            }
        }
    }

    async fn write(&self, client: &mut Option<Client>, notice: &Notice) -> Result<()> {
        let mut waits = RETRY_DELAYS.into_iter();
        loop {
            match self.attempt(client, notice).await {
                Ok(()) => return Ok(()),
                Err(error) => {
                    // A refused request is not retried; timeouts and server errors are.
                    let is_refused = matches!(
                        error.downcast_ref::<kube::Error>(),
                        Some(kube::Error::Api(status)) if status.code < 500 && status.code != 429
                    );
                    let Some(wait) = waits.next().filter(|_| !is_refused) else { return Err(error) };
                    debug!(error = format!("{error:#}"), "retrying the Event");
                    *client = None;
                    sleep(wait).await;
                }
            }
        }
    }

    async fn attempt(&self, client: &mut Option<Client>, notice: &Notice) -> Result<()> {
        let known = match client.take() {
            Some(known) => known,
            None => connect().await?,
        };
        let events: Api<Event> = Api::namespaced(client.insert(known).clone(), NAMESPACE);
        events.create(&PostParams::default(), &self.event(notice)).await?;
        Ok(())
    }

    fn event(&self, notice: &Notice) -> Event {
        let now = Timestamp::now();
        Event {
            metadata: ObjectMeta {
                // The kubelet's naming scheme for its own Events.
                name: Some(format!("{}.{:x}", self.node, now.as_nanosecond())),
                namespace: Some(NAMESPACE.into()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            action: Some("Advertise".into()),
            reason: Some(notice.reason.into()),
            note: Some(shortened(&notice.note)),
            type_: Some(format!("{:?}", notice.kind)),
            regarding: Some(ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Node".into()),
                name: Some(self.node.clone()),
                // The kubelet uses the node name as uid, and `kubectl describe node` selects by it.
                uid: Some(self.node.clone()),
                ..ObjectReference::default()
            }),
            ..Event::default()
        }
    }
}

/// Connects to the API server of this cluster.
pub(crate) async fn connect() -> Result<Client> {
    let mut config = Config::infer().await.context("no API server is configured")?;
    config.connect_timeout = Some(TIMEOUT);
    config.read_timeout = Some(TIMEOUT);
    config.write_timeout = Some(TIMEOUT);
    Ok(Client::try_from(config)?)
}

/// Cuts a note at the length limit, on a character boundary.
fn shortened(note: &str) -> String {
    let mut end = note.len().min(MAX_NOTE);
    while !note.is_char_boundary(end) {
        end -= 1;
    }
    note[..end].to_owned()
}

/// Logs at start whether Events are written.
pub(crate) fn log_destination(node: Option<&str>) {
    match node {
        Some(node) => info!(node, "writing Events about this node"),
        None => info!("not writing Events: --node is not set"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_is_cut_on_a_character_boundary() {
        assert_eq!(shortened("short"), "short");
        let long = "ä".repeat(MAX_NOTE);
        assert_eq!(shortened(&long).len(), MAX_NOTE);
        assert_eq!(shortened(&format!("x{long}")).len(), MAX_NOTE - 1, "no half character");
    }

    #[tokio::test]
    async fn events_beyond_the_queue_are_dropped_and_counted() {
        let metrics = Metrics::default();
        let events = Events::about("n", "shmesh.io", metrics.clone());
        // The writer does not run until this test awaits.
        for _ in 0..MAX_QUEUED + 3 {
            events.say(EventType::Normal, "Healthy", "it is");
        }
        assert_eq!(metrics.events("dropped"), 3);
        Events::default().say(EventType::Normal, "Healthy", "discarded");
    }
}
