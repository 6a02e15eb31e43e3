//! Kubernetes Events, written to a double of the API server.

use std::fs;

use k8s_openapi::api::events::v1::Event;
use serde_json::json;
use shmesh_fake_kubelet::{ApiError, ApiServer, Clock, Verb};

use crate::kubelet::plugin::*;

/// Fails the next attempt to write an Event.
fn fail_next(server: &ApiServer, code: u16) {
    let error = ApiError { code, reason: "No", message: "no".to_owned() };
    server.fail(Verb::Create, "events", 1, error);
}

/// Reasons and notes, oldest first: the names sort by time.
fn written(server: &ApiServer) -> Vec<(String, String)> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let events = server.list::<Event>();
    assert!(events.iter().all(is_valid), "{events:?}");
    events.iter().map(|event| (text(&event.reason), text(&event.note))).collect()
}

/// As the API server validates an Event about a node.
fn is_valid(event: &Event) -> bool {
    let is_text = |text: &Option<String>, most| {
        text.as_ref().is_some_and(|text| !text.is_empty() && text.len() <= most)
    };
    let is_qualified = event.reporting_controller.as_ref().is_some_and(|name| name.split('/').count() == 2);
    event.metadata.namespace.as_deref() == Some("default")
        && event.metadata.name.as_ref().is_some_and(|name| name.len() <= 253 && !name.contains('_'))
        && event.event_time.is_some()
        && ["Normal", "Warning"].iter().any(|kind| event.type_.as_deref() == Some(kind))
        && is_text(&event.reason, 128)
        && is_text(&event.action, 128)
        && is_text(&event.note, 1024)
        && is_text(&event.reporting_instance, 128)
        && is_qualified
}

/// Starts the plugin as the node `n1`, with an API server.
async fn start(place: &TestNode) -> (Plugin, ApiServer) {
    let server = ApiServer::new(Clock::runtime());
    let kubeconfig = place.path("kubeconfig");
    fs::write(&kubeconfig, ApiServer::kubeconfig(server.listen().await.unwrap())).unwrap();
    let mut command = Plugin::command(&place.settings(), &[], None);
    command.args(["--node", "n1"]).env("KUBECONFIG", kubeconfig);
    (Plugin::run(command), server)
}

#[tokio::test]
async fn health_changes_write_one_event_each() {
    let place = TestNode::with_kubelet().await;
    let (plugin, server) = start(&place).await;
    place.all_there().await;
    assert_eq!(written(&server), [], "nothing happened yet");
    // A server that is starting: tried again.
    fail_next(&server, 503);
    fail_next(&server, 429);
    fs::remove_file(place.path("dev/nvidia0")).unwrap();
    place.allocatable(GPU, 4).await;
    until("an Event of what fails", || written(&server).len() == 1).await;
    fs::write(place.path("dev/nvidia0"), "").unwrap();
    place.all_there().await;
    until("an Event of what works again", || written(&server).len() == 2).await;
    let written = written(&server);
    assert_eq!(written[0].0, "ResourceUnhealthy");
    assert!(
        written[0].1.starts_with("shmesh.io/gpu-ipc: ")
            && written[0].1.ends_with("/dev/nvidia0 does not exist"),
        "{written:?}"
    );
    assert_eq!(written[1], ("ResourceHealthy".into(), "shmesh.io/gpu-ipc: all devices are healthy".into()));
    let first = &server.list::<Event>()[0];
    let regarding = serde_json::to_value(&first.regarding).unwrap();
    assert_eq!(regarding, json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}));
    assert_eq!(first.reporting_controller.as_deref(), Some("shmesh.io/plugin"));
    plugin.shows("shmesh_plugin_events_total{outcome=\"ok\"}", |events| events == 2.0).await;
}

#[tokio::test]
async fn refusing_api_server_does_not_affect_the_plugin() {
    let place = TestNode::with_kubelet().await;
    let (plugin, server) = start(&place).await;
    place.all_there().await;
    fail_next(&server, 403);
    fs::remove_file(place.path("dev/nvidia0")).unwrap();
    place.allocatable(GPU, 4).await;
    plugin.shows("shmesh_plugin_events_total{outcome=\"failed\"}", |events| events == 1.0).await;
    // Waits on this thread, which is the server's: only now.
    plugin.said("cannot write an Event");
    fs::write(place.path("dev/nvidia0"), "").unwrap();
    place.all_there().await;
    until("the next one", || written(&server).len() == 1).await;
    assert!(plugin.end().success());
}

#[tokio::test]
async fn sweep_and_reload_write_events() {
    let place = TestNode::with_kubelet().await;
    let (plugin, server) = start(&place).await;
    place.all_there().await;
    let status = place.node.add_pod(pod("p", &[(POOL, 1)])).await;
    assert_eq!(status.phase, shmesh_fake_kubelet::Phase::Running);
    fs::write(place.path("dev/shm/shmesh/a/left"), [0_u8; 5000]).unwrap();
    place.node.delete_pod("p");
    until("the sweep", || written(&server).iter().any(|(reason, _)| reason == "PoolSwept")).await;
    let note = written(&server).pop().unwrap().1;
    assert!(note.starts_with("a: removed 1 files of dead pods, "), "{note}");
    plugin.signal(nix::sys::signal::Signal::SIGHUP);
    until("the reload", || written(&server).iter().any(|(reason, _)| reason == "ConfigurationReloaded"))
        .await;
}
