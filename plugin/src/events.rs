//! What happens to the node's resources, as Kubernetes Events about the node: `kubectl describe node` shows them.
//!
//! Nothing waits for the API server: a notice that cannot be written soon is dropped and counted. The client is made when
//! there is something to write and gone afterwards, so that a quiet node costs neither a connection nor memory.

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

/// Events about what has no namespace are there.
const NAMESPACE: &str = "default";
/// What waits to be written.
const MAX_QUEUED: usize = 64;
/// Ten at once, and after that one every half minute: what flaps must not be a load for the API server.
const PACE: LogLimit = LogLimit::new(10, Duration::from_secs(30));
/// Between attempts; then the notice is dropped.
const RETRY_DELAYS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(16)];
/// For one answer.
const LIMIT: Duration = Duration::from_secs(5);
/// What the API server takes of a note.
const MAX_NOTE: usize = 1024;

/// Whether somebody should look.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum EventType {
    Normal,
    Warning,
}

/// One thing that happened.
#[derive(Clone, Debug)]
pub(crate) struct Notice {
    kind: EventType,
    /// One word, in the form that Kubernetes' own have.
    reason: &'static str,
    note: String,
}

/// Takes notices; without a node's name, and does nothing with them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events(Option<(mpsc::Sender<Notice>, Metrics)>);

impl Events {
    /// About this node. Written by a task of the runtime that this is called in.
    pub(crate) fn about(node: &str, domain: &str, metrics: Metrics) -> Self {
        let (to, notices) = mpsc::channel(MAX_QUEUED);
        let writer = Writer {
            node: node.to_owned(),
            controller: format!("{domain}/plugin"),
            // Unique on the node, and short enough.
            instance: format!("shmesh-plugin-{}", node.chars().take(100).collect::<String>()),
            metrics: metrics.clone(),
        };
        tokio::spawn(writer.run(notices));
        Self(Some((to, metrics)))
    }

    /// Says it, some time soon.
    pub(crate) fn say(&self, kind: EventType, reason: &'static str, note: impl Into<String>) {
        let Some((to, metrics)) = &self.0 else { return };
        if to.try_send(Notice { kind, reason, note: note.into() }).is_err() {
            metrics.event("dropped");
        }
    }
}

struct Writer {
    node: String,
    controller: String,
    instance: String,
    metrics: Metrics,
}

impl Writer {
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
                            notice.note = format!("{} ({suppressed} others were not written)", notice.note);
                        }
                        let outcome = self.write(&mut client, &notice).await;
                        self.metrics.event(if outcome.is_ok() { "ok" } else { "failed" });
                        if let Err(error) = outcome
                            && let Some(suppressed) = complaints.allow(Instant::now())
                        {
                            let (error, reason) = (format!("{error:#}"), notice.reason);
                            warn!(error, reason, suppressed, "no Event was written");
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
                    // Refused is refused; what is only late or gone may come back.
                    let is_refused = matches!(
                        error.downcast_ref::<kube::Error>(),
                        Some(kube::Error::Api(status)) if status.code < 500 && status.code != 429
                    );
                    let Some(wait) = waits.next().filter(|_| !is_refused) else { return Err(error) };
                    debug!(error = format!("{error:#}"), "the Event is tried again");
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
                // As the kubelet names its own.
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
                // The kubelet writes the name there too, and `kubectl describe node` asks for that.
                uid: Some(self.node.clone()),
                ..ObjectReference::default()
            }),
            ..Event::default()
        }
    }
}

async fn connect() -> Result<Client> {
    let mut config = Config::infer().await.context("no API server is known")?;
    config.connect_timeout = Some(LIMIT);
    config.read_timeout = Some(LIMIT);
    config.write_timeout = Some(LIMIT);
    Ok(Client::try_from(config)?)
}

/// At most so many bytes, and whole characters.
fn shortened(note: &str) -> String {
    let mut end = note.len().min(MAX_NOTE);
    while !note.is_char_boundary(end) {
        end -= 1;
    }
    note[..end].to_owned()
}

/// Says at start where notices go.
pub(crate) fn log_destination(node: Option<&str>) {
    match node {
        Some(node) => info!(node, "Events are written about it"),
        None => info!("no Events: --node does not say which node this is"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_short_and_whole() {
        assert_eq!(shortened("short"), "short");
        let long = "ä".repeat(MAX_NOTE);
        assert_eq!(shortened(&long).len(), MAX_NOTE);
        assert_eq!(shortened(&format!("x{long}")).len(), MAX_NOTE - 1, "no half character");
    }

    #[tokio::test]
    async fn more_than_can_wait_is_dropped_and_counted() {
        let metrics = Metrics::default();
        let events = Events::about("n", "shmesh.io", metrics.clone());
        // The writer does not run before this test waits.
        for _ in 0..MAX_QUEUED + 3 {
            events.say(EventType::Normal, "Healthy", "it is");
        }
        assert_eq!(metrics.events("dropped"), 3);
        Events::default().say(EventType::Normal, "Healthy", "nobody listens");
    }
}
