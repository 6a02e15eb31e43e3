//! A driver's reports of devices in the status of claims: the latest one of each claim is written, and retried.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use crate::api_error::{code_of, text_of};
use crate::backoff::{Backoff, up_to};
use crate::claims::Claims;
use crate::driver::ClaimRef;

/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Upper limits of the delays after a failed write. All claims share one delay, which is random below its limit: an API server that is
/// overloaded gets about two retries a minute from each node, whatever the number of claims.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Writes `status.devices` of claims.
///
/// Only the latest report of a claim is kept, in memory: there are never more reports than claims, and those that are not written when
/// the process ends are lost. A write that fails is retried with increasing delays, after new reports of other claims; each write may
/// hold up the others for ten seconds. A claim that does not exist any more, or has been created again
/// with another uid, is dropped. Clones share their reports.
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
}

/// The reports that are not written yet, by the uid of the claim.
#[derive(Debug, Default)]
struct ReportQueue {
    reports: BTreeMap<String, Report>,
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

    /// Returns the report to write next: new ones first, and then, if it is time, those that have failed.
    fn next(&self, may_retry: bool) -> Option<Report> {
        let due = self.reports.values().filter(|report| may_retry || !report.has_failed);
        due.min_by_key(|report| (report.has_failed, report.number)).cloned()
    }

    /// Notes that a report was written, or puts it at the end of the queue. A newer report of the claim stays as it is.
    fn end(&mut self, written: &Report, is_done: bool) {
        let number = self.next_number();
        let uid = &written.claim.uid;
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

    /// Writes reports of `driver` one by one, for ever. There should be one such task.
    pub async fn run(&self, client: &Client, driver: &str) {
        let mut retry = Backoff::new(RETRY.0, RETRY.1);
        let mut retry_at = Instant::now();
        loop {
            let may_retry = retry_at <= Instant::now();
            let next = self.pending().next(may_retry);
            let Some(report) = next else {
                let is_waiting = self.unwritten() > 0;
                tokio::select! {
                    () = self.0.added.notified() => {}
                    () = sleep_until(retry_at), if is_waiting => {}
                }
                continue;
            };
            let outcome = write(client, driver, &report).await;
            let is_done = match outcome {
                Ok(()) => true,
                Err(WriteError::Gone) => {
                    debug!("claim {} is gone: its status is not written", report.claim);
                    true
                }
                Err(WriteError::Failed(error)) => {
                    warn!("status of claim {} cannot be written: {error}; it is tried again", report.claim);
                    false
                }
            };
            if is_done {
                retry.reset();
                retry_at = Instant::now();
            } else if may_retry {
                retry_at = Instant::now() + up_to(retry.delay());
            }
            self.pending().end(&report, is_done);
        }
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

    fn next(statuses: &DeviceStatuses, may_retry: bool) -> Option<Report> {
        statuses.pending().next(may_retry)
    }

    #[test]
    fn new_reports_are_written_before_failed_ones() {
        let statuses = DeviceStatuses::default();
        for uid in ["b", "a", "b"] {
            put(&statuses, uid);
        }
        let uid = |may_retry| next(&statuses, may_retry).map(|report| report.claim.uid);
        assert_eq!((statuses.unwritten(), uid(true).as_deref()), (2, Some("a")));
        let failed = next(&statuses, true).expect("a report");
        statuses.pending().end(&failed, false);
        assert_eq!(uid(true).as_deref(), Some("b"));
        let failed = next(&statuses, true).expect("a report");
        statuses.pending().end(&failed, false);
        assert_eq!((uid(false), uid(true).as_deref()), (None, Some("a")));
    }

    #[test]
    fn report_that_came_during_a_write_stays() {
        let statuses = DeviceStatuses::default();
        for is_done in [true, false] {
            put(&statuses, "a");
            let begun = next(&statuses, true).expect("a report");
            put(&statuses, "a");
            statuses.pending().end(&begun, is_done);
            let newer = next(&statuses, false).expect("the newer report");
            assert!(newer.number > begun.number);
        }
        let begun = next(&statuses, true).expect("a report");
        statuses.forget("a");
        statuses.pending().end(&begun, false);
        assert_eq!(statuses.unwritten(), 0, "a reverted claim does not come back");
    }
}
