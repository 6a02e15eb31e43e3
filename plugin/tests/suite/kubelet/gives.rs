//! Mounts, devices and environment that containers get, through a kubelet.

use std::fs;
use std::os::unix::fs::MetadataExt;

use shmesh_fake_kubelet::{Container, Phase, Pod};
use shmesh_testing::write_script;

use crate::kubelet::plugin::*;

#[tokio::test]
async fn memory_pool_and_slots_are_allocated() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    plugin.said("ready: all resources are registered with the kubelet");
    assert!(plugin.get("/readyz").starts_with("HTTP/1.1 200"));

    let status = place.node.add_pod(pod("p", &[(SHM, 3), (POOL, 1), (GPU, 2)])).await;
    assert_eq!(status.phase, Phase::Running, "{status:?}");
    let options = &status.containers["main"].options;
    let mut cdi = options.cdi_devices.clone();
    cdi.sort();
    assert_eq!(cdi, ["shmesh.io/agent=identity", "shmesh.io/pool=a", "shmesh.io/shm=192Mi"]);
    assert_eq!(options.env("SHMESH_POOL"), Some("a"));
    assert_eq!(options.env("SHMESH_IDENTITY"), Some("/run/shmesh/agent/agent.sock"));
    let gpus = options.env("SHMESH_GPU_UUIDS").unwrap();
    assert!(gpus == "GPU-a" || gpus == "GPU-b", "both slots on one GPU: {gpus}");
    assert!(options.mounts.is_empty() && options.conflicts.is_empty(), "{options:?}");

    // What the runtime will look for is there, and so is the directory.
    for (class, device) in [("shm", "\"192Mi\""), ("pool", "\"a\""), ("agent", "\"identity\"")] {
        let text = fs::read_to_string(place.path(&format!("var/run/cdi/shmesh.io-{class}.json"))).unwrap();
        assert!(text.contains(device), "{class}: {text}");
    }
    let pool = fs::metadata(place.path("dev/shm/shmesh/a")).unwrap();
    assert_eq!(pool.mode() & 0o7777, 0o3770);
    assert!(place.path("run/shmesh/agent/agent.sock").exists());

    plugin.shows("shmesh_plugin_shm_reserved_bytes", |bytes| bytes == f64::from(3 << 26)).await;
    plugin.shows("shmesh_plugin_allocated_units{resource=\"shmesh.io/a\"}", |units| units == 1.0).await;
    plugin.shows("shmesh_plugin_allocations_total{resource=\"shmesh.io/shm\"}", |calls| calls == 1.0).await;
    plugin.shows("shmesh_plugin_allocate_seconds_count", |calls| calls == 3.0).await;
    plugin.shows("shmesh_plugin_allocate_seconds_sum", |seconds| seconds > 0.0).await;
}

#[tokio::test]
async fn pool_without_cdi_is_a_plain_mount() {
    let place = TestNode::with_kubelet().await;
    let settings = ["cdi.enabled=false", "shm.budget=0", "pools=[{name: a, attachments: 8}]"];
    let plugin = place.start_with(&settings);
    plugin.said("set cdi.enabled if the runtime supports it");
    place.allocatable(POOL, 8).await;
    assert_eq!(place.node.capacity(SHM), 0);
    let status = place.node.add_pod(pod("p", &[(POOL, 1)])).await;
    let options = &status.containers["main"].options;
    assert!(options.cdi_devices.is_empty());
    let mut mounts: Vec<_> = options
        .mounts
        .iter()
        .map(|one| (one.host_path.as_str(), one.container_path.as_str(), one.read_only))
        .collect();
    mounts.sort_unstable();
    let agent = "/run/shmesh/agent";
    assert_eq!(mounts, [("/dev/shm/shmesh/a", "/dev/shm", false), (agent, agent, true)]);
    assert_eq!(fs::metadata(place.path("dev/shm/shmesh/a")).unwrap().mode() & 0o7777, 0o1777);
    assert!(!place.path("var/run/cdi").exists());
}

#[tokio::test]
async fn native_sidecar_and_app_get_one_attachment_each() {
    let place = TestNode::with_kubelet().await;
    let _plugin = place.start();
    place.all_there().await;
    let container = |name| Container::new(name).limit(POOL, 1);
    let pod = Pod::new("p").init(container("sidecar").restartable()).container(container("app"));
    let status = place.node.add_pod(pod).await;
    assert_eq!(status.phase, Phase::Running, "{status:?}");
    assert_eq!(place.node.holders(POOL).len(), 2);
    for name in ["sidecar", "app"] {
        assert!(status.containers[name].options.cdi_devices.contains(&"shmesh.io/pool=a".into()));
    }
}

#[tokio::test]
async fn topology_reaches_the_kubelet() {
    let place = TestNode::with_kubelet().await;
    let _plugin = place.start();
    place.all_there().await;
    for (node, gpu) in [(0, "GPU-a"), (1, "GPU-b")] {
        let main = Container::new("main").limit(GPU, 3).numa([node]);
        let status = place.node.add_pod(Pod::new(gpu).container(main)).await;
        assert_eq!(status.containers["main"].options.env("SHMESH_GPU_UUIDS"), Some(gpu));
    }
}

#[tokio::test]
async fn devices_are_advertised_when_they_appear() {
    let place = TestNode::with_kubelet().await;
    fs::write(place.path("fake.yaml"), "gpus: []\n").unwrap();
    let plugin = place.start();
    place.allocatable(SHM, 16).await;
    plugin.said("ready: all resources are registered with the kubelet");
    assert!(!place.node.resources().contains_key(GPU));
    fs::write(place.path("fake.yaml"), "gpus: [{uuid: GPU-z}]\n").unwrap();
    place.allocatable(GPU, 4).await;
}

#[tokio::test]
async fn sidecar_without_pool_gets_the_identity_service() {
    let place = TestNode::with_kubelet().await;
    let _plugin = place.start();
    place.all_there().await;
    let pod = Pod::new("p")
        .init(Container::new("sidecar").limit(AGENT, 1).restartable())
        .container(Container::new("app"));
    let status = place.node.add_pod(pod).await;
    assert_eq!(status.phase, Phase::Running, "{status:?}");
    let options = &status.containers["sidecar"].options;
    assert_eq!(options.cdi_devices, ["shmesh.io/agent=identity"]);
    assert_eq!(options.env("SHMESH_IDENTITY"), Some("/run/shmesh/agent/agent.sock"));
    assert_eq!(options.env("SHMESH_POOL"), None);
    assert!(status.containers.get("app").is_none_or(|app| app.options.cdi_devices.is_empty()));
}

#[tokio::test]
async fn disabled_identity_service_is_not_mounted() {
    let place = TestNode::with_kubelet().await;
    let _plugin = place.start_with(&["identity.enabled=false"]);
    place.allocatable(POOL, 8).await;
    place.node.wait_for(LIMIT, |node| node.capacity(AGENT) == 256).await.unwrap();
    assert_eq!(place.node.allocatable(AGENT), 0, "no socket yet");
    let socket = place.path("run/shmesh/agent/agent.sock");
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let _service = std::os::unix::net::UnixListener::bind(socket).unwrap();
    place.allocatable(AGENT, 256).await;
}

#[tokio::test]
async fn devices_become_unhealthy_and_recover() {
    let place = TestNode::with_kubelet().await;
    let command = place.path("check");
    write_script(&command, "#!/bin/sh\ntest -e \"${0%/*}/well\"\n");
    fs::write(place.path("well"), "").unwrap();
    let pool = TestNode::pool(&format!(", healthCommand: [{}]", command.display()));
    let plugin = place.start_with(&[&pool]);
    place.all_there().await;
    for _ in 0..2 {
        fs::remove_file(place.path("dev/nvidia0")).unwrap();
        fs::remove_file(place.path("well")).unwrap();
        place.allocatable(GPU, 4).await;
        place.allocatable(POOL, 0).await;
        assert_eq!((place.node.capacity(GPU), place.node.capacity(POOL)), (8, 8));
        fs::write(place.path("dev/nvidia0"), "").unwrap();
        fs::write(place.path("well"), "").unwrap();
        place.all_there().await;
    }
    plugin
        .shows("shmesh_plugin_devices{resource=\"shmesh.io/gpu-ipc\",health=\"unhealthy\"}", |sick| {
            sick == 0.0
        })
        .await;
}

#[tokio::test]
async fn removed_files_are_restored() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    let spec = place.path("var/run/cdi/shmesh.io-shm.json");
    fs::remove_file(&spec).unwrap();
    fs::remove_dir(place.path("dev/shm/shmesh/a")).unwrap();
    plugin.said("CDI specifications were missing");
    until("written again", || spec.exists()).await;
    plugin
        .shows("shmesh_plugin_devices{resource=\"shmesh.io/a\",health=\"healthy\"}", |well| well == 8.0)
        .await;
    until("made again", || place.path("dev/shm/shmesh/a").exists()).await;
}

#[tokio::test]
async fn unlisted_device_is_unhealthy_despite_its_file() {
    let place = TestNode::with_kubelet().await;
    let all = fs::read_to_string(place.path("fake.yaml")).unwrap();
    let _plugin = place.start();
    place.all_there().await;
    // As a GPU that has fallen off the bus: its file is still there.
    fs::write(place.path("fake.yaml"), "gpus: [{uuid: GPU-b, numaNode: 1}]\n").unwrap();
    place.allocatable(GPU, 4).await;
    assert_eq!(place.node.capacity(GPU), 8, "containers may have it");
    fs::write(place.path("fake.yaml"), all).unwrap();
    place.all_there().await;
}

#[tokio::test]
async fn hung_driver_delays_nothing_else() {
    let place = TestNode::with_kubelet().await;
    let plugin = place.start();
    place.all_there().await;
    // Simulates a hung driver: reading the file blocks for ever.
    let (list, kept) = (place.path("fake.yaml"), place.path("kept.yaml"));
    fs::rename(&list, &kept).unwrap();
    nix::unistd::mkfifo(&list, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    place.allocatable(GPU, 0).await;
    plugin.signal(nix::sys::signal::Signal::SIGHUP);
    let status = place.node.add_pod(pod("p", &[(SHM, 1), (POOL, 1)])).await;
    assert_eq!(status.phase, Phase::Running, "{status:?}");
    assert!(plugin.get("/livez").starts_with("HTTP/1.1 200"));
    // Unblocks the reader with an empty file.
    fs::rename(&kept, place.path("next.yaml")).unwrap();
    let waiting = fs::OpenOptions::new().write(true).open(&list).unwrap();
    fs::rename(place.path("next.yaml"), &list).unwrap();
    drop(waiting);
    place.all_there().await;
    assert!(plugin.end().success());
}

#[tokio::test]
async fn slow_health_command_does_not_delay_others() {
    let place = TestNode::with_kubelet().await;
    // Two that end only together.
    nix::unistd::mkfifo(&place.path("meet"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let command = place.path("check");
    let text = "#!/bin/sh\ncd \"${0%/*}\"\ncase $SHMESH_DEVICE in a) echo x >meet;; b) read x <meet;; esac\n";
    write_script(&command, text);
    // Without CDI pools need no groups, which unprivileged users cannot assign.
    let pools = ["a", "b"].map(|name| {
        format!("{{name: {name}, attachments: 8, minFree: 4Ki, healthCommand: [{}]}}", command.display())
    });
    let pools = format!("pools=[{}]", pools.join(", "));
    let _plugin = place.start_with(&["cdi.enabled=false", "shm.budget=0", &pools]);
    place.allocatable(POOL, 8).await;
    place.allocatable("shmesh.io/b", 8).await;
}

#[tokio::test]
async fn attachments_limit_the_number_of_pods() {
    give_to_pods(30).await;
}

#[tokio::test]
#[ignore = "long: 300 pods, twice"]
async fn hundreds_of_pods() {
    give_to_pods(300).await;
}

async fn give_to_pods(pods: usize) {
    let place = TestNode::with_kubelet().await;
    let pool = TestNode::pool("").replace("attachments: 8", &format!("attachments: {pods}"));
    let plugin = place.start_with(&[&pool]);
    place.allocatable(POOL, pods as u64).await;
    for round in 0..2 {
        for at in 0..pods {
            let status = place.node.add_pod(pod(&format!("p{round}-{at}"), &[(POOL, 1)])).await;
            assert_eq!(status.phase, Phase::Running, "{status:?}");
        }
        let devices: std::collections::BTreeSet<_> =
            place.node.holders(POOL).into_iter().map(|holder| holder.device).collect();
        assert_eq!(devices.len(), pods, "none twice");
        plugin
            .shows("shmesh_plugin_allocated_units{resource=\"shmesh.io/a\"}", |units| units == pods as f64)
            .await;
        let status = place.node.add_pod(pod(&format!("one-more{round}"), &[(POOL, 1)])).await;
        assert_eq!(status.phase, Phase::Failed, "{status:?}");
        place.node.delete_pod(&format!("one-more{round}"));
        for at in 0..pods {
            place.node.delete_pod(&format!("p{round}-{at}"));
        }
    }
}
