//! The pod resources API, by which monitoring agents list the devices of pods.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shmesh_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use shmesh_kubelet_api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    NumaNode, PodResources, TopologyInfo,
};
use tonic::{Request, Response, Status};

use crate::api::Api;
use crate::clock::Clock;
use crate::config::Config;
use crate::devices::{DeviceLocation, Manager};
use crate::pod::{Container, Pod};
use crate::process::Process;
use crate::wire::serve;

const PER_SECOND: f64 = 100.0;
const BURST: f64 = 10.0;

/// Serves the API until the process ends.
pub(crate) fn start(
    config: &Config,
    api: Arc<Api>,
    manager: Arc<Manager>,
    process: &Process,
) -> io::Result<()> {
    let path = config.paths().pod_resources_socket();
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(dir)?;
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let limiter = Limiter { clock: config.clock.clone(), state: Mutex::new((BURST, config.clock.now())) };
    serve(&path, 0o755, PodResourcesListerServer::new(Lister { api, manager, limiter }), process)
}

/// A rate limit by a bucket of tokens.
#[derive(Debug)]
struct Limiter {
    clock: Clock,
    state: Mutex<(f64, Duration)>,
}

impl Limiter {
    fn check(&self) -> Result<(), Status> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, last) = *state;
        let now = self.clock.now();
        let tokens = BURST.min(tokens + (now - last).as_secs_f64() * PER_SECOND);
        let allowed = tokens >= 1.0;
        *state = (if allowed { tokens - 1.0 } else { tokens }, now);
        if allowed { Ok(()) } else { Err(Status::resource_exhausted("rejected by rate limit")) }
    }
}

#[derive(Debug)]
struct Lister {
    api: Arc<Api>,
    manager: Arc<Manager>,
    limiter: Limiter,
}

impl Lister {
    /// The resources of the pod's containers, without those of init containers that are not sidecars.
    fn resources(&self, pod: &Pod) -> PodResources {
        let sidecars = pod.init.iter().filter(|container| container.restartable);
        let containers = sidecars.chain(&pod.containers);
        PodResources {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            containers: containers.map(|container| self.container(pod, container)).collect(),
            cpu_ids: Vec::new(),
            memory: Vec::new(),
        }
    }

    fn container(&self, pod: &Pod, container: &Container) -> ContainerResources {
        let held = self.manager.held_by(&pod.uid, &container.name);
        ContainerResources {
            name: container.name.clone(),
            devices: held.into_iter().flat_map(entries).collect(),
            ..ContainerResources::default()
        }
    }
}

/// Returns an entry for each NUMA node of the device, or one entry if it has none.
fn entries(located: DeviceLocation) -> Vec<ContainerDevices> {
    let DeviceLocation { resource, device, nodes } = located;
    let entry = |topology| ContainerDevices {
        resource_name: resource.clone(),
        device_ids: vec![device.clone()],
        topology,
    };
    if nodes.is_empty() {
        return vec![entry(None)];
    }
    let topology = |id| Some(TopologyInfo { nodes: vec![NumaNode { id }] });
    nodes.into_iter().map(|id| entry(topology(id))).collect()
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.limiter.check()?;
        self.manager.free_what_the_dead_had();
        let pod_resources = self.api.active().iter().map(|pod| self.resources(pod)).collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("the fake kubelet has only List"))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("the fake kubelet has only List"))
    }
}
