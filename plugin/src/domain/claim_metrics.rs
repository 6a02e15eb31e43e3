//! Metrics of the claims on this node.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::claim_store::ClaimStore;

/// Histogram buckets for Prepare, in seconds.
const BOUNDS: [f64; 9] = [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.25, 1.0];

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ClaimFailure {
    call: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ClaimState {
    state: &'static str,
}

/// Counters and gauges of claims.
#[derive(Clone, Debug)]
pub(crate) struct ClaimMetrics {
    prepared: Counter,
    released: Counter,
    failures: Family<ClaimFailure, Counter>,
    duration: Histogram,
    claims: Family<ClaimState, Gauge>,
    bytes: Gauge,
    registered: Gauge,
}

impl Default for ClaimMetrics {
    fn default() -> Self {
        Self {
            prepared: Counter::default(),
            released: Counter::default(),
            failures: Family::default(),
            duration: Histogram::new(BOUNDS),
            claims: Family::default(),
            bytes: Gauge::default(),
            registered: Gauge::default(),
        }
    }
}

impl ClaimMetrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("shmesh_plugin");
        registry.register(
            "claims_prepared",
            "Claims prepared, again or for the first time",
            self.prepared.clone(),
        );
        registry.register("claims_released", "Claims released", self.released.clone());
        registry.register(
            "claim_failures",
            "Claims that could not be prepared or released",
            self.failures.clone(),
        );
        registry.register_with_unit(
            "claim_prepare",
            "Time to prepare a claim, without the API server",
            Unit::Seconds,
            self.duration.clone(),
        );
        registry.register(
            "claims",
            "Claims on this node: prepared, or released with files left",
            self.claims.clone(),
        );
        registry.register("claims_reserved_bytes", "Memory that prepared claims reserve", self.bytes.clone());
        registry.register(
            "dra_registered",
            "Whether the kubelet has registered the DRA driver, as it said last",
            self.registered.clone(),
        );
    }

    /// Records what the kubelet said about the registration.
    pub(super) fn registered(&self, is_registered: bool) {
        self.registered.set(is_registered.into());
    }

    /// Counts a Prepare, and its failure by reason.
    pub(super) fn prepared(&self, took: Duration, failure: Option<&'static str>) {
        self.duration.observe(took.as_secs_f64());
        self.count("prepare", &self.prepared, failure);
    }

    /// Counts an Unprepare, and its failure by reason.
    pub(super) fn released(&self, failure: Option<&'static str>) {
        self.count("unprepare", &self.released, failure);
    }

    fn count(&self, call: &'static str, done: &Counter, failure: Option<&'static str>) {
        match failure {
            None => drop(done.inc()),
            Some(reason) => drop(self.failures.get_or_create(&ClaimFailure { call, reason }).inc()),
        }
    }

    /// Records what claims hold.
    pub(super) fn hold(&self, store: &ClaimStore) {
        let (mut prepared, mut released, mut bytes) = (0_i64, 0_i64, 0_u64);
        for (_, entry) in store.claims() {
            if entry.is_released {
                released += 1;
            } else {
                prepared += 1;
                let domain = entry.grant.as_ref().and_then(|grant| grant.domain.as_ref());
                bytes = bytes.saturating_add(domain.map_or(0, |domain| domain.bytes));
            }
        }
        for (state, count) in [("prepared", prepared), ("released", released)] {
            self.claims.get_or_create(&ClaimState { state }).set(count);
        }
        self.bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}
