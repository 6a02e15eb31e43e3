use proptest::prelude::*;
use std::collections::BTreeSet;

use super::allocate::{AllocateError, AllocateSettings, answer};
use super::preferred::choose;
use super::*;
use crate::config;

fn numa(id: u32, bytes: u64) -> Numa {
    Numa { id, bytes }
}

fn gpu(id: &str, numa: Option<u32>) -> Accelerator {
    Accelerator { kind: AcceleratorKind::Gpu, id: id.into(), file: None, numa, pci: None }
}

fn config(pools: &str) -> Config {
    Config { pools: serde_saphyr::from_str(pools).unwrap(), ..Config::default() }
}

fn node() -> NodeResources {
    NodeResources {
        memory: 4 << 30,
        numa: vec![numa(0, 3 << 30), numa(1, 1 << 30)],
        accelerators: vec![gpu("GPU-a", Some(0)), gpu("GPU-b", Some(1)), gpu("GPU-c", Some(1))],
    }
}

fn find<'a>(resources: &'a [Resource], name: &str) -> &'a Resource {
    resources.iter().find(|resource| resource.short_name() == name).unwrap()
}

fn ids(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

fn form(has_cdi: bool) -> AllocateSettings {
    AllocateSettings { has_cdi, ..AllocateSettings::of(&Config::default()) }
}

#[test]
fn only_existing_resources_are_advertised() {
    let resources = plan(&config("[{name: a, attachments: 3, numaNode: 1}]"), &node());
    let names: Vec<_> =
        resources.iter().map(|resource| (resource.name.as_str(), resource.units().len())).collect();
    let wanted =
        [("shmesh.io/shm", 32), ("shmesh.io/a", 3), ("shmesh.io/agent", 256), ("shmesh.io/gpu-ipc", 24)];
    assert_eq!(names, wanted);
    let shm = find(&resources, "shm");
    let on = |node| shm.units().iter().filter(|unit| unit.numa == Some(node)).count();
    assert_eq!((on(0), on(1)), (24, 8), "as the memory is");
    assert!(find(&resources, "a").units().iter().all(|unit| unit.numa == Some(1)));
    assert_eq!(find(&resources, "gpu-ipc").unit("GPU-b::7").unwrap().numa, Some(1));

    let bare = plan(&Config::default(), &NodeResources { memory: 1 << 30, ..NodeResources::default() });
    assert_eq!(bare.len(), 2);
    assert_eq!((bare[0].units().len(), bare[0].units()[7].id.as_str()), (8, "u7"));
    assert!(bare[0].units().iter().all(|unit| unit.numa.is_none()));
    let mut nothing = Config::default();
    nothing.shm.budget = config::Budget::Percent(0);
    nothing.identity.attachments = 0;
    assert!(plan(&nothing, &NodeResources::default()).is_empty());
}

#[test]
fn first_of_duplicate_unit_ids_is_found() {
    let unit = |id: &str, device| Unit { id: id.into(), numa: None, device, is_healthy: true };
    let units = vec![unit("u10", 0), unit("u9", 1), unit("u9", 2), unit("u1", 3), unit("u10", 4)];
    let resource = Resource::new("x.io/y".into(), ResourceKind::Shm { unit: 1 }, units);
    let device = |id| resource.unit(id).map(|unit| unit.device);
    assert_eq!([device("u10"), device("u9"), device("u1")], [Some(0), Some(1), Some(3)]);
    assert!(["", "u", "u0", "u100", "v", "U1"].iter().all(|id| device(id).is_none()));
}

#[test]
fn memory_is_a_cdi_device_of_the_exact_size() {
    let resources = plan(&Config::default(), &node());
    let given = answer(find(&resources, "shm"), &ids(&["n0u1", "n1u0", "n0u3"]), &form(true)).unwrap();
    assert_eq!(given.cdi_devices[0].name, "shmesh.io/shm=192Mi");
    assert_eq!(given.envs["SHMESH_SHM_BYTES"], (192 << 20).to_string());
    assert!(given.mounts.is_empty() && given.cdi_devices.len() == 1);
}

#[test]
fn pool_response_depends_on_cdi_and_user_namespaces() {
    let give = |pool: &str, has_cdi| {
        let resources = plan(&config(pool), &node());
        answer(find(&resources, "a"), &ids(&["a1"]), &form(has_cdi)).unwrap()
    };
    let names = |given: &shmesh_kubelet_api::deviceplugin::ContainerAllocateResponse| {
        given.cdi_devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>()
    };
    for pool in ["[{name: a}]", "[{name: a, userNamespaces: always}]"] {
        let given = give(pool, true);
        assert_eq!(names(&given), ["shmesh.io/pool=a", "shmesh.io/agent=identity"]);
        assert!(given.mounts.is_empty());
    }
    let mixed = give("[{name: a, userNamespaces: mixed, mountPath: /ipc}]", true);
    assert_eq!(names(&mixed), ["shmesh.io/pool=a", "shmesh.io/agent=identity"]);
    assert_eq!((mixed.mounts.len(), mixed.mounts[0].container_path.as_str()), (1, "/ipc"));
    let plain = give("[{name: a}]", false);
    assert!(plain.cdi_devices.is_empty());
    let mounts: Vec<_> = plain
        .mounts
        .iter()
        .map(|one| (one.host_path.as_str(), one.container_path.as_str(), one.read_only))
        .collect();
    let agent = ("/run/shmesh/agent", "/run/shmesh/agent", true);
    assert_eq!(mounts, [("/dev/shm/shmesh/a", "/dev/shm", false), agent]);
    for given in [mixed, plain] {
        assert_eq!((given.envs["SHMESH_POOL"].as_str(), given.envs.len()), ("a", 3));
        assert_eq!(given.envs["SHMESH_IDENTITY"], "/run/shmesh/agent/agent.sock");
    }
}

#[test]
fn agent_provides_only_the_identity_service() {
    let resources = plan(&Config::default(), &node());
    let give = |has_cdi| answer(find(&resources, AGENT), &ids(&["a255"]), &form(has_cdi)).unwrap();
    let (with, without) = (give(true), give(false));
    assert_eq!(with.cdi_devices[0].name, "shmesh.io/agent=identity");
    assert_eq!((with.cdi_devices.len(), with.mounts.len()), (1, 0));
    assert_eq!((without.cdi_devices.len(), without.mounts.len()), (0, 1));
    assert_eq!(
        (without.mounts[0].container_path.as_str(), without.mounts[0].read_only),
        ("/run/shmesh/agent", true)
    );
    for given in [with, without] {
        assert_eq!(
            (given.envs["SHMESH_IDENTITY"].as_str(), given.envs.len()),
            ("/run/shmesh/agent/agent.sock", 1)
        );
    }
}

#[test]
fn slots_list_each_device_once() {
    let resources = plan(&Config::default(), &node());
    let given = answer(find(&resources, "gpu-ipc"), &ids(&["GPU-c::1", "GPU-a::0", "GPU-c::0"]), &form(true))
        .unwrap();
    assert_eq!(given.envs["SHMESH_GPU_UUIDS"], "GPU-a,GPU-c");
}

#[test]
fn invalid_allocate_requests_are_rejected() {
    let resources = plan(&Config::default(), &node());
    let shm = find(&resources, "shm");
    let refused = |asked: &[&str]| answer(shm, &ids(asked), &form(true)).unwrap_err();
    assert!(matches!(refused(&[]), AllocateError::Empty(_)));
    assert!(matches!(refused(&["n0u1", "n0u1"]), AllocateError::Twice { .. }));
    for unknown in ["n0u24", "", "u0", "N0U1", "../n0u1", "\0", "a0"] {
        assert!(matches!(refused(&[unknown]), AllocateError::Unknown { .. }), "{unknown:?}");
    }
    let AllocateError::Unknown { id, .. } = refused(&[&"x".repeat(1 << 20)]) else { panic!() };
    assert_eq!(id.len(), 64, "what is said back has a length");
    let every: Vec<_> = shm.units().iter().map(|unit| unit.id.clone()).collect();
    for (size, must) in [(0, 0), (-1, 0), (33, 0), (i64::MAX, 0), (i64::MIN, 0), (1, 2)] {
        assert!(
            matches!(choose(shm, &every, &every[..must], size), Err(AllocateError::Size { .. })),
            "{size} {must}"
        );
    }
    assert!(choose(shm, &every[1..], &every[..1], 3).is_err(), "must, but is not free");
}

fn chosen(resource: &Resource, available: &[&str], must: &[&str], size: i64) -> Vec<String> {
    let mut chosen = choose(resource, &ids(available), &ids(must), size).unwrap();
    chosen.sort();
    chosen
}

#[test]
fn preferred_allocation_packs_numa_then_device() {
    let resources = plan(&Config::default(), &node());
    let gpus = find(&resources, "gpu-ipc");
    let free = ["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1", "GPU-b::2", "GPU-c::5", "GPU-c::6"];
    // The fullest that is enough.
    assert_eq!(chosen(gpus, &free, &[], 1), ["GPU-a::0"]);
    assert_eq!(chosen(gpus, &free, &[], 2), ["GPU-a::0", "GPU-a::1"]);
    assert_eq!(chosen(gpus, &free, &[], 3), ["GPU-b::0", "GPU-b::1", "GPU-b::2"]);
    // No device is enough, a node is.
    assert_eq!(chosen(gpus, &free, &[], 5), ["GPU-b::0", "GPU-b::1", "GPU-b::2", "GPU-c::5", "GPU-c::6"]);
    // Near what must be.
    assert_eq!(chosen(gpus, &free, &["GPU-c::6"], 2), ["GPU-c::5", "GPU-c::6"]);
    assert_eq!(chosen(gpus, &free, &["GPU-b::2"], 4), ["GPU-b::0", "GPU-b::1", "GPU-b::2", "GPU-c::5"]);
    assert_eq!(chosen(gpus, &free, &[], 7).len(), 7);
}

proptest! {
    /// Whatever is free: the answer has the size, is free, has what it must, and needs no more NUMA nodes than the best.
    #[test]
    fn every_preferred_allocation_is_valid(
        free in proptest::sample::subsequence((0..24_usize).collect::<Vec<_>>(), 1..=24),
        size in 1..=24_usize,
        must in 0..4_usize,
    ) {
        let resources = plan(&Config::default(), &node());
        let gpus = find(&resources, "gpu-ipc");
        let id = |at: &usize| gpus.units()[*at].id.clone();
        let available: Vec<_> = free.iter().map(id).collect();
        let size = size.min(available.len());
        let must: Vec<_> = available.iter().rev().take(must.min(size)).cloned().collect();
        let chosen = choose(gpus, &available, &must, size as i64).unwrap();
        let distinct: BTreeSet<_> = chosen.iter().collect();
        prop_assert_eq!((distinct.len(), chosen.len()), (size, size));
        prop_assert!(must.iter().all(|id| chosen.contains(id)));
        prop_assert!(chosen.iter().all(|id| available.contains(id)));
        let nodes = |ids: &[String]| ids.iter().map(|id| gpus.unit(id).unwrap().numa).collect::<BTreeSet<_>>();
        let fits_one = [Some(0), Some(1)].into_iter().any(|node| {
            let here = |id: &&String| gpus.unit(id).unwrap().numa == node;
            available.iter().filter(here).count() >= size && must.iter().filter(here).count() == must.len()
        });
        prop_assert_eq!(nodes(&chosen).len() == 1, fits_one);
    }

    /// The bound on the size of a list holds for what is really sent.
    #[test]
    fn list_size_bound_holds(count in 1..3000_u64) {
        use shmesh_kubelet_api::deviceplugin as api;
        let devices = (0..count)
            .map(|at| api::Device {
                id: format!("n99u{at}"),
                health: shmesh_kubelet_api::UNHEALTHY.into(),
                topology: Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 99 }] }),
            })
            .collect();
        let list = api::ListAndWatchResponse { devices };
        prop_assert!(prost::Message::encoded_len(&list) as u64 <= list_bytes(count));
    }
}
