//! Behaviours 5 to 7, 18 and 19: lists of devices, the race, the grace period, health, and podresources.

use std::time::Duration;

use shmesh_fake_kubelet::{Event, Phase, Race};
use shmesh_kubelet_api::podresources::ListPodResourcesRequest;
use shmesh_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use tonic::{Code, Status};

use crate::plugin::{Fake, Outcome, channel, device, devices, register};
use crate::{R, SOON, allocatable, count, node, node_with, pod};
use shmesh_fake_kubelet::{Container, Pod};

#[tokio::test(start_paused = true)]
async fn b05_each_list_replaces_the_one_before() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    let odd = vec![
        device("a", "Healthy", &[]),
        device("b", "healthy", &[]),
        device("c", "", &[]),
        device("a", "Healthy", &[]),
    ];
    plugin.list(odd);
    allocatable(&node, 1).await;
    assert_eq!(node.capacity(R), 3, "duplicates are one");
    plugin.list(Vec::new());
    allocatable(&node, 0).await;
    assert_eq!(node.resources()[R], Default::default());
    plugin.list(devices(2));
    allocatable(&node, 2).await;
    assert_eq!(plugin.calls("list").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn b05_the_end_of_a_stream_disconnects_and_nothing_is_tried_again() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    plugin.cut_streams();
    allocatable(&node, 0).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((node.allocatable(R), plugin.calls("list").len()), (0, 1));

    register(&node, "a.sock").await.unwrap();
    allocatable(&node, 3).await;
    drop(served);
    allocatable(&node, 0).await;
    let _again = plugin.serve_at(&node, "a.sock");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(node.allocatable(R), 0, "the socket is back, but no plugin registered");

    plugin.script(|script| script.on_list = Outcome::Fail(Status::unavailable("not now")));
    register(&node, "a.sock").await.unwrap();
    let ended =
        |event: &Event| matches!(event, Event::StreamEnded { error, .. } if error.ends_with("not now"));
    node.wait_for(SOON, |node| count(node, ended) == 1).await.unwrap();
    assert_eq!(node.allocatable(R), 0);
}

#[tokio::test(start_paused = true)]
async fn b06_the_end_of_an_old_stream_disconnects_the_new_plugin() {
    let (_dir, node) = node().await;
    let (old, new) = (Fake::new(3), Fake::new(5));
    let served = old.up(&node, "old.sock").await;
    allocatable(&node, 3).await;
    let _new = new.up(&node, "new.sock").await;
    allocatable(&node, 5).await;
    old.list(devices(4));
    allocatable(&node, 4).await; // The old one is still heard.
    new.list(devices(5));
    new.list(devices(6));
    allocatable(&node, 6).await;

    drop(served);
    allocatable(&node, 0).await;
    assert_eq!(node.capacity(R), 6);
    new.list(devices(7));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(node.allocatable(R), 0, "the new one was cancelled, for good");
    register(&node, "new.sock").await.unwrap();
    allocatable(&node, 7).await;
}

#[tokio::test(start_paused = true)]
async fn b06_the_race_can_be_fixed() {
    let (_dir, node) = node_with(|config| config.race = Race::Fixed).await;
    let (old, new) = (Fake::new(3), Fake::new(5));
    let served = old.up(&node, "old.sock").await;
    allocatable(&node, 3).await;
    let _new = new.up(&node, "new.sock").await;
    allocatable(&node, 5).await;
    drop(served);
    let disconnected = |event: &Event| matches!(event, Event::Disconnected { .. });
    node.wait_for(SOON, |node| count(node, disconnected) == 1).await.unwrap();
    assert_eq!(node.allocatable(R), 5);
    new.list(devices(6));
    allocatable(&node, 6).await;
}

/// A registration that fails takes away the name of the one before; its stream goes on, and its end is not noticed.
#[tokio::test(start_paused = true)]
async fn b06_a_failed_registration_makes_the_kubelet_forget_the_one_before() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    register(&node, "missing.sock").await.unwrap_err();
    plugin.list(devices(2));
    allocatable(&node, 2).await;
    drop(served);
    node.wait_for(SOON, |node| count(node, |e| matches!(e, Event::StreamEnded { .. })) == 1).await.unwrap();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(node.allocatable(R), 2, "stale for ever");
}

/// So does one that fails late, long after another has succeeded.
#[tokio::test(start_paused = true)]
async fn b06_a_registration_that_fails_late_takes_the_name_of_a_newer_one() {
    let (_dir, node) = node().await;
    let slow = tokio::spawn({
        let node = node.clone();
        async move { register(&node, "missing.sock").await }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    slow.await.unwrap().unwrap_err();
    drop(served);
    node.wait_for(SOON, |node| count(node, |e| matches!(e, Event::StreamEnded { .. })) == 1).await.unwrap();
    assert_eq!(node.allocatable(R), 3, "no plugin is known by that name any more");
}

#[tokio::test(start_paused = true)]
async fn b07_a_resource_is_kept_for_five_minutes() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    drop(served);
    allocatable(&node, 0).await;
    assert_eq!(node.capacity(R), 3);
    tokio::time::sleep(Duration::from_secs(299)).await;
    node.update_status();
    assert_eq!(node.status()[R].capacity, 3);
    tokio::time::sleep(Duration::from_secs(2)).await;
    node.update_status();
    assert_eq!(node.status()[R].capacity, 0, "the key stays");
    assert!(!node.resources().contains_key(R));
    let checkpoint = std::fs::read_to_string(node.paths().checkpoint()).unwrap();
    assert!(!checkpoint.contains(R), "{checkpoint}");
}

#[tokio::test(start_paused = true)]
async fn b07_plugin_that_returns_in_time_keeps_the_resource() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    drop(served);
    tokio::time::sleep(Duration::from_secs(299)).await;
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(node.status()[R].allocatable, 3);
    assert_eq!(count(&node, |event| matches!(event, Event::ResourceRemoved { .. })), 0);
}

#[tokio::test(start_paused = true)]
async fn b18_a_pod_s_status_has_the_health_of_its_devices() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(2);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 2).await;
    node.add_pod(pod("a", 1)).await;
    let id = plugin.calls("allocate")[0][0].clone();
    let health = || node.pod("a").unwrap().containers["main"].devices[R][&id].clone();
    assert_eq!(health(), "Healthy");
    let changes = |node: &shmesh_fake_kubelet::Node| {
        count(node, |e| matches!(e, Event::HealthChanged { pods } if pods[..] == ["a".to_owned()]))
    };
    let other = if id == "d0" { "d1" } else { "d0" };
    plugin.list(vec![device(&id, "broken", &[]), device(other, "Healthy", &[])]);
    node.wait_for(SOON, |node| changes(node) == 1).await.unwrap();
    assert_eq!(health(), "Unhealthy");
    plugin.list(vec![device(&id, "broken", &[]), device(other, "broken", &[])]);
    allocatable(&node, 0).await;
    assert_eq!(changes(&node), 1, "the other belongs to no pod");
    plugin.list(devices(2));
    node.wait_for(SOON, |node| changes(node) == 2).await.unwrap();
    assert_eq!(health(), "Healthy");
    drop(served);
    allocatable(&node, 0).await;
    assert_eq!((health().as_str(), changes(&node)), ("Healthy", 2), "a lost plugin is not told to the pod");
}

#[tokio::test(start_paused = true)]
async fn b19_podresources_list() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(0);
    plugin.list(vec![
        device("a", "Healthy", &[0, 1]),
        device("b", "Healthy", &[]),
        device("c", "broken", &[]),
    ]);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 2).await;
    let asking = Pod::new("p")
        .init(Container::new("setup").limit(R, 1))
        .init(Container::new("side").limit(R, 1).restartable())
        .container(Container::new("main").limit(R, 1));
    node.add_pod(asking).await;
    node.add_pod(Pod::new("none").container(Container::new("main"))).await;

    let mut client = PodResourcesListerClient::new(channel(&node.paths().pod_resources_socket()).await);
    let entry = |device: &shmesh_kubelet_api::podresources::ContainerDevices| {
        let nodes = device.topology.as_ref().map(|t| t.nodes.iter().map(|n| n.id).collect::<Vec<_>>());
        (device.device_ids[0].clone(), nodes)
    };
    let list = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources;
    let names: Vec<_> = list[0].containers.iter().map(|container| container.name.as_str()).collect();
    assert_eq!((list.len(), names), (2, vec!["side", "main"]), "plain init containers are left out");
    let mut entries: Vec<_> =
        list[0].containers.iter().flat_map(|container| &container.devices).map(entry).collect();
    entries.sort();
    assert_eq!(
        entries,
        [("a".to_owned(), Some(vec![0])), ("a".to_owned(), Some(vec![1])), ("b".to_owned(), None)]
    );
    assert!(list[1].containers[0].devices.is_empty());

    node.finish_pod("p");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let list = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources;
    assert_eq!((list.len(), list[0].name.as_str()), (1, "none"), "only active pods");
    assert!(node.allocated(R).is_empty(), "List frees what the dead had");
}

#[tokio::test(start_paused = true)]
async fn b19_podresources_takes_a_hundred_calls_a_second_and_ten_at_once() {
    let (_dir, node) = node().await;
    let mut client = PodResourcesListerClient::new(channel(&node.paths().pod_resources_socket()).await);
    for _ in 0..10 {
        client.list(ListPodResourcesRequest {}).await.unwrap();
    }
    let refused = client.list(ListPodResourcesRequest {}).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "rejected by rate limit"));
    tokio::time::sleep(Duration::from_millis(11)).await;
    client.list(ListPodResourcesRequest {}).await.unwrap();
    client.list(ListPodResourcesRequest {}).await.unwrap_err();
    assert_eq!(node.add_pod(pod("a", 1)).await.phase, Phase::Running, "no plugin serves that resource");
}
