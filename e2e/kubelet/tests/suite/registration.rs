//! Behaviours 1 to 4: start, Register, options, and what is on the wire.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::Duration;

use shmesh_fake_kubelet::{Config, Event, Node};
use shmesh_kubelet_api::deviceplugin::DevicePluginOptions;
use shmesh_kubelet_api::deviceplugin::RegisterRequest;
use tonic::{Code, Status};

use crate::plugin::{Fake, Outcome, device, register, register_as, request};
use crate::{R, SOON, allocatable, find, node, pod};

#[tokio::test(start_paused = true)]
async fn b01_start_removes_sockets_and_keeps_files_directories_and_the_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let node = Node::new(Config::new(root.path()));
    let dir = node.paths().device_plugins();
    fs::create_dir_all(dir.join("dir")).unwrap();
    fs::write(dir.join("file"), "").unwrap();
    let checkpoint = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
    fs::write(node.paths().checkpoint(), checkpoint).unwrap();
    for socket in ["kubelet.sock", "plugin.sock", "dir/deep.sock"] {
        drop(std::os::unix::net::UnixListener::bind(dir.join(socket)).unwrap());
    }
    node.start_kubelet().await.unwrap();

    assert!(!dir.join("plugin.sock").exists());
    assert!(dir.join("dir/deep.sock").exists() && dir.join("file").exists());
    assert_eq!(fs::read_to_string(node.paths().checkpoint()).unwrap(), checkpoint);
    assert!(fs::metadata(node.paths().kubelet_socket()).unwrap().file_type().is_socket());
    assert_eq!(fs::read(dir.join("DEPRECATION")).unwrap(), b"");
    find(&node, |event| matches!(event, Event::CheckpointIgnored { .. }).then_some(()));

    let fresh = tempfile::tempdir().unwrap();
    let node = Node::new(Config::new(fresh.path().join("kubelet")));
    node.start_kubelet().await.unwrap();
    let mode = fs::metadata(node.paths().device_plugins()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777 & !0o027, 0o750, "less the umask");
}

async fn refusal(node: &Node, change: impl FnOnce(&mut RegisterRequest)) -> String {
    let mut request = request("missing.sock");
    change(&mut request);
    let refused = register_as(node, request).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unknown);
    refused.message().to_owned()
}

#[tokio::test(start_paused = true)]
async fn b02_register_checks_version_then_name_then_dials_then_asks_for_options() {
    let (_dir, node) = node().await;
    let both_wrong = |request: &mut RegisterRequest| {
        request.version = "v1alpha1".to_owned();
        request.resource_name = "shm".to_owned();
    };
    let version =
        r#"requested API version "v1alpha1" is not supported by kubelet. Supported version is ["v1beta1"]"#;
    assert_eq!(refusal(&node, both_wrong).await, version);
    for bad in ["shm", "kubernetes.io/shm", "Example_x.com/shm"] {
        let message = refusal(&node, |request| request.resource_name = bad.to_owned()).await;
        assert_eq!(message, format!("the ResourceName {bad:?} is invalid"));
    }

    let before = node.clock().now();
    let message = refusal(&node, |_| {}).await;
    assert_eq!(message, "failed to dial device plugin: context deadline exceeded");
    let taken = node.clock().now() - before;
    assert!(taken >= Duration::from_secs(10) && taken < Duration::from_millis(10_100), "{taken:?}");

    // A listener that does not accept is not a server either.
    let silent = node.paths().device_plugins().join("silent.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let message = register(&node, "silent.sock").await.unwrap_err();
    assert_eq!(message.message(), "failed to dial device plugin: context deadline exceeded");

    let plugin = Fake::new(1);
    let _served = plugin.serve_at(&node, "a.sock");
    plugin.script(|script| script.on_options = Outcome::Fail(Status::internal("no")));
    let message = register(&node, "a.sock").await.unwrap_err();
    let options = "failed to get device plugin options: rpc error: code = Internal desc = no";
    assert_eq!((message.code(), message.message()), (Code::Unknown, options));
    assert_eq!((plugin.calls("options").len(), plugin.calls("list").len()), (1, 0));

    plugin.script(|script| script.on_options = Outcome::Good);
    register(&node, "a.sock").await.unwrap();
    allocatable(&node, 1).await;
}

#[tokio::test(start_paused = true)]
async fn b02_a_plugin_that_comes_up_while_it_is_dialled_is_found() {
    let (_dir, node) = node().await;
    let registering = tokio::spawn({
        let node = node.clone();
        async move { register(&node, "late.sock").await }
    });
    tokio::time::sleep(Duration::from_secs(3)).await;
    let _served = Fake::new(2).serve_at(&node, "late.sock");
    registering.await.unwrap().unwrap();
    allocatable(&node, 2).await;
}

#[tokio::test(start_paused = true)]
async fn b03_options_of_the_register_request_are_ignored() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(4);
    let _served = plugin.serve_at(&node, "a.sock");
    let all = DevicePluginOptions { get_preferred_allocation_available: true, ..Default::default() };
    register_as(&node, RegisterRequest { options: Some(all), ..request("a.sock") }).await.unwrap();
    allocatable(&node, 4).await;
    node.add_pod(pod("a", 1)).await;
    assert_eq!(plugin.calls("preferred").len(), 0);

    plugin.script(|script| script.options = all);
    register(&node, "a.sock").await.unwrap();
    allocatable(&node, 4).await;
    node.add_pod(pod("b", 1)).await;
    assert_eq!(plugin.calls("preferred").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn b04_the_plugin_is_localhost_and_the_registration_socket_is_its_path() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(1);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 1).await;
    let headers = plugin.headers();
    assert_eq!(headers.len(), 2);
    for request in &headers {
        assert_eq!((request[":authority"].as_str(), request["te"].as_str()), ("localhost", "trailers"));
        assert_eq!(request["user-agent"], "grpc-go/1.79.3");
        assert_eq!(request["content-type"], "application/grpc");
        assert!(!request.contains_key("grpc-timeout"), "no deadline: {request:?}");
    }

    let found = Fake::new(1);
    found.script(|script| script.info.name = "example.com/found".to_owned());
    let path = node.paths().plugins_registry().join("dev.example.com@reg.sock");
    let _served = found.serve(path.clone());
    node.wait_for(SOON, |node| node.allocatable("example.com/found") == 1).await.unwrap();
    let info = &found.headers()[0];
    let encoded = path.to_str().unwrap().replace('/', "%2F");
    assert_eq!((info[":authority"].as_str(), info["grpc-timeout"].as_str()), (encoded.as_str(), "1000000u"));
    let options = found.headers().into_iter().find(|headers| headers[":path"].ends_with("Options")).unwrap();
    assert_eq!(options[":authority"], "localhost");
}

/// A Rust server answers PROTOCOL_ERROR to an authority without an `@`, and works with one.
#[tokio::test(start_paused = true)]
async fn b04_a_rust_server_cannot_be_found_by_a_path_without_an_at_sign() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(1);
    let _served = plugin.serve(node.paths().plugins_registry().join("reg.sock"));
    let failed = |event: &Event| matches!(event, Event::RegistrationFailed { .. });
    node.wait_for(SOON, |node| node.events().iter().any(|r| failed(&r.event))).await.unwrap();
    let error = find(&node, |event| match event {
        Event::RegistrationFailed { error, .. } => Some(error.clone()),
        _ => None,
    });
    let expected =
        "rpc error: code = Internal desc = stream terminated by RST_STREAM with error code: PROTOCOL_ERROR";
    assert!(error.ends_with(expected), "{error}");
    assert!(plugin.headers().is_empty());
}

#[tokio::test(start_paused = true)]
async fn b04_a_list_of_more_than_4_mib_ends_the_stream() {
    let (_dir, node) = node().await;
    let plugin = Fake::new(1);
    let _served = plugin.up(&node, "a.sock").await;
    allocatable(&node, 1).await;
    // 24 bytes each: 2 outside, 2 + 11 for the name, 2 + 7 for the health.
    let list = |count: usize| (0..count).map(|n| device(&format!("{n:011}"), "Healthy", &[])).collect();
    plugin.list(list(174_000));
    allocatable(&node, 174_000).await;
    plugin.list(list(180_000));
    allocatable(&node, 0).await;
    assert_eq!(node.capacity(R), 174_000);
    let error = find(&node, |event| match event {
        Event::StreamEnded { error, .. } => Some(error.clone()),
        _ => None,
    });
    let expected = "rpc error: code = ResourceExhausted desc = grpc: received message larger than max (4320000 vs. 4194304)";
    assert_eq!(error, expected);
}
