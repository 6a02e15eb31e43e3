//! Behaviours 14, 16 and 22: starting containers, freeing devices, refusing pods, and one pod at a time.

use std::time::Duration;

use shmesh_fake_kubelet::{Container, ContainerState, Event, Phase, Pod};

use crate::plugin::{Fake, Outcome};
use crate::{R, SOON, allocatable, count, node, pod};

#[tokio::test(start_paused = true)]
async fn b14_a_container_restart_allocates_nothing_and_the_dead_are_freed_late() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(4);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 4).await;
    node.add_pod(pod("a", 3)).await;
    let before = node.pod("a").unwrap().containers["main"].options.clone();
    let after = node.restart_container("a", "main").await.unwrap().options;
    assert_eq!((before.envs, before.mounts), (after.envs, after.mounts));
    assert_eq!(plugin.calls("allocate").len(), 1);

    let calls = plugin.headers().len();
    assert!(node.delete_pod("a"));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(node.allocated(R).len(), 3, "nothing happens at deletion");
    assert_eq!(plugin.headers().len(), calls, "and the plugin is not notified");
    assert_eq!(node.add_pod(pod("b", 4)).await.phase, Phase::Running, "the next admission frees them");
    node.finish_pod("b");
    assert_eq!(node.add_pod(pod("c", 1)).await.phase, Phase::Running, "so it is with a pod that ended");
}

#[tokio::test(start_paused = true)]
async fn b16_container_without_a_device_fails_with_the_reason() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(2);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 2).await;
    let status = node.add_pod(pod("a", 3)).await;
    let message = "Allocate failed due to requested number of devices unavailable for example.com/dev. \
                   Requested: 3, Available: 2, which is unexpected";
    assert_eq!(
        (status.phase, status.reason.as_str(), status.message.as_str()),
        (Phase::Failed, "UnexpectedAdmissionError", message)
    );
    assert_eq!(status.containers["main"].state, ContainerState::Waiting(None));

    // Resources without a plugin are not checked at all.
    let unknown = Pod::new("b").container(Container::new("main").limit("example.com/unknown", 9));
    assert_eq!(node.add_pod(unknown).await.phase, Phase::Running);

    plugin.list(Vec::new());
    allocatable(&node, 0).await;
    let status = node.add_pod(pod("c", 1)).await;
    assert!(
        status
            .message
            .contains("no healthy devices present; cannot allocate unhealthy devices example.com/dev")
    );
}

/// Of a resource that was unknown when a pod came, the pod has no devices, but its request counts.
#[tokio::test(start_paused = true)]
async fn b16_out_of_a_resource_by_the_scheduler_s_own_predicate() {
    let (_dir, node) = node().await;
    assert_eq!(node.add_pod(pod("early", 2)).await.phase, Phase::Running);
    let plugin = Fake::new(3);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 3).await;
    node.update_status();
    let status = node.add_pod(pod("late", 2)).await;
    let message = "Node didn't have enough resource: example.com/dev, requested: 2, used: 2, capacity: 3";
    assert_eq!(
        (status.phase, status.reason.as_str(), status.message.as_str()),
        (Phase::Failed, "OutOfexample.com/dev", message)
    );
    assert_eq!(node.add_pod(pod("small", 1)).await.phase, Phase::Running);
}

#[tokio::test(start_paused = true)]
async fn b22_pods_are_admitted_one_at_a_time_and_one_that_hangs_stalls_all() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(4);
    plugin.script(|script| script.on_allocate = Outcome::Hang);
    let served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 4).await;
    let add = |name: &'static str| {
        let node = node.clone();
        tokio::spawn(async move { node.add_pod(pod(name, 1)).await })
    };
    let first = add("a");
    let called =
        |node: &shmesh_fake_kubelet::Node| count(node, |e| matches!(e, Event::AllocateCalled { .. }));
    node.wait_for(SOON, |node| called(node) == 1).await.unwrap();
    let others = [add("b"), add("c")];
    let unrelated = {
        let node = node.clone();
        tokio::spawn(async move { node.add_pod(Pod::new("none").container(Container::new("main"))).await })
    };
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!first.is_finished() && !unrelated.is_finished());
    assert_eq!(called(&node), 1, "the others have not been looked at");

    plugin.script(|script| script.on_allocate = Outcome::Good);
    drop(served);
    let status = first.await.unwrap();
    let error = "rpc error: code = Unavailable desc = error reading from server: EOF";
    assert_eq!(status.message, format!("Allocate failed due to {error}, which is unexpected"));
    for other in others {
        assert_eq!(other.await.unwrap().phase, Phase::Failed, "no plugin by now");
    }
    assert_eq!(unrelated.await.unwrap().phase, Phase::Running);
}
