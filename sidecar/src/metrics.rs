//! What `/metrics` shows.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::broker::{Reason, Stats};
use crate::links::Kept;

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByReason {
    reason: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByLink {
    link: String,
}

/// Counters and gauges of one sidecar.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    links: Gauge,
    bytes: Family<ByLink, Gauge<i64>>,
    participants: Family<ByLink, Gauge<i64>>,
    sessions: Gauge,
    keys: Gauge,
    attached: Counter,
    denied: Family<ByReason, Counter>,
    reaped: Counter,
    refused_connections: Counter,
}

impl Metrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        for reason in Reason::ALL.iter().map(|reason| reason.as_str()).chain(["slow"]) {
            let _ = self.denied.get_or_create(&ByReason { reason });
        }
        let registry = registry.sub_registry_with_prefix("shmesh_sidecar");
        registry.register("links", "Links that are kept", self.links.clone());
        registry.register("link_bytes", "Bytes of all segments of a link", self.bytes.clone());
        registry.register("participants", "Participants of a link", self.participants.clone());
        registry.register("sessions", "Connections of participants", self.sessions.clone());
        registry.register("keys", "Device keys", self.keys.clone());
        registry.register("attached", "Descriptors of a link handed to a participant", self.attached.clone());
        registry.register("denied", "Requests and connections refused", self.denied.clone());
        registry.register("reaped", "Participants whose holdings were taken back", self.reaped.clone());
        registry.register(
            "refused_connections",
            "Connections closed because all places were taken",
            self.refused_connections.clone(),
        );
    }

    pub(crate) fn observe(&self, links: &[Kept], sessions: usize, broker: Stats) {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.links.set(gauge(links.len()));
        self.sessions.set(gauge(sessions));
        self.keys.set(gauge(broker.keys));
        for kept in links {
            let by = ByLink { link: kept.keeper.name().to_owned() };
            self.bytes.get_or_create(&by).set(i64::try_from(kept.keeper.segment_bytes()).unwrap_or(i64::MAX));
            self.participants.get_or_create(&by).set(gauge(kept.keeper.participants().count()));
        }
    }

    pub(crate) fn attached(&self) {
        self.attached.inc();
    }

    pub(crate) fn denied(&self, reason: &'static str) {
        self.denied.get_or_create(&ByReason { reason }).inc();
    }

    pub(crate) fn reaped(&self, participants: u32) {
        self.reaped.inc_by(participants.into());
    }

    pub(crate) fn refused_connection(&self) {
        self.refused_connections.inc();
    }
}
