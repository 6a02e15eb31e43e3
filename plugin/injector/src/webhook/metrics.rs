//! What `/metrics` shows.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::review::Outcome;

/// Seconds: a tenth of a millisecond is usual, and 5 ms are the promise.
const BUCKETS: [f64; 9] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.1, 1.0];

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Labels {
    outcome: &'static str,
    reason: &'static str,
}

/// What the webhook counts.
///
/// ```
/// use shmesh_injector::webhook::Metrics;
/// let mut registry = Default::default();
/// Metrics::default().register(&mut registry);
/// let mut text = String::new();
/// prometheus_client::encoding::text::encode(&mut text, &registry)?;
/// assert!(text.contains("shmesh_injector_admission_seconds"));
/// # Ok::<(), std::fmt::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Metrics {
    admissions: Family<Labels, Counter>,
    seconds: Histogram,
    turned_away: Counter,
    broken: Counter,
    certificates: Counter,
    certificate_failures: Counter,
    certificate_until: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            admissions: Family::default(),
            seconds: Histogram::new(BUCKETS),
            turned_away: Counter::default(),
            broken: Counter::default(),
            certificates: Counter::default(),
            certificate_failures: Counter::default(),
            certificate_until: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Registers all of them.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("shmesh_injector");
        registry.register(
            "admissions",
            "Pods by outcome, and what was refused by reason",
            self.admissions.clone(),
        );
        let help = "How long an answer takes, without TLS";
        registry.register_with_unit("admission", help, Unit::Seconds, self.seconds.clone());
        registry.register(
            "turned_away",
            "Connections for which there was no place",
            self.turned_away.clone(),
        );
        registry.register("broken", "Connections that ended with an error", self.broken.clone());
        registry.register("certificates", "Certificates that this replica made", self.certificates.clone());
        let help = "Times that the certificate could not be looked after";
        registry.register("certificate_failures", help, self.certificate_failures.clone());
        let help = "Until when the certificate is good, after 1970; 0 where somebody else keeps it";
        registry.register_with_unit("certificate_until", help, Unit::Seconds, self.certificate_until.clone());
    }

    pub(super) fn answered(&self, outcome: Outcome, took: Duration) {
        let reason = if let Outcome::Refused(reason) = outcome { reason } else { "" };
        self.admissions.get_or_create(&Labels { outcome: outcome.as_str(), reason }).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    pub(super) fn malformed(&self) {
        self.admissions.get_or_create(&Labels { outcome: "malformed", reason: "" }).inc();
    }

    pub(super) fn turned_away(&self) {
        self.turned_away.inc();
    }

    pub(super) fn broken(&self) {
        self.broken.inc();
    }

    pub(super) fn certificate(&self, made: bool, until: u64) {
        self.certificates.inc_by(u64::from(made));
        self.certificate_until.set(i64::try_from(until).unwrap_or(i64::MAX));
    }

    pub(super) fn certificate_failed(&self) {
        self.certificate_failures.inc();
    }
}
