//! The health of devices, as their drivers report it.

use std::collections::BTreeMap;
use std::time::Duration;

use shmesh_kubelet_api::drahealth::{DeviceHealth, HealthStatus};

/// How long a report is valid if the driver does not say.
const DEFAULT_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Report {
    health: HealthStatus,
    message: String,
    at: Duration,
    limit: Duration,
}

/// The reports of all drivers. They outlive the kubelet in a file; here they are in memory.
#[derive(Debug, Default)]
pub(crate) struct Health(BTreeMap<String, BTreeMap<(String, String), Report>>);

impl Health {
    /// Returns the health of a device as it is in the status of a pod.
    pub(crate) fn of(&self, driver: &str, pool: &str, device: &str, now: Duration) -> &'static str {
        let reports = self.0.get(driver);
        let report = reports.and_then(|reports| reports.get(&(pool.to_owned(), device.to_owned())));
        match report.filter(|report| now.saturating_sub(report.at) <= report.limit) {
            Some(Report { health: HealthStatus::Healthy, .. }) => "Healthy",
            Some(Report { health: HealthStatus::Unhealthy, .. }) => "Unhealthy",
            _ => "Unknown",
        }
    }

    /// Takes a report, and returns the devices that changed, as pool and name. Devices that are not in it become unknown when their
    /// time is over.
    pub(crate) fn update(
        &mut self,
        driver: &str,
        devices: Vec<DeviceHealth>,
        now: Duration,
    ) -> Vec<(String, String)> {
        let known = self.0.entry(driver.to_owned()).or_default();
        let mut changed = Vec::new();
        let mut reported = Vec::new();
        for device in devices {
            let health = device.health();
            let id = device.device.unwrap_or_default();
            let key = (id.pool_name, id.device_name);
            let seconds =
                u64::try_from(device.health_check_timeout_seconds).ok().filter(|seconds| *seconds > 0);
            let limit = seconds.map_or(DEFAULT_LIMIT, Duration::from_secs);
            let report = Report { health, message: device.message, at: now, limit };
            let same = |old: &Report| Report { at: now, ..old.clone() } == report;
            if !known.get(&key).is_some_and(same) {
                changed.push(key.clone());
            }
            reported.push(key.clone());
            known.insert(key, report);
        }
        for (key, report) in known.iter_mut().filter(|(key, _)| !reported.contains(key)) {
            if report.health != HealthStatus::Unknown && now.saturating_sub(report.at) > report.limit {
                *report = Report {
                    health: HealthStatus::Unknown,
                    message: String::new(),
                    at: now,
                    ..report.clone()
                };
                changed.push(key.clone());
            }
        }
        changed
    }

    /// Forgets the reports of a driver, by its name: of all its instances.
    pub(crate) fn clear(&mut self, driver: &str) {
        self.0.remove(driver);
    }
}
