//! Kubernetes Events, written to an API server that takes nothing else.

use std::fs;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::{Value, json};

use crate::kubelet::plugin::*;

const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

/// Events that were written, and status codes to answer instead, the last one first.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<(Vec<Value>, Vec<u16>)>>);

impl Server {
    async fn start(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route(EVENTS, post(take)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    fn answer_first(&self, mut codes: Vec<u16>) {
        codes.reverse();
        self.0.lock().unwrap().1 = codes;
    }

    /// Reasons and notes, in order.
    fn written(&self) -> Vec<(String, String)> {
        let text = |event: &Value, key: &str| event[key].as_str().unwrap().to_owned();
        self.0.lock().unwrap().0.iter().map(|event| (text(event, "reason"), text(event, "note"))).collect()
    }
}

/// As the API server validates an Event about a node.
async fn take(State(server): State<Server>, body: String) -> (StatusCode, String) {
    let event: Value = serde_json::from_str(&body).unwrap();
    let mut inside = server.0.lock().unwrap();
    let is_text = |key: &str, most: usize| {
        event[key].as_str().is_some_and(|text| !text.is_empty() && text.len() <= most)
    };
    let is_qualified = event["reportingController"].as_str().is_some_and(|name| name.split('/').count() == 2);
    let is_valid = event["metadata"]["namespace"] == "default"
        && event["metadata"]["name"].as_str().is_some_and(|name| name.len() <= 253 && !name.contains('_'))
        && event["eventTime"].as_str().is_some_and(|time| time.ends_with('Z'))
        && ["Normal", "Warning"].iter().any(|kind| event["type"] == *kind)
        && is_text("reason", 128)
        && is_text("action", 128)
        && is_text("note", 1024)
        && is_text("reportingInstance", 128)
        && is_qualified;
    let code = match inside.1.pop() {
        Some(code) => code,
        None if !is_valid => 422,
        None => 201,
    };
    if code == 201 {
        inside.0.push(event);
        return (StatusCode::CREATED, body);
    }
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "No", "message": "no"});
    (StatusCode::from_u16(code).unwrap(), status.to_string())
}

/// The plugin, with this API server, as the node `n1`.
fn start(place: &TestNode, server: SocketAddr) -> Plugin {
    let kubeconfig = place.path("kubeconfig");
    let text = format!(
        "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
         clusters: [{{name: c, cluster: {{server: 'http://{server}'}}}}], users: [{{name: u, user: {{token: t}}}}]}}"
    );
    fs::write(&kubeconfig, text).unwrap();
    let mut command = Plugin::command(&place.settings(), &[], None);
    command.args(["--node", "n1"]).env("KUBECONFIG", kubeconfig);
    Plugin::run(command)
}

#[tokio::test]
async fn health_changes_write_one_event_each() {
    let (place, server) = (TestNode::with_kubelet().await, Server::default());
    let plugin = start(&place, server.start().await);
    place.all_there().await;
    assert_eq!(server.written(), [], "nothing happened yet");
    // A server that is starting: tried again.
    server.answer_first(vec![503, 429]);
    fs::remove_file(place.path("dev/nvidia0")).unwrap();
    place.allocatable(GPU, 4).await;
    until("an Event of what fails", || server.written().len() == 1).await;
    fs::write(place.path("dev/nvidia0"), "").unwrap();
    place.all_there().await;
    until("an Event of what works again", || server.written().len() == 2).await;
    let written = server.written();
    assert_eq!(written[0].0, "ResourceUnhealthy");
    assert!(
        written[0].1.starts_with("shmesh.io/gpu-ipc: ")
            && written[0].1.ends_with("/dev/nvidia0 does not exist"),
        "{written:?}"
    );
    assert_eq!(written[1], ("ResourceHealthy".into(), "shmesh.io/gpu-ipc: all devices are healthy".into()));
    let first = server.0.lock().unwrap().0[0].clone();
    assert_eq!(first["regarding"], json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}));
    assert_eq!(first["reportingController"], "shmesh.io/plugin");
    plugin.shows("shmesh_plugin_events_total{outcome=\"ok\"}", |events| events == 2.0).await;
}

#[tokio::test]
async fn refusing_api_server_does_not_affect_the_plugin() {
    let (place, server) = (TestNode::with_kubelet().await, Server::default());
    let plugin = start(&place, server.start().await);
    place.all_there().await;
    server.answer_first(vec![403]);
    fs::remove_file(place.path("dev/nvidia0")).unwrap();
    place.allocatable(GPU, 4).await;
    plugin.shows("shmesh_plugin_events_total{outcome=\"failed\"}", |events| events == 1.0).await;
    // Waits on this thread, which is the server's: only now.
    plugin.said("cannot write an Event");
    fs::write(place.path("dev/nvidia0"), "").unwrap();
    place.all_there().await;
    until("the next one", || server.written().len() == 1).await;
    assert!(plugin.end().success());
}

#[tokio::test]
async fn sweep_and_reload_write_events() {
    let (place, server) = (TestNode::with_kubelet().await, Server::default());
    let plugin = start(&place, server.start().await);
    place.all_there().await;
    let status = place.node.add_pod(pod("p", &[(POOL, 1)])).await;
    assert_eq!(status.phase, shmesh_fake_kubelet::Phase::Running);
    fs::write(place.path("dev/shm/shmesh/a/left"), [0_u8; 5000]).unwrap();
    place.node.delete_pod("p");
    until("the sweep", || server.written().iter().any(|(reason, _)| reason == "PoolSwept")).await;
    let note = server.written().pop().unwrap().1;
    assert!(note.starts_with("a: removed 1 files of dead pods, "), "{note}");
    plugin.signal(nix::sys::signal::Signal::SIGHUP);
    until("the reload", || server.written().iter().any(|(reason, _)| reason == "ConfigurationReloaded"))
        .await;
}
