//! Choosing the devices of a container: reused ones, then those on its NUMA nodes, then those that the plugin prefers.

use std::collections::BTreeMap;

use super::held::NO_NUMA;
use super::state::{State, numa_nodes};
use super::{Manager, Names};
use crate::journal::Event;
use crate::pod::{Container, Pod};

/// A choice in progress. Devices are marked as allocated when they are chosen, and stay marked if the choice fails.
struct Choice<'a> {
    resource: &'a str,
    taken: Names,
    needed: usize,
}

impl Choice<'_> {
    /// Chooses as many of these devices as are needed, in no order. Returns whether there are enough now.
    fn take(&mut self, state: &mut State, from: &Names) -> bool {
        let fresh: Vec<String> = from.difference(&self.taken).cloned().collect();
        for device in state.chance.shuffled(fresh) {
            state.allocated.entry(self.resource.to_owned()).or_default().insert(device.clone());
            self.taken.insert(device);
            self.needed -= 1;
            if self.needed == 0 {
                return true;
            }
        }
        false
    }
}

/// Free devices: on the container's NUMA nodes, on others, on none.
struct ByAffinity {
    aligned: Names,
    unaligned: Names,
    elsewhere: Names,
}

impl Manager {
    /// The devices to call Allocate with; none if there is nothing to allocate.
    pub(super) async fn choose(
        &self,
        pod: &Pod,
        container: &Container,
        resource: &str,
        required: usize,
    ) -> Result<Names, String> {
        let (uid, name) = (&pod.uid, &container.name);
        let mut choice = Choice { resource, taken: Names::new(), needed: required };
        let (groups, available) = {
            let mut state = self.state();
            let state = &mut *state;
            let before = state.held.names(uid, name, resource);
            if let Some(before) = &before {
                if before.len() != required {
                    return Err(format!(
                        "pod {uid:?} container {name:?} changed request for resource {resource:?} from {} to {required}",
                        before.len()
                    ));
                }
                choice.needed = 0;
            }
            // The kubelet was restarted while the container ran: the container has its devices.
            if !self.api.all_known() && self.api.is_running(uid, name) {
                return Ok(Names::new());
            }
            let Some(healthy) = state.healthy.get(resource).cloned() else {
                return Err(format!("cannot allocate unregistered device {resource}"));
            };
            if healthy.is_empty() {
                return Err(format!(
                    "no healthy devices present; cannot allocate unhealthy devices {resource}"
                ));
            }
            if before.is_some_and(|before| !healthy.is_superset(&before)) {
                return Err(format!(
                    "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                ));
            }
            if choice.needed == 0 {
                return Ok(Names::new());
            }
            let reusable = state.reusable.1.get(resource).cloned().unwrap_or_default();
            if choice.take(state, &reusable) {
                return Ok(choice.taken);
            }
            let available: Names = healthy.difference(&state.allocated(resource)).cloned().collect();
            if available.len() < choice.needed {
                return Err(format!(
                    "requested number of devices unavailable for {resource}. Requested: {}, Available: {}",
                    choice.needed,
                    available.len()
                ));
            }
            (by_affinity(state, container, resource, &available), available)
        };
        let ByAffinity { aligned, unaligned, elsewhere } = groups;

        // If there are more aligned devices than needed, the plugin chooses among them; otherwise all of them are taken, and it
        // chooses the rest.
        let choosable = if choice.needed < aligned.len() { &aligned } else { &available };
        if choice.needed >= aligned.len() && choice.take(&mut self.state(), &aligned) {
            return Ok(choice.taken);
        }
        let offered: Names = choosable.union(&choice.taken).cloned().collect();
        let preferred = self.preferred(resource, offered, &choice.taken, required).await?;
        let wished: Names = preferred.intersection(choosable).cloned().collect();
        let rest = if choice.needed < aligned.len() { vec![&aligned] } else { vec![&unaligned, &elsewhere] };
        for from in std::iter::once(&wished).chain(rest) {
            if choice.take(&mut self.state(), from) {
                return Ok(choice.taken);
            }
        }
        Err(format!(
            "unexpectedly allocated less resources than required. Requested: {required}, Got: {}",
            required - choice.needed
        ))
    }

    /// The devices that the plugin prefers, if its options say that it has preferences.
    async fn preferred(
        &self,
        resource: &str,
        available: Names,
        taken: &Names,
        size: usize,
    ) -> Result<Names, String> {
        let (plugin, available, must_include) = {
            let mut state = self.state();
            let Some(endpoint) = state.endpoints.get(resource).cloned() else {
                return Err(format!("endpoint not found in cache for a registered resource: {resource}"));
            };
            if !endpoint.options.get_preferred_allocation_available {
                return Ok(Names::new());
            }
            let available = state.chance.shuffled(available);
            (endpoint.running(resource), available, state.chance.shuffled(taken.iter().cloned()))
        };
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        self.journal.add(Event::PreferenceAsked {
            resource: resource.to_owned(),
            available: available.clone(),
            must_include: must_include.clone(),
            size,
        });
        let answer = match plugin {
            Ok(plugin) => {
                plugin.preferred(available, must_include, size).await.map_err(|error| error.to_string())
            }
            Err(stopped) => Err(stopped),
        };
        let failed = |error| format!("device plugin GetPreferredAllocation rpc failed with err: {error}");
        Ok(answer.map_err(failed)?.unwrap_or_default().into_iter().collect())
    }
}

/// A device on several NUMA nodes belongs to the best of them: one that the container is on, or else that with the fewest
/// devices.
fn by_affinity(state: &State, container: &Container, resource: &str, available: &Names) -> ByAffinity {
    let mut groups = ByAffinity { aligned: Names::new(), unaligned: Names::new(), elsewhere: Names::new() };
    let known = state.known.get(resource);
    let nodes_of = |device: &String| -> Vec<i64> {
        let device = known.and_then(|known| known.get(device));
        let nodes: Vec<i64> = device.map(|device| numa_nodes(device).collect()).unwrap_or_default();
        if nodes.is_empty() { vec![NO_NUMA] } else { nodes }
    };
    let has_topology =
        known.is_some_and(|known| known.values().any(|device| numa_nodes(device).next().is_some()));
    let Some(affinity) = container.numa.as_ref().filter(|_| has_topology) else {
        groups.elsewhere = available.clone();
        return groups;
    };
    let mut counts: BTreeMap<i64, usize> = BTreeMap::new();
    for node in available.iter().flat_map(nodes_of) {
        *counts.entry(node).or_default() += 1;
    }
    let rank = |node: &i64| (!affinity.contains(node), *node == NO_NUMA, counts[node]);
    for device in available {
        let best = nodes_of(device).into_iter().min_by_key(rank).unwrap_or(NO_NUMA);
        let group = match best {
            NO_NUMA => &mut groups.elsewhere,
            node if affinity.contains(&node) => &mut groups.aligned,
            _ => &mut groups.unaligned,
        };
        group.insert(device.clone());
    }
    groups
}
