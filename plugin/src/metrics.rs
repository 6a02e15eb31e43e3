//! Metrics of the device plugin.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::resource::allocate::UsageByResource;
use crate::resource::{Resource, ResourceKind};

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByResource {
    resource: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByOutcome {
    resource: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByReason {
    resource: String,
    reason: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByHealth {
    resource: String,
    health: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByPool {
    pool: String,
}

/// Histogram buckets for `Allocate`, in seconds.
const BOUNDS: [f64; 8] = [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.05, 1.0];

/// Counters and gauges of the device plugin.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registrations: Family<ByOutcome, Counter>,
    streams: Family<ByResource, Gauge>,
    devices: Family<ByHealth, Gauge>,
    allocations: Family<ByResource, Counter>,
    latency: Histogram,
    refused_allocations: Family<ByReason, Counter>,
    held: Family<ByResource, Gauge>,
    shm_capacity: Gauge,
    shm_reserved: Gauge,
    pool_used: Family<ByPool, Gauge>,
    pool_free: Family<ByPool, Gauge>,
    swept: Family<ByPool, Counter>,
    swept_bytes: Family<ByPool, Counter>,
    reloads: Family<ByResult, Counter>,
    unlisted: Counter,
    events: Family<ByResult, Counter>,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByResult {
    outcome: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            registrations: Family::default(),
            streams: Family::default(),
            devices: Family::default(),
            allocations: Family::default(),
            latency: Histogram::new(BOUNDS),
            refused_allocations: Family::default(),
            held: Family::default(),
            shm_capacity: Gauge::default(),
            shm_reserved: Gauge::default(),
            pool_used: Family::default(),
            pool_free: Family::default(),
            swept: Family::default(),
            swept_bytes: Family::default(),
            reloads: Family::default(),
            unlisted: Counter::default(),
            events: Family::default(),
        }
    }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn by(resource: &str) -> ByResource {
    ByResource { resource: resource.to_owned() }
}

fn outcome(is_good: bool) -> &'static str {
    if is_good { "ok" } else { "failed" }
}

impl Metrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("shmesh_plugin");
        registry.register("registrations", "Registrations with the kubelet", self.registrations.clone());
        registry.register("streams", "ListAndWatch streams that are open", self.streams.clone());
        registry.register("devices", "Devices advertised to the kubelet", self.devices.clone());
        registry.register("allocations", "Allocate requests answered", self.allocations.clone());
        registry.register_with_unit(
            "allocate",
            "Time to answer an Allocate request",
            Unit::Seconds,
            self.latency.clone(),
        );
        registry.register(
            "refused_allocations",
            "Allocation requests refused",
            self.refused_allocations.clone(),
        );
        registry.register(
            "allocated_units",
            "Units held by running containers, as the kubelet lists them",
            self.held.clone(),
        );
        registry.register(
            "shm_capacity_bytes",
            "Shared memory advertised to the kubelet",
            self.shm_capacity.clone(),
        );
        registry.register(
            "shm_reserved_bytes",
            "Shared memory held by running containers",
            self.shm_reserved.clone(),
        );
        registry.register("pool_used_bytes", "Memory used by files in a pool", self.pool_used.clone());
        registry.register(
            "pool_free_bytes",
            "Free space in the file system of a pool",
            self.pool_free.clone(),
        );
        registry.register("swept_files", "Files of dead pods removed from a pool", self.swept.clone());
        registry.register("swept_bytes", "Memory of the removed files", self.swept_bytes.clone());
        registry.register("reloads", "Configuration reloads", self.reloads.clone());
        registry.register(
            "pod_lists_failed",
            "Failed requests for the kubelet's list of pods",
            self.unlisted.clone(),
        );
        registry.register(
            "events",
            "Kubernetes Events written, failed, or dropped by the rate limit",
            self.events.clone(),
        );
    }

    /// Counts a Kubernetes Event by its outcome.
    pub(crate) fn event(&self, outcome: &'static str) {
        self.events.get_or_create(&ByResult { outcome }).inc();
    }

    /// Returns the number of Events with this outcome.
    #[cfg(test)]
    pub(crate) fn events(&self, outcome: &'static str) -> u64 {
        self.events.get_or_create(&ByResult { outcome }).get()
    }

    pub(crate) fn registered(&self, resource: &str, is_good: bool) {
        let by = ByOutcome { resource: resource.to_owned(), outcome: outcome(is_good) };
        self.registrations.get_or_create(&by).inc();
    }

    pub(crate) fn stream_began(&self, resource: &str) {
        self.streams.get_or_create(&by(resource)).inc();
    }

    pub(crate) fn stream_ended(&self, resource: &str) {
        self.streams.get_or_create(&by(resource)).dec();
    }

    pub(crate) fn allocated(&self, resource: &str, took: Duration) {
        self.allocations.get_or_create(&by(resource)).inc();
        self.latency.observe(took.as_secs_f64());
    }

    pub(crate) fn refuse_allocation(&self, resource: &str, reason: &'static str) {
        self.refused_allocations.get_or_create(&ByReason { resource: resource.to_owned(), reason }).inc();
    }

    /// Records the advertised units of a resource.
    pub(crate) fn offered(&self, resource: &Resource) {
        let healthy = resource.units().iter().filter(|unit| unit.is_healthy).count();
        self.offer(&resource.name, healthy, resource.units().len() - healthy);
        if matches!(resource.kind, ResourceKind::Shm { .. }) {
            self.shm_capacity.set(gauge(resource.bytes(resource.units().len())));
        }
    }

    /// Records that a resource is no longer advertised.
    pub(crate) fn withdrawn(&self, resource: &Resource) {
        self.offer(&resource.name, 0, 0);
        if matches!(resource.kind, ResourceKind::Shm { .. }) {
            self.shm_capacity.set(0);
        }
    }

    fn offer(&self, resource: &str, healthy: usize, unhealthy: usize) {
        for (health, count) in [("healthy", healthy), ("unhealthy", unhealthy)] {
            let by = ByHealth { resource: resource.to_owned(), health };
            self.devices.get_or_create(&by).set(gauge(count as u64));
        }
    }

    /// Records the units of a resource that containers hold.
    pub(crate) fn hold(&self, resource: &Resource, held: &UsageByResource) {
        let (_, units) = held.get(&resource.name).copied().unwrap_or_default();
        self.held.get_or_create(&by(&resource.name)).set(gauge(units as u64));
        if matches!(resource.kind, ResourceKind::Shm { .. }) {
            self.shm_reserved.set(gauge(resource.bytes(units)));
        }
    }

    pub(crate) fn pool_used(&self, pool: &str, bytes: u64) {
        self.pool_used.get_or_create(&ByPool { pool: pool.to_owned() }).set(gauge(bytes));
    }

    pub(crate) fn pool_free(&self, pool: &str, bytes: u64) {
        self.pool_free.get_or_create(&ByPool { pool: pool.to_owned() }).set(gauge(bytes));
    }

    pub(crate) fn swept(&self, pool: &str, files: u64, bytes: u64) {
        let by = ByPool { pool: pool.to_owned() };
        self.swept.get_or_create(&by).inc_by(files);
        self.swept_bytes.get_or_create(&by).inc_by(bytes);
    }

    pub(crate) fn reloaded(&self, is_good: bool) {
        self.reloads.get_or_create(&ByResult { outcome: outcome(is_good) }).inc();
    }

    pub(crate) fn not_listed(&self) {
        self.unlisted.inc();
    }
}
