//! Metrics of the webhook.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::slots::Limit;
use crate::review::Outcome;

/// Buckets in seconds: 0.1 ms is typical, 5 ms is the limit.
const BUCKETS: [f64; 9] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.1, 1.0];

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct RequestLabels {
    outcome: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByLimit {
    limit: &'static str,
}

/// Counters and gauges of the webhook.
#[derive(Clone, Debug)]
pub struct Metrics {
    admissions: Family<RequestLabels, Counter>,
    seconds: Histogram,
    refused_connections: Counter,
    evicted: Family<ByLimit, Counter>,
    failed_connections: Counter,
    certificates: Counter,
    certificate_failures: Counter,
    certificate_expiry: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            admissions: Family::default(),
            seconds: Histogram::new(BUCKETS),
            refused_connections: Counter::default(),
            evicted: Family::default(),
            failed_connections: Counter::default(),
            certificates: Counter::default(),
            certificate_failures: Counter::default(),
            certificate_expiry: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Registers all metrics with the prefix `shmesh_injector`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("shmesh_injector");
        registry.register(
            "admissions",
            "Admission requests by outcome, and refusals by reason",
            self.admissions.clone(),
        );
        let help = "Time to answer an admission request, without TLS";
        registry.register_with_unit("admission", help, Unit::Seconds, self.seconds.clone());
        registry.register(
            "refused_connections",
            "Connections refused because every other connection was being answered",
            self.refused_connections.clone(),
        );
        registry.register(
            "evicted",
            "Connections closed to make room for new ones, by the limit that was reached",
            self.evicted.clone(),
        );
        registry.register("failed_connections", "Connections that failed", self.failed_connections.clone());
        registry.register("certificates", "Certificates issued by this replica", self.certificates.clone());
        let help = "Failed attempts to renew or publish the certificate";
        registry.register("certificate_failures", help, self.certificate_failures.clone());
        let help = "Expiry of the certificate in seconds since 1970; 0 if it is managed externally";
        registry.register_with_unit(
            "certificate_expiry_timestamp",
            help,
            Unit::Seconds,
            self.certificate_expiry.clone(),
        );
    }

    pub(super) fn answered(&self, outcome: Outcome, took: Duration) {
        let reason = if let Outcome::Refused(reason) = outcome { reason } else { "" };
        self.admissions.get_or_create(&RequestLabels { outcome: outcome.as_str(), reason }).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    pub(super) fn malformed(&self) {
        self.admissions.get_or_create(&RequestLabels { outcome: "malformed", reason: "" }).inc();
    }

    pub(super) fn refused_connections(&self) {
        self.refused_connections.inc();
    }

    pub(super) fn evicted(&self, limit: Limit) {
        self.evicted.get_or_create(&ByLimit { limit: limit.as_str() }).inc();
    }

    pub(super) fn failed_connections(&self) {
        self.failed_connections.inc();
    }

    pub(super) fn failed_connection_count(&self) -> u64 {
        self.failed_connections.get()
    }

    pub(super) fn certificate(&self, made: bool, until: u64) {
        self.certificates.inc_by(u64::from(made));
        self.certificate_expiry.set(i64::try_from(until).unwrap_or(i64::MAX));
    }

    pub(super) fn certificate_failed(&self) {
        self.certificate_failures.inc();
    }
}
