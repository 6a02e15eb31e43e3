//! The driver's report of a claim in `status.devices`: that its devices are ready, and where its directory is.

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::claim_plan::ClaimPlan;

/// Type of the condition.
const READY: &str = "Ready";

/// Returns what to write, or `None` if the claim says it already: the kubelet prepares all claims again when it restarts.
pub(crate) fn device_status(
    claim: &ResourceClaim,
    driver: &str,
    plan: &ClaimPlan,
    directory: &str,
) -> Option<Vec<AllocatedDeviceStatus>> {
    let said = claim.status.as_ref().and_then(|status| status.devices.as_deref()).unwrap_or_default();
    let now = Time(Timestamp::now());
    let wanted = plan.devices.iter().map(|device| {
        let domain = plan.grant.domain.as_ref().filter(|_| device.cdi_suffix.is_empty());
        let data = domain.map(|domain| RawExtension(json!({"directory": directory, "bytes": domain.bytes})));
        let ready = Condition {
            type_: READY.into(),
            status: "True".into(),
            reason: "Prepared".into(),
            message: String::new(),
            last_transition_time: now.clone(),
            observed_generation: None,
        };
        AllocatedDeviceStatus {
            driver: driver.to_owned(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
            conditions: Some(vec![ready]),
            data,
            network_data: None,
        }
    });
    let wanted: Vec<_> = wanted.collect();
    let is_said = |one: &AllocatedDeviceStatus| {
        said.iter().any(|other| {
            let is_ready = |condition: &Condition| condition.type_ == READY && condition.status == "True";
            let key = |one: &AllocatedDeviceStatus| {
                (one.driver.clone(), one.pool.clone(), one.device.clone(), one.share_id.clone())
            };
            key(other) == key(one)
                && other.data == one.data
                && other.conditions.as_deref().unwrap_or_default().iter().any(is_ready)
        })
    };
    (!wanted.iter().all(is_said)).then_some(wanted)
}
