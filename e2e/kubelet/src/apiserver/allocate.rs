//! A small scheduler that allocates claims to devices on one node, and the controller that releases them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, CapacityRequirements, Device, DeviceAllocationConfiguration, DeviceAllocationResult,
    DeviceClass, DeviceRequest, DeviceRequestAllocationResult, DeviceSelector, DeviceTaint, DeviceToleration,
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimStatus, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{ApiServer, capacity, classes, date};
use crate::pod::Pod;

/// Keeps a claim while it is allocated.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
const CONSUMERS_MAX: usize = 256;
const RESULTS_MAX: usize = 32;

/// A device: driver, pool and name.
type Id = (String, String, String);

/// A request for devices.
#[derive(Debug)]
struct Wish<'a> {
    name: &'a str,
    class: &'a str,
    selectors: Option<&'a [DeviceSelector]>,
    /// `None` for all devices that match.
    count: Option<usize>,
    capacity: Option<&'a CapacityRequirements>,
    tolerations: &'a [DeviceToleration],
}

impl<'a> Wish<'a> {
    fn of(request: &'a DeviceRequest) -> Result<Self, String> {
        let DeviceRequest { name, exactly, .. } = request;
        let exactly = exactly.as_ref().filter(|exactly| exactly.admin_access != Some(true));
        let exactly = exactly
            .ok_or_else(|| format!("request {name}: only exactly, without adminAccess, is supported"))?;
        let count = match exactly.allocation_mode.as_deref() {
            Some("All") => None,
            _ => Some(usize::try_from(exactly.count.unwrap_or(1)).unwrap_or(1)),
        };
        Ok(Self {
            name,
            class: &exactly.device_class_name,
            selectors: exactly.selectors.as_deref(),
            count,
            capacity: exactly.capacity.as_ref(),
            tolerations: exactly.tolerations.as_deref().unwrap_or_default(),
        })
    }
}

/// A device on the node.
#[derive(Debug)]
struct Candidate<'a> {
    id: Id,
    device: &'a Device,
    /// Only pods of this node can use it.
    is_local: bool,
}

/// The allocated part of each device.
#[derive(Clone, Debug, Default)]
struct Usage {
    whole: BTreeSet<Id>,
    /// Thousandths by device and capacity.
    shares: BTreeMap<(Id, String), i128>,
}

impl Usage {
    fn of(claims: &[ResourceClaim]) -> Self {
        let mut usage = Self::default();
        let results = claims
            .iter()
            .filter_map(|claim| {
                claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref()?.results.as_ref()
            })
            .flatten();
        results.for_each(|result| usage.add(result));
        usage
    }

    fn add(&mut self, result: &DeviceRequestAllocationResult) {
        let id = (result.driver.clone(), result.pool.clone(), result.device.clone());
        match &result.consumed_capacity {
            Some(consumed) => {
                for (name, quantity) in consumed {
                    let amount = capacity::thousandths(quantity).unwrap_or_default();
                    *self.shares.entry((id.clone(), name.clone())).or_default() += amount;
                }
            }
            None => drop(self.whole.insert(id)),
        }
    }
}

/// One search for the devices of a claim on one node.
struct Search<'a> {
    candidates: Vec<Candidate<'a>>,
    classes: &'a BTreeMap<String, DeviceClass>,
    requests: Vec<Wish<'a>>,
    uids: Vec<String>,
}

/// A state of the search: what is taken, and by which request.
#[derive(Clone, Default)]
struct Solution {
    usage: Usage,
    results: Vec<DeviceRequestAllocationResult>,
}

impl Search<'_> {
    fn run(&self, usage: Usage) -> Result<Option<Solution>, String> {
        self.requests_from(0, Solution { usage, ..Solution::default() })
    }

    fn requests_from(&self, at: usize, chosen: Solution) -> Result<Option<Solution>, String> {
        let Some(wish) = self.requests.get(at) else { return Ok(Some(chosen)) };
        let matching = self.matching(wish)?;
        let count = wish.count.unwrap_or(matching.len());
        if (wish.count.is_none() && count == 0) || chosen.results.len() + count > RESULTS_MAX {
            return Ok(None);
        }
        self.devices_from(at, wish, &matching, count, chosen)
    }

    /// Takes `count` devices of a request, each after the one before: one request never takes a device twice.
    fn devices_from(
        &self,
        at: usize,
        wish: &Wish<'_>,
        matching: &[usize],
        count: usize,
        chosen: Solution,
    ) -> Result<Option<Solution>, String> {
        if count == 0 {
            return self.requests_from(at + 1, chosen);
        }
        for (n, index) in matching.iter().enumerate() {
            if let Some(next) = self.take(wish, &self.candidates[*index], chosen.clone()) {
                let found = self.devices_from(at, wish, &matching[n + 1..], count - 1, next)?;
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
        Ok(None)
    }

    fn matching(&self, wish: &Wish<'_>) -> Result<Vec<usize>, String> {
        let class = self.classes.get(wish.class);
        let class = class
            .ok_or_else(|| format!("request {}: device class {} does not exist", wish.name, wish.class))?;
        let of_class = classes::compiled(class.spec.selectors.as_deref())?;
        let of_request = classes::compiled(wish.selectors)?;
        let mut matching = Vec::new();
        for (index, Candidate { id, device, .. }) in self.candidates.iter().enumerate() {
            let tolerated = device.taints.iter().flatten().all(|taint| tolerates(wish.tolerations, taint));
            if tolerated
                && classes::matches(&of_class, &id.0, device)?
                && classes::matches(&of_request, &id.0, device)?
            {
                matching.push(index);
            }
        }
        Ok(matching)
    }

    fn take(&self, wish: &Wish<'_>, candidate: &Candidate<'_>, mut chosen: Solution) -> Option<Solution> {
        let Candidate { id, device, .. } = candidate;
        let shared = device.allow_multiple_allocations == Some(true);
        let none = BTreeMap::new();
        let requests = wish.capacity.and_then(|capacity| capacity.requests.as_ref());
        let capacity = device.capacity.as_ref();
        let consumed = match (shared, requests) {
            (true, requests) => {
                let requests = requests.unwrap_or(&BTreeMap::new()).clone();
                match capacity::consumed(&requests, capacity.unwrap_or(&none)) {
                    Ok(Some(consumed)) => Some(consumed),
                    // Another device may have this capacity.
                    Ok(None) | Err(_) => return None,
                }
            }
            (false, Some(requests)) => {
                let enough = requests.iter().all(|(name, requested)| {
                    let has = capacity.and_then(|capacity| capacity.get(name));
                    has.is_some_and(|has| {
                        capacity::thousandths(requested) <= capacity::thousandths(&has.value)
                    })
                });
                if !enough {
                    return None;
                }
                None
            }
            (false, None) => None,
        };
        let used = &chosen.usage;
        if used.whole.contains(id) {
            return None;
        }
        for (name, amount) in consumed.iter().flatten() {
            let has = capacity.and_then(|capacity| capacity::thousandths(&capacity.get(name)?.value));
            let before = used.shares.get(&(id.clone(), name.clone())).copied().unwrap_or_default();
            if before + capacity::thousandths(amount).unwrap_or_default() > has.unwrap_or_default() {
                return None;
            }
        }
        let result = DeviceRequestAllocationResult {
            request: wish.name.to_owned(),
            driver: id.0.clone(),
            pool: id.1.clone(),
            device: id.2.clone(),
            share_id: shared.then(|| self.uids[chosen.results.len()].clone()),
            consumed_capacity: consumed,
            tolerations: Some(wish.tolerations.to_vec()).filter(|list| !list.is_empty()),
            ..Default::default()
        };
        chosen.usage.add(&result);
        chosen.results.push(result);
        Some(chosen)
    }
}

fn tolerates(tolerations: &[DeviceToleration], taint: &DeviceTaint) -> bool {
    taint.effect == "None"
        || tolerations.iter().any(|toleration| {
            let effect = toleration.effect.as_ref().is_none_or(|effect| *effect == taint.effect);
            let key = toleration.key.as_ref().is_none_or(|key| *key == taint.key);
            let exists = toleration.operator.as_deref() == Some("Exists");
            effect && key && (exists || toleration.value == taint.value)
        })
}

/// The devices that pods of a node can use: the newest generation of each pool, if all of its slices are there.
fn candidates<'a>(slices: &'a [ResourceSlice], node: &str) -> Vec<Candidate<'a>> {
    let mut pools: BTreeMap<(&str, &str), Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in slices {
        pools.entry((&slice.spec.driver, &slice.spec.pool.name)).or_default().push(slice);
    }
    let mut found = Vec::new();
    for ((driver, pool), slices) in pools {
        let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
        let slices: Vec<_> =
            slices.into_iter().filter(|slice| Some(slice.spec.pool.generation) == newest).collect();
        let expected = slices.iter().map(|slice| slice.spec.pool.resource_slice_count).max();
        if expected != i64::try_from(slices.len()).ok() {
            continue;
        }
        for slice in slices {
            let here =
                |name: &Option<String>, all: Option<bool>| name.as_deref() == Some(node) || all == Some(true);
            for device in slice.spec.devices.iter().flatten() {
                let each = slice.spec.per_device_node_selection == Some(true);
                let (name, all) = match each {
                    true => (&device.node_name, device.all_nodes),
                    false => (&slice.spec.node_name, slice.spec.all_nodes),
                };
                if here(name, all) {
                    let id = (driver.to_owned(), pool.to_owned(), device.name.clone());
                    found.push(Candidate { id, device, is_local: all != Some(true) });
                }
            }
        }
    }
    found
}

/// Whether pods that use the claim can run on the node.
fn selects(selector: &NodeSelector, node: &str) -> bool {
    selector.node_selector_terms.iter().any(|term| {
        let matches = |requirement: &NodeSelectorRequirement| {
            requirement.key == "metadata.name"
                && requirement.operator == "In"
                && requirement.values.iter().flatten().any(|value| value == node)
        };
        term.match_fields.iter().flatten().all(matches)
    })
}

impl ApiServer {
    /// Does what the scheduler does for a pod: chooses the first of `nodes` on which all its claims are allocated or can be, allocates
    /// and reserves them, and returns the node. Fails, with the reason for each node, if there is none.
    pub fn schedule(&self, pod: &Pod, nodes: &[&str]) -> Result<String, String> {
        let claims: BTreeSet<&str> = pod.claims.iter().map(|claim| claim.object.as_str()).collect();
        let mut reasons = Vec::new();
        for node in nodes {
            let mut fresh = Vec::new();
            let allocated = claims.iter().try_for_each(|name| {
                let before = self.get::<ResourceClaim>(&pod.namespace, name);
                let after = self.allocate(&pod.namespace, name, node)?;
                if before.as_ref() != Some(&after) {
                    fresh.push(*name);
                }
                Ok::<_, String>(())
            });
            match allocated {
                Ok(()) => return self.reserve(pod, &claims, node),
                Err(reason) => reasons.push(format!("node {node}: {reason}")),
            }
            fresh.iter().for_each(|name| self.remove_consumer(&pod.namespace, name, &pod.uid));
        }
        Err(reasons.join("; "))
    }

    fn reserve(&self, pod: &Pod, claims: &BTreeSet<&str>, node: &str) -> Result<String, String> {
        for name in claims {
            let reserved = self.update::<ResourceClaim>(&pod.namespace, name, |claim| {
                let consumers = claim.status.get_or_insert_default().reserved_for.get_or_insert_default();
                if !consumers.iter().any(|consumer| consumer.uid == pod.uid) {
                    consumers.push(ResourceClaimConsumerReference {
                        api_group: None,
                        resource: "pods".to_owned(),
                        name: pod.name.clone(),
                        uid: pod.uid.clone(),
                    });
                }
            });
            reserved.map_err(|error| error.to_string())?;
        }
        Ok(node.to_owned())
    }

    /// Allocates a claim to devices of a node, unless it is allocated there already. Fails if it is allocated elsewhere, or if the devices
    /// do not suffice.
    pub fn allocate(&self, namespace: &str, name: &str, node: &str) -> Result<ResourceClaim, String> {
        let claim = self.get::<ResourceClaim>(namespace, name);
        let claim = claim.ok_or_else(|| format!("resourceclaim {name:?} not found"))?;
        let Some(allocation) = self.plan(&claim, node)? else { return Ok(claim) };
        let allocated = self.update::<ResourceClaim>(namespace, name, |claim| {
            let finalizers = claim.metadata.finalizers.get_or_insert_default();
            if !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
                finalizers.push(FINALIZER.to_owned());
            }
            claim.status.get_or_insert_default().allocation = Some(allocation);
        });
        allocated.map_err(|error| error.to_string())
    }

    /// Returns the allocation of a claim on a node; `None` if it is allocated there already.
    fn plan(&self, claim: &ResourceClaim, node: &str) -> Result<Option<AllocationResult>, String> {
        let name = claim.metadata.name.clone().unwrap_or_default();
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(format!("resourceclaim {name:?} is being deleted"));
        }
        if let Some(ResourceClaimStatus { allocation: Some(allocation), reserved_for, .. }) = &claim.status {
            let full = reserved_for.as_ref().is_some_and(|consumers| consumers.len() >= CONSUMERS_MAX);
            let elsewhere =
                allocation.node_selector.as_ref().is_some_and(|selector| !selects(selector, node));
            return match (elsewhere, full) {
                (true, _) => Err(format!("resourceclaim {name:?} not available on the node")),
                (_, true) => Err(format!("resourceclaim {name:?} in use")),
                _ => Ok(None),
            };
        }
        let spec = claim.spec.devices.clone().unwrap_or_default();
        let (slices, all) = (self.list::<ResourceSlice>(), self.list::<ResourceClaim>());
        let classes: BTreeMap<String, DeviceClass> = self
            .list::<DeviceClass>()
            .into_iter()
            .map(|class| (class.metadata.name.clone().unwrap_or_default(), class))
            .collect();
        if spec.constraints.iter().flatten().next().is_some() {
            return Err(format!("resourceclaim {name:?}: constraints are not supported"));
        }
        let requests = spec.requests.as_deref().unwrap_or_default();
        let search = Search {
            candidates: candidates(&slices, node),
            classes: &classes,
            requests: requests.iter().map(Wish::of).collect::<Result<_, _>>()?,
            uids: self.change(|store| (0..RESULTS_MAX).map(|_| store.uid()).collect()),
        };
        let chosen = search.run(Usage::of(&all))?;
        let chosen =
            chosen.ok_or_else(|| format!("cannot allocate all devices of resourceclaim {name:?}"))?;
        let local = chosen.results.iter().any(|result| {
            search.candidates.iter().any(|candidate| {
                candidate.is_local && candidate.id.2 == result.device && candidate.id.1 == result.pool
            })
        });
        let mut config = Vec::new();
        for wish in &search.requests {
            let class = classes.get(wish.class);
            for class in class.and_then(|class| class.spec.config.as_ref()).into_iter().flatten() {
                config.push(DeviceAllocationConfiguration {
                    opaque: class.opaque.clone(),
                    requests: Some(vec![wish.name.to_owned()]),
                    source: "FromClass".to_owned(),
                });
            }
        }
        for claim in spec.config.into_iter().flatten() {
            let names = claim.requests.clone().unwrap_or_default();
            // Once for all requests, or once for each request that it names.
            let is_named = |request: &&DeviceRequest| names.contains(&request.name);
            let count = if names.is_empty() { 1 } else { requests.iter().filter(is_named).count() };
            let one = DeviceAllocationConfiguration {
                opaque: claim.opaque,
                requests: claim.requests,
                source: "FromClaim".to_owned(),
            };
            config.extend(std::iter::repeat_n(one, count));
        }
        Ok(Some(AllocationResult {
            allocation_timestamp: Some(Time(date(self.0.clock.now()))),
            devices: Some(DeviceAllocationResult {
                config: Some(config).filter(|config| !config.is_empty()),
                results: Some(chosen.results),
            }),
            node_selector: local.then(|| node_selector(node)),
        }))
    }

    /// Does what the controller of claims does when a pod has ended: removes its reservations, and deallocates claims that no pod uses
    /// any more.
    pub fn release(&self, pod_uid: &str) {
        for claim in self.list::<ResourceClaim>() {
            let reserved = |claim: &ResourceClaim| {
                let consumers = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
                consumers.is_some_and(|consumers| consumers.iter().any(|consumer| consumer.uid == pod_uid))
            };
            if !reserved(&claim) {
                continue;
            }
            let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            self.remove_consumer(namespace, name, pod_uid);
        }
    }

    /// Removes the reservation of a pod, and deallocates the claim if it was the last.
    fn remove_consumer(&self, namespace: &str, name: &str, pod_uid: &str) {
        // A claim that is being deleted is gone with its finalizer, before its status changes.
        let _ = self.update::<ResourceClaim>(namespace, name, |claim| {
            let status = claim.status.get_or_insert_default();
            let consumers = status.reserved_for.get_or_insert_default();
            consumers.retain(|consumer| consumer.uid != pod_uid);
            if consumers.is_empty() {
                (status.allocation, status.devices) = (None, None);
                let finalizers = claim.metadata.finalizers.get_or_insert_default();
                finalizers.retain(|finalizer| finalizer != FINALIZER);
            }
        });
    }
}

fn node_selector(node: &str) -> NodeSelector {
    let requirement = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    NodeSelector {
        node_selector_terms: vec![NodeSelectorTerm {
            match_fields: Some(vec![requirement]),
            match_expressions: None,
        }],
    }
}
