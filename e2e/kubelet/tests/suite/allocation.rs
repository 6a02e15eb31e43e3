//! Behaviours 8 to 12: the choice of devices, the requests to plugins, and the answer to the runtime.

use std::collections::BTreeSet;
use std::time::Duration;

use shmesh_fake_kubelet::{Container, Event, Phase, Pod};
use shmesh_kubelet_api::deviceplugin::{
    CdiDevice, ContainerAllocateResponse, DevicePluginOptions, DeviceSpec, Mount, RegisterRequest,
};
use tonic::Status;

use crate::plugin::{Fake, Outcome, device, register_as, request};
use crate::{R, allocatable, find, node, node_with, pod};

fn with_preferences() -> DevicePluginOptions {
    DevicePluginOptions { get_preferred_allocation_available: true, ..Default::default() }
}

fn set<'a>(ids: impl IntoIterator<Item = &'a String>) -> BTreeSet<&'a str> {
    ids.into_iter().map(String::as_str).collect()
}

fn numa_devices() -> Vec<shmesh_kubelet_api::deviceplugin::Device> {
    let on = |id, nodes: &[i64]| device(id, "Healthy", nodes);
    vec![on("n0a", &[0]), on("n0b", &[0]), on("n0c", &[0]), on("n1a", &[1]), on("n1b", &[1]), on("none", &[])]
}

#[tokio::test(start_paused = true)]
async fn b08_with_a_choice_among_the_aligned_the_plugin_is_asked_about_them() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(0);
    plugin.list(numa_devices());
    plugin.script(|script| {
        script.options = with_preferences();
        // Neither what is elsewhere nor what does not exist counts, and a short answer is filled up.
        script.preferred = ["n1a", "nowhere", "n0c"].map(str::to_owned).to_vec();
    });
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 6).await;
    let aligned = Pod::new("a").container(Container::new("main").limit(R, 2).numa([0]));
    assert_eq!(node.add_pod(aligned).await.phase, Phase::Running);
    assert_eq!(set(&plugin.calls("preferred")[0]), BTreeSet::from(["n0a", "n0b", "n0c"]));
    let got = &plugin.calls("allocate")[0];
    assert!(got.len() == 2 && got.contains(&"n0c".to_owned()) && got.iter().all(|id| id.starts_with("n0")));
}

#[tokio::test(start_paused = true)]
async fn b08_without_a_choice_all_aligned_are_taken_and_then_the_plugin_is_asked() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(0);
    plugin.list(numa_devices());
    plugin.script(|script| {
        script.options = with_preferences();
        script.preferred = vec!["none".to_owned()];
    });
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 6).await;
    // Exactly as many as there are: no plugin is asked.
    node.add_pod(Pod::new("a").container(Container::new("main").limit(R, 2).numa([1]))).await;
    assert!(plugin.calls("preferred").is_empty());
    assert_eq!(set(&plugin.calls("allocate")[0]), BTreeSet::from(["n1a", "n1b"]));

    // More than there are: those on the node come first, then what is preferred.
    node.delete_pod("a");
    node.clear_events();
    node.add_pod(Pod::new("b").container(Container::new("main").limit(R, 3).numa([1]))).await;
    assert_eq!(set(&plugin.calls("allocate")[1]), BTreeSet::from(["n1a", "n1b", "none"]));
    let must_include = find(&node, |event| match event {
        Event::PreferenceAsked { must_include, size: 3, .. } => Some(must_include.clone()),
        _ => None,
    });
    assert_eq!(set(&must_include), BTreeSet::from(["n1a", "n1b"]));

    // Without a preference those on other nodes come before those on none.
    node.delete_pod("b");
    plugin.script(|script| script.preferred.clear());
    node.add_pod(Pod::new("c").container(Container::new("main").limit(R, 5).numa([1]))).await;
    assert!(!plugin.calls("allocate")[2].contains(&"none".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn b08_sets_have_no_order_but_a_seed_repeats_it() {
    let mut seen = BTreeSet::new();
    for seed in [1, 1, 2, 3, 4] {
        let (_dir, node) = node_with(|config| config.seed = seed).await;
        let plugin = Fake::new(50);
        let _served = plugin.up(&node, "a.sock").await;
        allocatable(&node, 50).await;
        node.add_pod(pod("a", 20)).await;
        let ids = plugin.calls("allocate").remove(0);
        assert!(seed != 1 || seen.is_empty() || seen.contains(&ids));
        seen.insert(ids);
    }
    assert_eq!(seen.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn b08_an_error_of_get_preferred_allocation_fails_the_pod() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(4);
    plugin.script(|script| {
        script.options = with_preferences();
        script.on_preferred = Outcome::Fail(Status::unimplemented("later"));
    });
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 4).await;
    let status = node.add_pod(pod("a", 1)).await;
    assert_eq!(status.phase, Phase::Failed);
    let message = "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: \
                   rpc error: code = Unimplemented desc = later, which is unexpected";
    assert_eq!(status.message, message);
    assert!(plugin.calls("allocate").is_empty());
}

#[tokio::test(start_paused = true)]
async fn b09_preferences_are_asked_with_what_is_allocated_and_without_a_deadline() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(4);
    plugin.script(|script| script.on_preferred = Outcome::Hang);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 4).await;
    node.add_pod(pod("unasked", 1)).await;
    assert!(plugin.calls("preferred").is_empty(), "only if the options say so");
    plugin.script(|script| script.options = with_preferences());
    register_as(&node, RegisterRequest { options: None, ..request("a.sock") }).await.unwrap();

    // An init container leaves its two devices to `main`, which wants three.
    plugin.script(|script| script.on_preferred = Outcome::Good);
    let asking =
        Pod::new("a").init(Container::new("setup").limit(R, 2)).container(Container::new("main").limit(R, 3));
    node.add_pod(asking).await;
    let reused = plugin.calls("allocate")[1].clone();
    let (available, must_include) = find(&node, |event| match event {
        Event::PreferenceAsked { available, must_include, size: 3, .. } => {
            Some((available.clone(), must_include.clone()))
        }
        _ => None,
    });
    assert_eq!((set(&must_include), available.len()), (set(&reused), 3));
    node.delete_pod("a");

    plugin.script(|script| script.on_preferred = Outcome::Hang);
    let hangs = tokio::spawn({
        let node = node.clone();
        async move { node.add_pod(pod("b", 1)).await }
    });
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!hangs.is_finished());
    let asked =
        plugin.headers().into_iter().rfind(|headers| headers[":path"].ends_with("/GetPreferredAllocation"));
    assert!(!asked.unwrap().contains_key("grpc-timeout"));
}

#[tokio::test(start_paused = true)]
async fn b10_one_allocate_per_container_and_resource_and_a_failure_rolls_back() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(6);
    let _served = plugin.up(&node, "a.sock").await;
    let other = Fake::new(2);
    let _other = other.serve_at(&node, "b.sock");
    let named = RegisterRequest { resource_name: "example.com/other".to_owned(), ..request("b.sock") };
    register_as(&node, named).await.unwrap();
    node.wait_for(crate::SOON, |n| n.allocatable(R) == 6 && n.allocatable("example.com/other") == 2)
        .await
        .unwrap();
    let two = Pod::new("a")
        .container(Container::new("x").limit(R, 2).limit("example.com/other", 1))
        .container(Container::new("y").limit(R, 1));
    assert_eq!(node.add_pod(two).await.phase, Phase::Running);
    let sizes: Vec<_> = plugin.calls("allocate").iter().map(Vec::len).collect();
    assert_eq!((sizes, other.calls("allocate").len()), (vec![2, 1], 1));

    plugin.script(|script| script.on_allocate = Outcome::Fail(Status::resource_exhausted("no")));
    let status = node.add_pod(pod("b", 1)).await;
    let message = "Allocate failed due to rpc error: code = ResourceExhausted desc = no, which is unexpected";
    assert_eq!((status.phase, status.message.as_str()), (Phase::Failed, message));
    assert_eq!(node.allocated(R).len(), 3, "what was chosen is free again");

    plugin.script(|script| script.on_allocate = Outcome::Empty);
    let status = node.add_pod(pod("c", 3)).await;
    let message = "Allocate failed due to no containers return in allocation response , which is unexpected";
    assert_eq!((status.phase, status.message.as_str()), (Phase::Failed, message));
    assert_eq!(node.allocated(R).len(), 6, "what was chosen leaks");
    plugin.script(|script| script.on_allocate = Outcome::Good);
    let status = node.add_pod(pod("d", 1)).await;
    assert!(status.message.contains("Requested: 1, Available: 0"), "{}", status.message);
    node.delete_pod("a");
    assert_eq!(node.add_pod(pod("e", 6)).await.phase, Phase::Running, "until some pod is removed");
}

#[tokio::test(start_paused = true)]
async fn b11_init_containers_come_first_and_leave_their_devices_but_sidecars_keep_theirs() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(10);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 10).await;
    let asking = Pod::new("a")
        .init(Container::new("setup").limit(R, 2))
        .init(Container::new("side").limit(R, 1).restartable())
        .init(Container::new("late").limit(R, 1))
        .container(Container::new("x").limit(R, 1))
        .container(Container::new("y").limit(R, 2));
    assert_eq!(node.add_pod(asking).await.phase, Phase::Running);
    let calls = plugin.calls("allocate");
    let [setup, side, late, x, y] = &calls[..] else { panic!("{calls:?}") };
    assert!(set(setup).is_superset(&set(side)), "a sidecar takes from what was left");
    let left: BTreeSet<_> = set(setup).difference(&set(side)).copied().collect();
    assert_eq!(set(late), left);
    assert_eq!(set(x), left, "what a plain init container had is used again");
    assert!(set(y).is_disjoint(&set(side)) && set(y).is_disjoint(&set(x)), "and only once");
    assert_eq!(node.allocated(R).len(), 4);
    let order: Vec<_> = node
        .events()
        .into_iter()
        .filter_map(|record| match record.event {
            Event::Allocated { container, .. } => Some(container),
            _ => None,
        })
        .collect();
    assert_eq!(order, ["setup", "side", "late", "x", "y"]);
}

#[tokio::test(start_paused = true)]
async fn b12_answers_are_merged_first_wins_and_the_pod_s_own_comes_last() {
    let (_dir, node) = node().await;
    let answer = |tag: &str| ContainerAllocateResponse {
        envs: [("A", tag), ("SAME", "1"), ("POD", tag)]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into_iter()
            .collect(),
        mounts: vec![Mount {
            container_path: "/dev/shm".into(),
            host_path: format!("/{tag}"),
            read_only: true,
        }],
        devices: vec![DeviceSpec {
            container_path: "/dev/x".into(),
            host_path: format!("/dev/{tag}"),
            permissions: "rw".into(),
        }],
        annotations: [("note".to_owned(), tag.to_owned())].into(),
        cdi_devices: vec![CdiDevice { name: "a.b/c=one".into() }, CdiDevice { name: format!("a.b/c={tag}") }],
    };
    let mut served = Vec::new();
    for (tag, resource) in [("left", R), ("right", "example.com/other")] {
        let plugin = Fake::new(1);
        plugin.script(|script| script.answer = answer(tag));
        served.push(plugin.serve_at(&node, &format!("{tag}.sock")));
        let named = RegisterRequest { resource_name: resource.to_owned(), ..request(&format!("{tag}.sock")) };
        register_as(&node, named).await.unwrap();
    }
    node.wait_for(crate::SOON, |n| n.allocatable(R) == 1 && n.allocatable("example.com/other") == 1)
        .await
        .unwrap();
    let main = Container::new("main")
        .limit(R, 1)
        .limit("example.com/other", 1)
        .env("POD", "spec")
        .mount("/data", "/host/data");
    node.add_pod(Pod::new("a").container(main)).await;
    let options = node.pod("a").unwrap().containers.remove("main").unwrap().options;
    let first = options.env("A").unwrap().to_owned();
    assert!(["left", "right"].contains(&first.as_str()));
    assert_eq!((options.env("SAME"), options.env("POD")), (Some("1"), Some("spec")));
    assert_eq!(options.envs.iter().filter(|(name, _)| name == "A").count(), 1);
    let mounts: Vec<_> =
        options.mounts.iter().map(|m| (m.container_path.as_str(), m.host_path.clone())).collect();
    assert_eq!(mounts, [("/dev/shm", format!("/{first}")), ("/data", "/host/data".to_owned())]);
    assert_eq!(options.devices.len(), 1);
    assert_eq!(options.annotations["note"], first);
    assert_eq!(options.annotations["io.kubernetes.container.restartCount"], "0");
    let names: BTreeSet<_> = options.cdi_devices.iter().map(String::as_str).collect();
    assert_eq!((names.len(), options.cdi_devices.len()), (3, 3));
    assert_eq!(
        options.conflicts.len(),
        5,
        "env A and POD, device, mount, annotation: {:?}",
        options.conflicts
    );
}
