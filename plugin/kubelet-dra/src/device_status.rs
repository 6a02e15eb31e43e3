//! A driver's report of a claim's devices in the status of the claim.

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};

use crate::api_error::text_of;
use crate::driver::ClaimRef;

/// Replaces what `driver` says about its devices in `status.devices` of a claim.
///
/// It is applied on the server's side, so devices of other drivers stay as they are. A claim of another uid is refused by
/// the API server. Besides `patch` on `resourceclaims/status`, the driver's account needs, since Kubernetes 1.36, the verb
/// `associated-node:patch` on `resourceclaims/driver` with the driver's name as the name of the resource.
///
/// # Errors
///
/// A device is not the driver's, or the API server refuses the request; the text says why.
pub async fn write_device_status(
    client: &Client,
    driver: &str,
    claim: &ClaimRef,
    devices: &[AllocatedDeviceStatus],
) -> Result<(), String> {
    if let Some(other) = devices.iter().find(|device| device.driver != driver) {
        let AllocatedDeviceStatus { pool, device, driver: owner, .. } = other;
        return Err(format!(
            "device {pool}/{device} is of driver {owner}, and only {driver} may be described"
        ));
    }
    let patch = json(claim, devices)?;
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), &claim.namespace);
    let params = PatchParams::apply(driver).force();
    match api.patch_status(&claim.name, &params, &Patch::Apply(&patch)).await {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("status of claim {claim} cannot be written: {}", text_of(&error))),
    }
}

fn json(claim: &ClaimRef, devices: &[AllocatedDeviceStatus]) -> Result<serde_json::Value, String> {
    let devices = serde_json::to_value(devices)
        .map_err(|error| format!("the status cannot be written as JSON: {error}"))?;
    Ok(serde_json::json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "namespace": claim.namespace, "name": claim.name, "uid": claim.uid },
        "status": { "devices": devices },
    }))
}
