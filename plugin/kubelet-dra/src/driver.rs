//! The trait that a driver implements, and its description of devices.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tracing::warn;

/// Makes the devices of claims ready on this node, and reverts that.
///
/// The kubelet calls both again after each of its restarts, and after each call that failed or took too long: both must be
/// idempotent. Calls for one claim never overlap, not even if another instance of the driver on the node gets one of them. Calls
/// for different claims of one instance do. A call that takes too long is cancelled: its future is dropped.
pub trait Driver: Send + Sync + 'static {
    /// Prepares a claim that is allocated, at least in part, to this driver.
    ///
    /// Returns the devices that containers get. The text of an error becomes part of an event of the pod, which waits and is
    /// retried.
    fn prepare(
        &self,
        claim: Arc<ResourceClaim>,
    ) -> impl Future<Output = Result<Vec<PreparedDevice>, String>> + Send;

    /// Reverts [`prepare`](Self::prepare), and succeeds for a claim that is unknown or was reverted before.
    ///
    /// The claim may be gone from the API server. Pods that used it have ended.
    fn unprepare(&self, claim: ClaimRef) -> impl Future<Output = Result<(), String>> + Send;

    /// Called when the kubelet says that it has registered the driver, or why not; it then tries again. The default logs a warning.
    fn registered(&self, result: Result<(), String>) {
        if let Err(error) = result {
            warn!("the kubelet does not register the driver, and will try again: {error}");
        }
    }
}

/// Identifies a ResourceClaim. The uid decides: a claim of the same name may have been created again.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ClaimRef {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim in its namespace.
    pub name: String,
    /// Unique identifier of the claim.
    pub uid: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}

/// A device of a claim, ready for containers.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PreparedDevice {
    /// Requests of the claim that the device is for; all of them, if empty. A subrequest (`gpu/large`) counts as its request.
    pub requests: Vec<String>,
    /// Pool of the device, as in the allocation.
    pub pool: String,
    /// Name of the device, as in the allocation.
    pub device: String,
    /// Share of the device, as in the allocation, if several claims may have the device.
    pub share_id: Option<String>,
    /// Qualified names of the CDI devices that the runtime adds to containers, such as `vendor.com/class=name`.
    pub cdi_devices: Vec<String>,
}

/// The health of a device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DeviceHealth {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device in its pool.
    pub device: String,
    /// Whether the device works.
    pub state: HealthState,
    /// Details for people, at most 1024 characters; may be empty.
    pub message: String,
}

/// Whether a device works.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HealthState {
    /// Neither known to work nor known to have a problem.
    Unknown,
    /// Works as it should.
    Healthy,
    /// Has a problem; pods that have the device show it in their status.
    Unhealthy,
}
