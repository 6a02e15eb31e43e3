//! The grant of an allocated claim to its containers. Pure functions of the claim and the node's devices.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::device_names::{ClaimDevice, DOMAIN};
use super::domain_config::DomainConfig;
use super::slice::{BYTES, STEP_BYTES};
use crate::config::Bytes;
use crate::devices::AcceleratorKind;
use crate::resource::Pool;
use crate::resource::allocate::AGENT_DIR;

/// The directory of a claim, as containers get it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct DomainGrant {
    /// Bytes that the scheduler reserved.
    pub(crate) bytes: u64,
    /// Mount path in containers.
    pub(crate) mount_path: PathBuf,
    /// Whether the pods of the claim have user namespaces.
    pub(crate) has_user_namespaces: bool,
}

/// Annotation of a claim from a template: the name of its entry in the pod.
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Longest name of an entry in `resourceClaims` of a pod.
const MAX_ENTRY_NAME: usize = 63;

/// Everything that a claim gives to containers. The checkpoint stores it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ClaimGrant {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// End of the names of variables that are the claim's alone; empty in checkpoints of versions without such variables.
    #[serde(default)]
    pub(crate) suffix: String,
    pub(crate) domain: Option<DomainGrant>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) gpus: Vec<String>,
    pub(crate) npus: Vec<String>,
}

/// Returns the claim's name as part of a variable's name, which no other name of a claim gives. A claim from a template has a
/// generated name, and counts by the name of its entry in the pod.
fn variable_suffix(claim: &ResourceClaim) -> String {
    // The name of an entry is a DNS label, but a claim that is created by hand can have any text here.
    let entry = claim.metadata.annotations.as_ref().and_then(|all| all.get(POD_CLAIM_NAME));
    let entry = entry.filter(|name| name.len() <= MAX_ENTRY_NAME);
    let name = entry.or(claim.metadata.name.as_ref()).map(String::as_str).unwrap_or_default();
    // Names of claims have no capitals, so that `a.b`, `a-b` and `a-dot-b` differ.
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    name.split('.')
        .map(|label| label.chars().map(upper).collect::<String>())
        .collect::<Vec<_>>()
        .join("_dot_")
}

/// The part behind the claim's uid in the name of a pool's CDI device.
pub(crate) fn pool_suffix(pool: &str) -> String {
    format!("-pool-{pool}")
}

/// The part behind the claim's uid in the name of the accelerators' CDI device.
pub(crate) fn accelerator_suffix(kind: AcceleratorKind) -> String {
    format!("-{}", kind.resource())
}

impl ClaimGrant {
    /// Returns the ids of the claim's accelerators.
    pub(crate) fn accelerators(&self) -> [(AcceleratorKind, &[String]); 2] {
        [(AcceleratorKind::Gpu, &self.gpus), (AcceleratorKind::Npu, &self.npus)]
    }
}

/// One allocated device, and what is after the claim's uid in the name of its CDI device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct AllocatedDevice {
    pub(crate) request: String,
    pub(crate) pool: String,
    pub(crate) device: String,
    pub(crate) share_id: Option<String>,
    pub(crate) cdi_suffix: String,
}

/// The pure result of reading a claim.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct ClaimPlan {
    pub(crate) grant: ClaimGrant,
    pub(crate) devices: Vec<AllocatedDevice>,
}

/// Why a claim cannot be prepared. The text becomes a Kubernetes Event of the pod, which waits.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub(crate) enum ClaimRefusal {
    /// The scheduler allocated nothing of this driver.
    #[error(
        "the allocation of the claim has no device of {0}: request one of its device classes, such as shmesh-domain"
    )]
    NoDevice(String),
    /// The allocation belongs to another node.
    #[error("device {device} of the allocation is in pool {pool}, and this node publishes pool {node}")]
    OtherNode { device: String, pool: String, node: String },
    /// A device that this node does not have, or not any more.
    #[error(
        "this node has no device {device}, which the allocation names: its pool or accelerator was removed from the node; delete the claim, so that it is allocated again"
    )]
    UnknownDevice { device: String },
    /// A claim is one domain.
    #[error(
        "requests {first} and {second} both want a domain, and a claim is one domain: remove one of them, and let containers name the other"
    )]
    TwoDomains { first: String, second: String },
    /// No share of the domain device.
    #[error(
        "the allocation of request {request} has no consumed capacity {BYTES:?}: Kubernetes 1.36 sets it; before that, enable the feature gate DRAConsumableCapacity"
    )]
    NoBytes { request: String },
    /// Not a valid quantity.
    #[error(
        "the consumed capacity {BYTES:?} of request {request} is {value:?}, which is not a number of bytes"
    )]
    InvalidBytes { request: String, value: String },
    /// The configuration has a mistake.
    #[error("the DomainConfig of request {request} is refused: {what}")]
    Config { request: String, what: String },
    /// Two configurations for one request.
    #[error(
        "request {request} has two configurations of {driver}: leave one in spec.devices.config of the claim"
    )]
    TwoConfigs { request: String, driver: String },
    /// A configuration for a request without a directory.
    #[error(
        "the configuration of {driver} names request {request}, and only a request for a domain has one: remove the name, or the configuration"
    )]
    ConfigNotForDomain { request: String, driver: String },
    /// A configuration for a claim without a directory.
    #[error(
        "the configuration of {0} is for all requests of the claim, and none is for a domain: add a request of device class shmesh-domain, or remove the configuration"
    )]
    ConfigWithoutDomain(String),
    /// The links do not fit.
    #[error(
        "the links of request {request} need {needed} bytes, and the claim has {given}: request {BYTES}: {enough} in the claim's capacity, or make the links smaller"
    )]
    TooFewBytes { request: String, needed: u64, given: u64, enough: Bytes },
    /// A mount that hides the socket of the identity service, or is hidden by it.
    #[error(
        "{what} of the claim would be mounted at {path}, and the identity service is in {AGENT_DIR}: choose a mount path that is neither above nor below it"
    )]
    IdentityPath { what: String, path: String },
    /// Two mounts at one path.
    #[error(
        "{first} and {second} of the claim are both mounted at {path}: use two claims for different containers, or change a mount path"
    )]
    SamePath { first: String, second: String, path: String },
}

impl ClaimRefusal {
    /// Returns the reason as one word for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::NoDevice(_) => "no_device",
            Self::OtherNode { .. } => "other_node",
            Self::UnknownDevice { .. } => "unknown_device",
            Self::TwoDomains { .. } => "two_domains",
            Self::NoBytes { .. } | Self::InvalidBytes { .. } => "no_bytes",
            Self::Config { .. } => "config",
            Self::TwoConfigs { .. } => "two_configs",
            Self::ConfigNotForDomain { .. } | Self::ConfigWithoutDomain(_) => "config_not_for_domain",
            Self::TooFewBytes { .. } => "too_few_bytes",
            Self::IdentityPath { .. } => "identity_path",
            Self::SamePath { .. } => "same_path",
        }
    }
}

/// Reads an allocated claim. `node` is the pool of this node's slices.
pub(crate) fn plan_claim(
    claim: &ResourceClaim,
    driver: &str,
    node: &str,
    devices: &BTreeMap<String, ClaimDevice>,
) -> Result<ClaimPlan, ClaimRefusal> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let allocated = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = allocated.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    let configs = allocated.and_then(|devices| devices.config.as_deref()).unwrap_or_default();
    let ours: Vec<_> = results.iter().filter(|result| result.driver == driver).collect();
    if ours.is_empty() {
        return Err(ClaimRefusal::NoDevice(driver.to_owned()));
    }
    let mut grant = ClaimGrant {
        namespace: claim.metadata.namespace.clone().unwrap_or_default(),
        name: claim.metadata.name.clone().unwrap_or_default(),
        suffix: variable_suffix(claim),
        domain: None,
        pools: Vec::new(),
        gpus: Vec::new(),
        npus: Vec::new(),
    };
    let mut planned = Vec::with_capacity(ours.len());
    let mut domain_request = None;
    for result in ours {
        if result.pool != node {
            let (device, pool, node) = (result.device.clone(), result.pool.clone(), node.to_owned());
            return Err(ClaimRefusal::OtherNode { device, pool, node });
        }
        let Some(device) = devices.get(&result.device) else {
            return Err(ClaimRefusal::UnknownDevice { device: result.device.clone() });
        };
        let cdi_suffix = match device {
            ClaimDevice::Domain => {
                if let Some(first) = domain_request.replace(result.request.clone()) {
                    return Err(ClaimRefusal::TwoDomains { first, second: result.request.clone() });
                }
                grant.domain = Some(domain(result, configs, driver)?);
                String::new()
            }
            ClaimDevice::Pool(pool, _) => {
                if !grant.pools.contains(pool) {
                    grant.pools.push(pool.clone());
                }
                pool_suffix(&pool.name)
            }
            ClaimDevice::Accelerator(accelerator, ..) => {
                let listed = match accelerator.kind {
                    AcceleratorKind::Gpu => &mut grant.gpus,
                    AcceleratorKind::Npu => &mut grant.npus,
                };
                if !listed.contains(&accelerator.id) {
                    listed.push(accelerator.id.clone());
                }
                accelerator_suffix(accelerator.kind)
            }
        };
        planned.push(AllocatedDevice {
            request: result.request.clone(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share_id: result.share_id.clone(),
            cdi_suffix,
        });
    }
    check_config_requests(configs, driver, results)?;
    check_paths(&grant)?;
    Ok(ClaimPlan { grant, devices: planned })
}

/// Reads the share of the domain device and its configuration.
fn domain(
    result: &DeviceRequestAllocationResult,
    configs: &[DeviceAllocationConfiguration],
    driver: &str,
) -> Result<DomainGrant, ClaimRefusal> {
    let request = || result.request.clone();
    let consumed = result.consumed_capacity.as_ref();
    let qualified = format!("{driver}/{BYTES}");
    let given = consumed.and_then(|consumed| consumed.get(BYTES).or_else(|| consumed.get(&qualified)));
    let Some(given) = given else { return Err(ClaimRefusal::NoBytes { request: request() }) };
    let Ok(Bytes(bytes)) = given.0.parse() else {
        return Err(ClaimRefusal::InvalidBytes { request: request(), value: given.0.clone() });
    };
    let config = config_of(&result.request, configs, driver)?;
    if config.link_bytes > bytes {
        let needed = config.link_bytes;
        let enough = Bytes(needed.checked_next_multiple_of(STEP_BYTES).unwrap_or(needed));
        return Err(ClaimRefusal::TooFewBytes { request: request(), needed, given: bytes, enough });
    }
    let DomainConfig { mount_path, has_user_namespaces, .. } = config;
    Ok(DomainGrant { bytes, mount_path, has_user_namespaces })
}

/// Whether a configuration is for a request. One that names a request is also for its subrequests.
fn is_for(config: &DeviceAllocationConfiguration, request: &str) -> bool {
    let requests = config.requests.as_deref().unwrap_or_default();
    let main = request.split('/').next().unwrap_or(request);
    requests.is_empty() || requests.iter().any(|one| one == request || one == main)
}

/// Returns the configuration of a request: that of the claim, else that of the class, else the default.
fn config_of(
    request: &str,
    configs: &[DeviceAllocationConfiguration],
    driver: &str,
) -> Result<DomainConfig, ClaimRefusal> {
    let parameters = |source: &str| {
        let is_ours = |config: &&DeviceAllocationConfiguration| {
            config.opaque.as_ref().is_some_and(|opaque| opaque.driver == driver)
        };
        let is_here = |config: &&DeviceAllocationConfiguration| {
            config.source == source && is_for(config, request) && is_ours(config)
        };
        let mut found = configs.iter().filter(is_here);
        let first = found.next();
        // The scheduler repeats a configuration for each request that it names.
        if found.any(|other| Some(other) != first) {
            return Err(ClaimRefusal::TwoConfigs { request: request.to_owned(), driver: driver.to_owned() });
        }
        Ok(first.and_then(|config| config.opaque.as_ref()).map(|opaque| &opaque.parameters.0))
    };
    let chosen = match parameters("FromClaim")? {
        Some(parameters) => Some(parameters),
        None => parameters("FromClass")?,
    };
    chosen
        .map_or_else(|| Ok(DomainConfig::default()), DomainConfig::parse)
        .map_err(|what| ClaimRefusal::Config { request: request.to_owned(), what })
}

/// Refuses a configuration that names a request for another kind of device, or is for no domain at all.
fn check_config_requests(
    configs: &[DeviceAllocationConfiguration],
    driver: &str,
    results: &[DeviceRequestAllocationResult],
) -> Result<(), ClaimRefusal> {
    let ours = configs.iter().filter(|config| config.opaque.as_ref().is_some_and(|one| one.driver == driver));
    for config in ours {
        let names = config.requests.as_deref().unwrap_or_default();
        let is_domain = |result: &&DeviceRequestAllocationResult| {
            result.driver == driver && result.device == DOMAIN && is_for(config, &result.request)
        };
        if results.iter().any(|result| is_domain(&result)) {
            continue;
        }
        let driver = driver.to_owned();
        return Err(match names.first().cloned() {
            Some(request) => ClaimRefusal::ConfigNotForDomain { request, driver },
            None => ClaimRefusal::ConfigWithoutDomain(driver),
        });
    }
    Ok(())
}

/// Refuses two mounts at one path, of which the runtime would silently drop one, and one that hides the identity service.
fn check_paths(grant: &ClaimGrant) -> Result<(), ClaimRefusal> {
    let mut mounts: Vec<(&PathBuf, String)> = Vec::new();
    let domain = grant.domain.iter().map(|domain| (&domain.mount_path, "the directory".to_owned()));
    let pools = grant.pools.iter().map(|pool| (&pool.mount_path, format!("pool {}", pool.name)));
    for (path, second) in domain.chain(pools) {
        if path.starts_with(AGENT_DIR) || Path::new(AGENT_DIR).starts_with(path) {
            return Err(ClaimRefusal::IdentityPath { what: second, path: path.display().to_string() });
        }
        if let Some((_, first)) = mounts.iter().find(|(other, _)| *other == path) {
            let path = path.display().to_string();
            return Err(ClaimRefusal::SamePath { first: first.clone(), second, path });
        }
        mounts.push((path, second));
    }
    Ok(())
}
