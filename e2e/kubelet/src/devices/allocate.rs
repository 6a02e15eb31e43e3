//! The calls of Allocate for a container.

use std::collections::BTreeMap;

use super::held::{NO_NUMA, Share};
use super::options::merged;
use super::state::numa_nodes;
use super::{Manager, Names};
use crate::journal::Event;
use crate::pod::{Container, Pod, RunOptions};

impl Manager {
    /// Allocates the devices that one container of the pod requests.
    pub(crate) async fn allocate(&self, pod: &Pod, container: &Container) -> Result<(), String> {
        {
            let mut state = self.state();
            if state.reusable.0 != pod.uid {
                state.reusable = (pod.uid.clone(), BTreeMap::new());
            }
        }
        self.allocate_container(pod, container).await?;
        let is_plain_init = !container.restartable && pod.init.iter().any(|init| init.name == container.name);
        let mut state = self.state();
        let state = &mut *state;
        for (resource, share) in state.held.of(&pod.uid, &container.name).into_iter().flatten() {
            let reusable = state.reusable.1.entry(resource.clone()).or_default();
            if is_plain_init {
                reusable.extend(share.names());
            } else {
                *reusable = reusable.difference(&share.names()).cloned().collect();
            }
        }
        Ok(())
    }

    async fn allocate_container(&self, pod: &Pod, container: &Container) -> Result<(), String> {
        let limits = self.state().chance.shuffled(container.limits.clone());
        let (mut freed, mut changed) = (false, false);
        for (resource, required) in limits {
            if !self.is_of_a_plugin(&resource) {
                continue;
            }
            if !freed {
                self.free_what_the_dead_had();
                freed = true;
            }
            let required = usize::try_from(required).unwrap_or(usize::MAX);
            let devices = self.choose(pod, container, &resource, required).await?;
            if devices.is_empty() {
                continue;
            }
            changed = true;
            self.call_allocate(pod, container, &resource, devices).await?;
        }
        if changed { self.write_checkpoint() } else { Ok(()) }
    }

    async fn call_allocate(
        &self,
        pod: &Pod,
        container: &Container,
        resource: &str,
        devices: Names,
    ) -> Result<(), String> {
        let (plugin, ids) = {
            let mut state = self.state();
            let Some(endpoint) = state.endpoints.get(resource).cloned() else {
                state.allocated = state.held.all();
                return Err(format!("unknown Device Plugin {resource}"));
            };
            (endpoint.running(resource), state.chance.shuffled(devices.clone()))
        };
        let (pod_uid, name) = (pod.uid.clone(), container.name.clone());
        self.journal.add(Event::AllocateCalled {
            resource: resource.to_owned(),
            pod: pod_uid.clone(),
            container: name.clone(),
            devices: ids.clone(),
        });
        let answer = match plugin {
            Ok(plugin) => plugin.allocate(ids.clone()).await.map_err(|error| error.to_string()),
            Err(stopped) => Err(stopped),
        };
        let mut state = self.state();
        let answer = answer.inspect_err(|_| state.allocated = state.held.all())?;
        // The real kubelet does not free the devices here, so they leak until some pod is removed.
        let Some(answer) = answer.container_responses.into_iter().next() else {
            return Err("no containers return in allocation response ".to_owned());
        };
        let mut by_node: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in &ids {
            let device = state.known.get(resource).and_then(|devices| devices.get(id));
            let mut nodes: Vec<i64> = device.map(|device| numa_nodes(device).collect()).unwrap_or_default();
            if nodes.is_empty() {
                nodes.push(NO_NUMA);
            }
            for node in nodes {
                by_node.entry(node).or_default().push(id.clone());
            }
        }
        state.held.insert(&pod_uid, &name, resource, Share { devices: by_node, answer });
        drop(state);
        let (resource, pod, container) = (resource.to_owned(), pod_uid, name);
        self.journal.add(Event::Allocated { resource, pod, container, devices: ids });
        Ok(())
    }

    /// Returns the settings with which the runtime starts the container.
    pub(crate) async fn run_options(&self, pod: &Pod, container: &Container) -> Result<RunOptions, String> {
        let limits = self.state().chance.shuffled(container.limits.clone());
        let mut allocate_again = false;
        for (resource, count) in limits {
            if count == 0 || !self.is_of_a_plugin(&resource) {
                continue;
            }
            let active = self.api.active_uids().contains(&pod.uid);
            let held = self.state().held.names(&pod.uid, &container.name, &resource);
            allocate_again |= active && held.is_none();
        }
        if allocate_again {
            self.allocate(pod, container).await?;
        }
        let mut state = self.state();
        let state = &mut *state;
        let shares: Vec<_> = state.held.of(&pod.uid, &container.name).into_iter().flatten().collect();
        let shares = state.chance.shuffled(shares);
        Ok(merged(shares.into_iter().map(|(_, share)| &share.answer), container))
    }

    /// Whether the device manager is responsible for the resource: it is registered or allocated.
    fn is_of_a_plugin(&self, resource: &str) -> bool {
        let state = self.state();
        state.healthy.contains_key(resource) || state.allocated.contains_key(resource)
    }
}
