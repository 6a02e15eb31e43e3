//! Behaviour 20: plugins that are found by their socket.

use std::fs;
use std::time::Duration;

use shmesh_fake_kubelet::{Event, Node};
use tonic::Status;

use crate::plugin::{Fake, Outcome};
use crate::{R, allocatable, count, find, node};

fn registered(node: &Node) -> usize {
    count(node, |event| matches!(event, Event::Registered { .. }))
}

#[tokio::test(start_paused = true)]
async fn b20_socket_is_queried_registered_and_notified() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let path = node.paths().plugins_registry().join("dev@reg.sock");
    let before = node.clock().now();
    let served = plugin.serve(path.clone());
    allocatable(&node, 3).await;
    assert!(node.clock().now() - before <= Duration::from_secs(1));
    node.wait_for(crate::SOON, |_| plugin.statuses().len() == 1).await.unwrap();
    let status = &plugin.statuses()[0];
    assert!(status.plugin_registered && status.error.is_empty());
    assert_eq!(plugin.calls("info").len(), 1);

    // Made again: given up, and registered a second later.
    drop(served);
    let served = plugin.serve(path.clone());
    node.wait_for(Duration::from_secs(3), |node| registered(node) == 2).await.unwrap();
    allocatable(&node, 3).await;

    // Gone, though it is still served.
    fs::remove_file(&path).unwrap();
    allocatable(&node, 0).await;
    assert_eq!(node.capacity(R), 3);
    drop(served);
}

#[tokio::test(start_paused = true)]
async fn b20_after_a_kubelet_restart_the_plugin_need_do_nothing() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let _served = plugin.serve(node.paths().plugins_registry().join("dev@reg.sock"));
    allocatable(&node, 3).await;
    node.restart_kubelet().await.unwrap();
    let before = node.clock().now();
    allocatable(&node, 3).await;
    assert!(node.clock().now() - before < Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn b20_directories_below_are_watched_and_hidden_names_and_files_are_not() {
    let (_dir, node) = node().await;
    let root = node.paths().plugins_registry();
    fs::create_dir(root.join("sub")).unwrap();
    fs::create_dir(root.join(".hidden")).unwrap();
    fs::write(root.join("file"), "").unwrap();
    let hidden = Fake::new(9);
    let _hidden = (hidden.serve(root.join(".dev@reg.sock")), hidden.serve(root.join(".hidden/dev@reg.sock")));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let plugin = Fake::new(3);
    let _served = plugin.serve(root.join("sub/dev@reg.sock"));
    allocatable(&node, 3).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!((node.allocatable(R), hidden.calls("info").len()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn b20_a_separate_endpoint_is_dialled() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    let endpoint = node.paths().root().join("elsewhere.sock");
    plugin.script(|script| script.info.endpoint = endpoint.display().to_string());
    let _reg = plugin.serve(node.paths().plugins_registry().join("dev@reg.sock"));
    let _served = plugin.serve(endpoint.clone());
    allocatable(&node, 3).await;
    let socket = find(&node, |event| match event {
        Event::Registered { socket, .. } => Some(socket.clone()),
        _ => None,
    });
    assert_eq!(socket, endpoint.display().to_string());
}

#[tokio::test(start_paused = true)]
async fn b20_errors_are_reported_and_retried_with_backoff() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    plugin.script(|script| script.info.supported_versions = vec!["v1".to_owned(), "v2".to_owned()]);
    let _served = plugin.serve(node.paths().plugins_registry().join("dev@reg.sock"));
    tokio::time::sleep(Duration::from_secs(20)).await;
    let told = plugin.statuses();
    let error = "RegisterPlugin error -- plugin validation failed with err: manager version, v1beta1, is not among plugin supported versions [v1 v2]";
    assert!(told.iter().all(|status| !status.plugin_registered && status.error == error), "{told:?}");
    let at: Vec<u64> = node
        .events()
        .iter()
        .filter(|record| matches!(record.event, Event::RegistrationFailed { .. }))
        .map(|record| record.at.as_secs())
        .collect();
    let pauses: Vec<u64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pauses, [1, 2, 3, 5], "0.5 s, doubled, and looked at once a second: {at:?}");

    plugin.script(|script| script.info.supported_versions = vec!["v1beta1".to_owned()]);
    node.wait_for(Duration::from_secs(17), |node| node.allocatable(R) == 3).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn b20_names_types_and_silence() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(3);
    plugin.script(|script| script.info.name = "dev".to_owned());
    let _served = plugin.serve(node.paths().plugins_registry().join("name@reg.sock"));
    let alien = Fake::new(3);
    alien.script(|script| script.info.r#type = "CSIPlugin".to_owned());
    let path = node.paths().plugins_registry().join("type@reg.sock");
    let _alien = alien.serve(path.clone());
    let silent = Fake::new(3);
    silent.script(|script| script.on_info = Outcome::Hang);
    let _silent = silent.serve(node.paths().plugins_registry().join("silent@reg.sock"));
    let refusing = Fake::new(3);
    refusing.script(|script| script.on_options = Outcome::Fail(Status::internal("no")));
    let _refusing = refusing.serve(node.paths().plugins_registry().join("refusing@reg.sock"));
    tokio::time::sleep(Duration::from_secs(3)).await;

    let error = "RegisterPlugin error -- plugin validation failed with err: invalid name of device plugin socket: the ResourceName \"dev\" is invalid";
    assert_eq!(plugin.statuses()[0].error, error);
    let error = format!(
        "RegisterPlugin error -- no handler registered for plugin type: CSIPlugin at socket {}",
        path.display()
    );
    assert_eq!(alien.statuses()[0].error, error);
    let error = "RegisterPlugin error -- plugin registration failed with err: failed to get device plugin options: rpc error: code = Internal desc = no";
    assert_eq!(refusing.statuses()[0].error, error);
    let failed = |event: &Event| matches!(event, Event::RegistrationFailed { socket, error } if socket.contains("silent") && error.ends_with("code = DeadlineExceeded desc = context deadline exceeded"));
    assert!(count(&node, failed) >= 1);
    assert!(node.resources().is_empty());
}
