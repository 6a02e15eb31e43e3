//! A driver's reports of devices in the status of claims: the latest one of each claim is written, and retried.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use shmesh_log_limit::LogLimit;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use crate::api_error::{code_of, text_of};
use crate::backoff::{Backoff, up_to};
use crate::claims::Claims;
use crate::driver::ClaimRef;

/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of new reports that are written at a time. A request without an answer holds up others only when there are so many.
const MAX_CONCURRENT: usize = 8;
/// Upper limits of the delays after a failed write. All claims share one delay, which is random below its limit: an API server that is
/// overloaded gets about two retries a minute from each node, whatever the number of claims.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Warnings at once, and the interval of further ones.
const WARNINGS: (u32, Duration) = (5, Duration::from_secs(60));

/// Writes `status.devices` of claims.
///
/// Only the latest report of a claim is kept, in memory: there are never more reports than claims, and those that are not written when
/// the process ends are lost. A write that fails is retried with increasing delays, and new reports of other claims do not wait for the
/// retries or, up to eight, for each other. A claim that does not exist any more, or has been created again with another uid, is
/// dropped. Clones share their reports.
///
/// Reports are applied on the server's side, so devices of other drivers stay as they are. Besides `get` on `resourceclaims` and `patch`
/// on `resourceclaims/status`, the driver's account needs, since Kubernetes 1.36, the verb `associated-node:patch` on
/// `resourceclaims/driver` with the driver's name as the name of the resource.
#[derive(Clone, Debug, Default)]
pub struct DeviceStatuses(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    pending: Mutex<ReportQueue>,
    added: Notify,
    failed: Notify,
}

/// The reports that are not written yet, by the uid of the claim.
#[derive(Debug, Default)]
struct ReportQueue {
    reports: BTreeMap<String, Report>,
    /// Claims that are written now. A newer report waits, so that it is not overwritten by the older one.
    writing: BTreeSet<String>,
    last_number: u64,
}

#[derive(Clone, Debug)]
struct Report {
    claim: ClaimRef,
    devices: Vec<AllocatedDeviceStatus>,
    /// The place in the queue, which changes with each new report and each failed write.
    number: u64,
    has_failed: bool,
}

impl ReportQueue {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns the report to write next, of the new ones or of those that have failed.
    fn next(&self, has_failed: bool) -> Option<Report> {
        let is_due =
            |report: &&Report| report.has_failed == has_failed && !self.writing.contains(&report.claim.uid);
        self.reports.values().filter(is_due).min_by_key(|report| report.number).cloned()
    }

    /// Takes the next report, which is written until [`end`](Self::end).
    fn begin(&mut self, has_failed: bool) -> Option<Report> {
        let report = self.next(has_failed)?;
        self.writing.insert(report.claim.uid.clone());
        Some(report)
    }

    /// Notes that a report was written, or puts it at the end of the queue. A newer report of the claim stays as it is.
    fn end(&mut self, written: &Report, is_done: bool) {
        let number = self.next_number();
        let uid = &written.claim.uid;
        self.writing.remove(uid);
        let Some(report) = self.reports.get_mut(uid).filter(|report| report.number == written.number) else {
            return;
        };
        if is_done {
            self.reports.remove(uid);
        } else {
            report.number = number;
            report.has_failed = true;
        }
    }
}

/// Why a report was not written.
enum WriteError {
    /// The claim does not exist any more.
    Gone,
    /// Another attempt may succeed.
    Failed(String),
}

impl DeviceStatuses {
    fn pending(&self) -> MutexGuard<'_, ReportQueue> {
        // Each change is one assignment.
        self.0.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports the driver's devices of a claim, all of them. An earlier report of the claim that is not written yet is replaced.
    pub fn put(&self, claim: ClaimRef, devices: Vec<AllocatedDeviceStatus>) {
        let mut pending = self.pending();
        let number = pending.next_number();
        pending.reports.insert(claim.uid.clone(), Report { claim, devices, number, has_failed: false });
        drop(pending);
        self.0.added.notify_one();
    }

    /// Drops the report of a claim that is not written yet, because the claim has been reverted.
    pub fn forget(&self, uid: &str) {
        self.pending().reports.remove(uid);
    }

    /// Returns the number of claims whose report is not written yet.
    pub fn unwritten(&self) -> usize {
        self.pending().reports.len()
    }

    /// Writes reports of `driver`, for ever. There should be one such task.
    pub async fn run(&self, client: &Client, driver: &str) {
        tokio::join!(self.write_new(client, driver), self.retry(client, driver));
    }

    /// Writes new reports, some at a time and one of each claim.
    async fn write_new(&self, client: &Client, driver: &str) {
        let mut log = LogLimit::new(WARNINGS.0, WARNINGS.1);
        let mut writes = JoinSet::new();
        loop {
            while writes.len() < MAX_CONCURRENT {
                let Some(report) = self.pending().begin(false) else { break };
                let (statuses, client, driver) = (self.clone(), client.clone(), driver.to_owned());
                writes.spawn(async move {
                    let outcome = statuses.write(&client, &driver, &report).await;
                    outcome.map_err(|error| (report.claim, error))
                });
            }
            tokio::select! {
                () = self.0.added.notified() => {}
                Some(ended) = writes.join_next() => match ended {
                    Ok(Err((claim, error))) => match log.allow(Instant::now().into_std()) {
                        Some(suppressed) => {
                            warn!(suppressed, "status of claim {claim} cannot be written: {error}; retrying");
                        }
                        None => debug!("status of claim {claim} cannot be written: {error}; retrying"),
                    },
                    Err(failed) if failed.is_panic() => std::panic::resume_unwind(failed.into_panic()),
                    _ => {}
                }
            }
        }
    }

    /// Writes reports that have failed, one by one, until one fails again.
    async fn retry(&self, client: &Client, driver: &str) {
        let mut delays = Backoff::new(RETRY.0, RETRY.1);
        loop {
            while self.pending().next(true).is_none() {
                self.0.failed.notified().await;
            }
            sleep(up_to(delays.delay())).await;
            loop {
                let next = self.pending().begin(true);
                let Some(report) = next else {
                    delays.reset();
                    break;
                };
                if let Err(error) = self.write(client, driver, &report).await {
                    debug!("status of claim {} cannot be written: {error}; retrying", report.claim);
                    break;
                }
            }
        }
    }

    /// Writes a report, and notes the outcome.
    async fn write(&self, client: &Client, driver: &str, report: &Report) -> Result<(), String> {
        let outcome = match write(client, driver, report).await {
            Ok(()) => Ok(()),
            Err(WriteError::Gone) => {
                debug!("claim {} is gone: its status is not written", report.claim);
                Ok(())
            }
            Err(WriteError::Failed(error)) => Err(error),
        };
        self.pending().end(report, outcome.is_ok());
        // A newer report of the claim may have waited.
        self.0.added.notify_one();
        if outcome.is_err() {
            self.0.failed.notify_one();
        }
        outcome
    }
}

async fn write(client: &Client, driver: &str, report: &Report) -> Result<(), WriteError> {
    let Report { claim, devices, .. } = report;
    let patch = serde_json::json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "namespace": claim.namespace, "name": claim.name, "uid": claim.uid },
        "status": { "devices": devices },
    });
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), &claim.namespace);
    let params = PatchParams::apply(driver).force();
    let patch = Patch::Apply(&patch);
    let error = match timeout(TIMEOUT, api.patch_status(&claim.name, &params, &patch)).await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error,
        Err(_) => {
            let text = format!("no answer within {} seconds", TIMEOUT.as_secs());
            return Err(WriteError::Failed(text));
        }
    };
    match code_of(&error) {
        Some(404) => Err(WriteError::Gone),
        // Either the claim has another uid, or the server gave up after conflicts with other writers.
        Some(409) if !exists(client, claim).await => Err(WriteError::Gone),
        _ => Err(WriteError::Failed(text_of(&error))),
    }
}

/// Whether the claim exists, as far as the API server says.
async fn exists(client: &Client, claim: &ClaimRef) -> bool {
    let found = timeout(TIMEOUT, client.get(&claim.namespace, &claim.name)).await;
    let Ok(Ok(found)) = found else { return true };
    found.is_some_and(|found| found.metadata.uid.as_ref() == Some(&claim.uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(statuses: &DeviceStatuses, uid: &str) {
        statuses.put(ClaimRef { namespace: "default".into(), name: uid.into(), uid: uid.into() }, Vec::new());
    }

    fn next(statuses: &DeviceStatuses, has_failed: bool) -> Option<Report> {
        statuses.pending().next(has_failed)
    }

    #[test]
    fn new_reports_and_failed_ones_have_queues_of_their_own() {
        let statuses = DeviceStatuses::default();
        for uid in ["b", "a", "b"] {
            put(&statuses, uid);
        }
        let uid = |has_failed| next(&statuses, has_failed).map(|report| report.claim.uid);
        assert_eq!((statuses.unwritten(), uid(false).as_deref(), uid(true)), (2, Some("a"), None));
        for wanted in [(Some("b"), Some("a")), (None, Some("a"))] {
            let failed = next(&statuses, false).expect("a report");
            statuses.pending().end(&failed, false);
            assert_eq!((uid(false).as_deref(), uid(true).as_deref()), wanted);
        }
        let failed = next(&statuses, true).expect("a report");
        statuses.pending().end(&failed, false);
        assert_eq!(uid(true).as_deref(), Some("b"), "the last one is tried last");
    }

    #[test]
    fn report_that_came_during_a_write_stays() {
        let statuses = DeviceStatuses::default();
        for is_done in [true, false] {
            put(&statuses, "a");
            let begun = next(&statuses, false).expect("a report");
            put(&statuses, "a");
            statuses.pending().end(&begun, is_done);
            let newer = next(&statuses, false).expect("the newer report");
            assert!(newer.number > begun.number);
        }
        let begun = next(&statuses, false).expect("a report");
        statuses.forget("a");
        statuses.pending().end(&begun, false);
        assert_eq!(statuses.unwritten(), 0, "a reverted claim does not come back");
        // A newer report is written when the older one has ended.
        put(&statuses, "a");
        let begun = statuses.pending().begin(false).expect("a report");
        put(&statuses, "a");
        assert!(statuses.pending().begin(false).is_none());
        statuses.pending().end(&begun, false);
        assert!(statuses.pending().begin(false).is_some());
    }
}
