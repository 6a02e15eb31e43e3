//! Whatever ends and begins again, in whatever order, the kubelet has the right list soon after.

use std::fs;
use std::os::unix::net::UnixListener;

use nix::sys::signal::Signal;
use shmesh_fake_kubelet::{Event, Phase};

use crate::kubelet::plugin::*;

#[tokio::test]
async fn late_kubelet_is_registered_with() {
    let place = TestNode::new();
    let plugin = place.start();
    until("four sockets", || place.plugin_sockets().len() == 4).await;
    assert!(plugin.get("/readyz").contains("waits for: kubelet"));
    assert!(plugin.get("/livez").starts_with("HTTP/1.1 200"));
    place.node.start_kubelet().await.unwrap();
    place.all_there().await;
}

#[tokio::test]
async fn kubelet_restart_keeps_allocations() {
    let place = TestNode::with_kubelet().await;
    let _plugin = place.start();
    place.all_there().await;
    place.node.add_pod(pod("p", &[(SHM, 5), (POOL, 1)])).await;
    let holders = place.node.holders(SHM);
    for _ in 0..3 {
        place.node.restart_kubelet().await.unwrap();
        place.all_there().await;
        assert_eq!(place.node.holders(SHM), holders);
        until("four sockets", || place.plugin_sockets().len() == 4).await;
    }
    let status = place.node.add_pod(pod("q", &[(SHM, 11)])).await;
    assert_eq!(status.phase, Phase::Running, "{status:?}");
}

#[tokio::test]
async fn plugin_crash_and_exit_are_survived() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    place.node.add_pod(pod("p", &[(SHM, 5)])).await;
    plugin.crash();
    place.allocatable(SHM, 0).await;
    assert_eq!(place.plugin_sockets().len(), 4, "a crash leaves them");
    let plugin = place.start();
    place.all_there().await;
    until("the next start takes them away", || place.plugin_sockets().len() == 4).await;
    assert_eq!(place.node.holders(SHM).len(), 5);

    assert!(plugin.end().success());
    assert_eq!(place.plugin_sockets(), Vec::<std::path::PathBuf>::new());
    assert!(!place.path("run/shmesh/agent/agent.sock").exists());
    place.allocatable(SHM, 0).await;
    // A container starts again with what it was given: what describes it stays.
    assert!(place.path("var/run/cdi/shmesh.io-shm.json").exists());
    let restarted = place.node.restart_container("p", "main").await.unwrap();
    assert_eq!(restarted.options.cdi_devices, ["shmesh.io/shm=320Mi"]);
}

#[tokio::test]
async fn removed_socket_is_recreated() {
    let place = TestNode::with_kubelet().await;
    let _plugin = place.start();
    place.all_there().await;
    for _ in 0..3 {
        let before = place.plugin_sockets();
        let registered = |node: &shmesh_fake_kubelet::Node| {
            node.events().iter().filter(|record| matches!(record.event, Event::Registered { .. })).count()
        };
        let count = registered(&place.node);
        for socket in &before {
            fs::remove_file(socket).unwrap();
        }
        place.node.wait_for(LIMIT, |node| registered(node) >= count + 3).await.unwrap();
        place.all_there().await;
        assert!(place.plugin_sockets().iter().all(|socket| !before.contains(socket)), "under new names");
    }
}

#[tokio::test]
async fn kubelet_registration_race_is_survived() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    // A second registration while the first stream is open: its end then drops the wrong client.
    let socket =
        place.plugin_sockets().into_iter().find(|path| path.display().to_string().contains("_shm.")).unwrap();
    let endpoint = socket.file_name().unwrap().to_str().unwrap().to_owned();
    register(&place, &endpoint, SHM).await;
    plugin.shows("shmesh_plugin_streams{resource=\"shmesh.io/shm\"}", |streams| streams == 2.0).await;
    fs::remove_file(&socket).unwrap();
    plugin.shows("shmesh_plugin_streams{resource=\"shmesh.io/shm\"}", |streams| streams == 1.0).await;
    place.all_there().await;
}

async fn register(place: &TestNode, endpoint: &str, resource: &str) {
    use shmesh_kubelet_api::deviceplugin::RegisterRequest;
    use shmesh_kubelet_api::deviceplugin::registration_client::RegistrationClient;
    let socket = place.node.paths().kubelet_socket();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    let endpoint_of = tonic::transport::Endpoint::from_static("http://localhost");
    let channel = endpoint_of.connect_with_connector(connector).await.unwrap();
    let request = RegisterRequest {
        version: "v1beta1".into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        options: None,
    };
    RegistrationClient::new(channel).register(request).await.unwrap();
}

#[tokio::test]
async fn reboot_is_survived() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    place.node.add_pod(pod("p", &[(SHM, 5), (POOL, 1)])).await;
    place.node.switch_off().await;
    plugin.crash();
    // What is on a tmpfs is gone.
    fs::remove_dir_all(place.path("var/run/cdi")).unwrap();
    fs::remove_dir_all(place.path("dev/shm/shmesh")).unwrap();
    let plugin = place.start();
    plugin.said("\"message\":\"advertised\"");
    assert!(place.path("var/run/cdi/shmesh.io-shm.json").exists(), "before it registers");
    assert!(place.path("dev/shm/shmesh/a").exists());
    place.node.start_kubelet_alone().await.unwrap();
    place.all_there().await;
    place.node.learn_pods().await;
    assert_eq!(place.node.holders(SHM).len(), 5);
}

#[tokio::test]
async fn kubelet_discovers_the_plugin() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start_with(&["kubelet.registration=pluginsRegistry"]);
    place.all_there().await;
    assert!(place.plugin_sockets().is_empty(), "never both");
    let names: Vec<_> = fs::read_dir(place.path("var/lib/kubelet/plugins_registry"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    assert!(names.len() == 4 && names.iter().all(|name| name.ends_with("@reg.sock")), "{names:?}");
    place.node.add_pod(pod("p", &[(SHM, 5)])).await;
    place.node.restart_kubelet().await.unwrap();
    place.all_there().await;
    // A crash, and another start.
    plugin.crash();
    place.allocatable(SHM, 0).await;
    let plugin = place.start_with(&["kubelet.registration=pluginsRegistry"]);
    place.all_there().await;
    assert!(plugin.end().success());
    let left = fs::read_dir(place.path("var/lib/kubelet/plugins_registry")).unwrap();
    let names: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().all(|name| name.ends_with(".lock")), "{names:?}");
}

#[tokio::test]
async fn configuration_changes_are_applied() {
    let place = TestNode::with_kubelet().await;
    let file = place.path("config.yaml");
    let write = |text: &str| {
        // As a ConfigMap is replaced.
        fs::write(place.path("new.yaml"), text).unwrap();
        fs::rename(place.path("new.yaml"), &file).unwrap();
    };
    write("shm: {budget: 1Gi}\n");
    let mut settings = place.settings();
    settings.retain(|setting| !setting.starts_with("shm.") && !setting.starts_with("pools="));
    let plugin = Plugin::start(&settings, &[], Some(&file));
    place.allocatable(SHM, 16).await;
    place.node.add_pod(pod("p", &[(SHM, 9)])).await;
    let holders = place.node.holders(SHM);

    let pool = TestNode::pool("").replace("pools=", "pools: ");
    write(&format!("shm: {{budget: 2Gi}}\n{pool}\n"));
    place.allocatable(SHM, 32).await;
    place.allocatable(POOL, 8).await;
    // Nonsense changes nothing.
    write("shm: {budget: 2GB}\n");
    plugin.said("2GB");
    plugin.shows("shmesh_plugin_reloads_total{outcome=\"failed\"}", |count| count == 1.0).await;
    // What needs a restart says so.
    write("domain: example.com\n");
    plugin.said("only be changed by a restart");
    // By signal, and less than pods hold: they keep it.
    write("shm: {budget: 512Mi}\n");
    plugin.signal(Signal::SIGHUP);
    place.allocatable(SHM, 8).await;
    place.allocatable(POOL, 0).await;
    assert_eq!(place.node.holders(SHM), holders);
    let restarted = place.node.restart_container("p", "main").await.unwrap();
    assert_eq!(restarted.options.cdi_devices, ["shmesh.io/shm=576Mi"]);
    let spec = fs::read_to_string(place.path("var/run/cdi/shmesh.io-shm.json")).unwrap();
    assert!(spec.contains("\"576Mi\""), "still described");
}

#[tokio::test]
async fn obstructing_files_are_reported() {
    // A file and a foreign socket in the kubelet's directory are not ours.
    let place = TestNode::with_kubelet().await;
    let _foreign = UnixListener::bind(place.sockets().join("other.sock")).unwrap();
    fs::write(place.sockets().join("shmesh.io_shm.x.sock"), "precious").unwrap();
    let plugin = place.start();
    place.all_there().await;
    assert!(plugin.end().success());
    assert!(place.sockets().join("other.sock").exists());
    assert_eq!(fs::read(place.sockets().join("shmesh.io_shm.x.sock")).unwrap(), b"precious");
}

#[tokio::test]
async fn sigterm_during_registration_is_handled() {
    let place = TestNode::new();
    // A kubelet that takes calls and never answers one.
    let mute = UnixListener::bind(place.node.paths().kubelet_socket()).unwrap();
    let plugin = place.start();
    let (call, _) = tokio::task::spawn_blocking(move || mute.accept().map(|(call, _)| (call, mute)))
        .await
        .unwrap()
        .unwrap();
    until("four sockets", || place.plugin_sockets().len() == 4).await;
    assert!(plugin.end().success());
    assert_eq!(place.plugin_sockets(), Vec::<std::path::PathBuf>::new());
    drop(call);
}

#[tokio::test]
async fn running_containers_keep_their_allocations() {
    let place = TestNode::with_kubelet().await;
    let file = place.path("config.yaml");
    let pool = TestNode::pool("").replace("pools=", "pools: ");
    fs::write(&file, format!("{pool}\n")).unwrap();
    let mut settings = place.settings();
    settings.retain(|setting| !setting.starts_with("pools="));
    let plugin = Plugin::start(&settings, &[], Some(&file));
    place.all_there().await;
    let before = fs::read(place.path("var/run/cdi/shmesh.io-pool.json")).unwrap();
    for more in ["mountPath: /elsewhere", "directory: /dev/shm/elsewhere", "userNamespaces: mixed"] {
        fs::write(&file, format!("{}\n", pool.replace("}", &format!(", {more}}}")))).unwrap();
        plugin.signal(Signal::SIGHUP);
        let said = plugin.said("configuration not reloaded");
        assert!(said.contains("pool a") && said.contains("by a restart"), "{said}");
    }
    assert_eq!(fs::read(place.path("var/run/cdi/shmesh.io-pool.json")).unwrap(), before);
    // Another pool, and more of it, is no harm.
    fs::write(&file, format!("{}\n", pool.replace("attachments: 8", "attachments: 9"))).unwrap();
    place.allocatable(POOL, 9).await;
}
