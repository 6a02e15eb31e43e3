//! Behaviours 15 and 17: what outlives the kubelet, and what happens when it comes back.

use std::fs;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use shmesh_fake_kubelet::{Event, Phase, checkpoint_is_intact};
use shmesh_kubelet_api::deviceplugin::ContainerAllocateResponse;

use crate::plugin::{Fake, device, devices};
use crate::{R, SOON, allocatable, count, node, pod};

#[tokio::test(start_paused = true)]
async fn b15_the_checkpoint_is_written_at_every_list_and_allocation() {
    let (_dir, node) = node().await;
    assert!(!node.paths().checkpoint().exists());
    let plugin = Fake::new(0);
    plugin.list(vec![device("a", "Healthy", &[]), device("b", "sick", &[])]);
    let answer = ContainerAllocateResponse { envs: [("K".into(), "V".into())].into(), ..Default::default() };
    plugin.script(|script| script.answer = answer.clone());
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 1).await;
    let read = || fs::read_to_string(node.paths().checkpoint()).unwrap();
    let listed = read();
    assert!(listed.starts_with(
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"example.com/dev":["a"]}},"Checksum":"#
    ));
    assert_eq!(checkpoint_is_intact(&listed), Some(true));

    node.add_pod(pod("p", 1)).await;
    let json: serde_json::Value = serde_json::from_str(&read()).unwrap();
    let entry = &json["Data"]["PodDeviceEntries"][0];
    assert_eq!((&entry["PodUID"], &entry["ContainerName"]), (&"p".into(), &"main".into()));
    assert_eq!((&entry["ResourceName"], &entry["DeviceIDs"]["-1"][0]), (&R.into(), &"a".into()));
    let bytes = STANDARD.decode(entry["AllocResp"].as_str().unwrap()).unwrap();
    assert_eq!(ContainerAllocateResponse::decode(&*bytes).unwrap(), answer);

    plugin.list(vec![device("a", "Healthy", &[]), device("c", "Healthy", &[3])]);
    allocatable(&node, 2).await;
    let json: serde_json::Value = serde_json::from_str(&read()).unwrap();
    assert_eq!(json["Data"]["RegisteredDevices"][R].as_array().unwrap().len(), 2);
    node.add_pod(pod("q", 1)).await;
    assert!(read().contains(r#""DeviceIDs":{"3":["c"]}"#));
    assert_eq!(checkpoint_is_intact(&read()), Some(true));
}

#[tokio::test(start_paused = true)]
async fn b15_a_restart_restores_allocations_and_no_capacity() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.add_pod(pod("p", 2)).await;
    let holders = node.holders(R);
    node.kill_kubelet().await;
    assert!(node.resources().is_empty() && node.paths().kubelet_socket().exists());
    node.start_kubelet().await.unwrap();
    assert_eq!(node.resources()[R], Default::default(), "known, and stopped");
    assert_eq!((node.holders(R), node.allocated(R).len()), (holders, 2));
    tokio::time::sleep(Duration::from_secs(301)).await;
    node.update_status();
    assert!(!node.resources().contains_key(R), "five minutes count from the start");
}

#[tokio::test(start_paused = true)]
async fn b15_a_damaged_checkpoint_is_left_aside() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.add_pod(pod("p", 2)).await;
    node.kill_kubelet().await;
    let path = node.paths().checkpoint();
    fs::write(&path, fs::read_to_string(&path).unwrap().replace("d0", "d9")).unwrap();
    node.start_kubelet().await.unwrap();
    assert_eq!(count(&node, |event| matches!(event, Event::CheckpointIgnored { .. })), 1);
    assert!(node.holders(R).is_empty() && node.resources().is_empty());
}

#[tokio::test(start_paused = true)]
async fn b17a_a_kubelet_restart_leaves_running_containers_alone() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.add_pod(pod("p", 2)).await;
    node.restart_kubelet().await.unwrap();
    assert_eq!(node.pod("p").unwrap().phase, Phase::Running, "though no plugin serves the resource yet");
    assert!(!plugin_socket(&node).exists(), "its socket was taken away");
    let status = node.add_pod(pod("new", 1)).await;
    assert!(status.message.contains("no healthy devices present"), "{}", status.message);

    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.restart_container("p", "main").await.unwrap();
    assert_eq!(plugin.calls("allocate").len(), 1);
    assert_eq!(node.add_pod(pod("next", 1)).await.phase, Phase::Running);
    assert_eq!(node.allocated(R).len(), 3, "nothing is given out twice");
}

fn plugin_socket(node: &shmesh_fake_kubelet::Node) -> std::path::PathBuf {
    node.paths().device_plugins().join("a.sock")
}

#[tokio::test(start_paused = true)]
async fn b17b_after_a_reboot_pods_fail_unless_the_plugin_was_first() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.add_pod(pod("p", 2)).await;
    let before = node.holders(R);
    drop(served);
    node.switch_off().await;
    node.start_kubelet_alone().await.unwrap();
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.learn_pods().await;
    let status = node.pod("p").unwrap();
    assert_eq!((status.phase, status.containers["main"].restarts), (Phase::Running, 1));
    assert_eq!((node.holders(R), plugin.calls("allocate").len()), (before, 1), "the same devices, unasked");

    drop(served);
    node.switch_off().await;
    node.start_kubelet().await.unwrap();
    let status = node.pod("p").unwrap();
    let message = "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices \
                   example.com/dev, which is unexpected";
    assert_eq!(
        (status.phase, status.reason.as_str(), status.message.as_str()),
        (Phase::Failed, "UnexpectedAdmissionError", message)
    );
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(node.pod("p").unwrap().phase, Phase::Failed, "never tried again");
}

#[tokio::test(start_paused = true)]
async fn b17b_after_a_reboot_devices_that_are_gone_fail_their_pod() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.add_pod(pod("p", 3)).await;
    drop(served);
    node.switch_off().await;
    node.start_kubelet_alone().await.unwrap();
    plugin.list(devices(2));
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 2).await;
    node.learn_pods().await;
    let message = node.pod("p").unwrap().message;
    let expected = "previously allocated devices are no longer healthy; cannot allocate unhealthy devices example.com/dev";
    assert!(message.contains(expected), "{message}");
}

#[tokio::test(start_paused = true)]
async fn b17c_pods_deleted_while_the_kubelet_is_down_are_freed_at_the_next_admission() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.add_pod(pod("p", 2)).await;
    node.kill_kubelet().await;
    node.delete_pod("p");
    assert_eq!(node.add_pod(pod("waiting", 1)).await.phase, Phase::Pending, "no kubelet, no verdict");
    node.delete_pod("waiting");
    node.start_kubelet().await.unwrap();
    assert_eq!(node.allocated(R).len(), 2, "from the checkpoint");
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    assert_eq!(node.add_pod(pod("q", 3)).await.phase, Phase::Running);
}

#[tokio::test(start_paused = true)]
async fn b17_a_kubelet_that_is_killed_lets_go_of_every_connection() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    plugin.script(|script| script.on_allocate = crate::plugin::Outcome::Hang);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    let adding = tokio::spawn({
        let node = node.clone();
        async move { node.add_pod(pod("p", 1)).await }
    });
    node.wait_for(SOON, |node| count(node, |e| matches!(e, Event::AllocateCalled { .. })) == 1)
        .await
        .unwrap();
    node.kill_kubelet().await;
    assert_eq!(adding.await.unwrap().phase, Phase::Pending, "not yet admitted");
    plugin.script(|script| script.on_allocate = crate::plugin::Outcome::Good);
    node.start_kubelet_alone().await.unwrap();
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.learn_pods().await;
    assert_eq!(node.pod("p").unwrap().phase, Phase::Running);
}
