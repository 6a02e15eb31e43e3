//! The DRA driver as a process, with a double of the API server. The kubelet's calls are made by the tests.

#[cfg(target_arch = "x86_64")]
mod kills;
mod rollout;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use shmesh_fake_kubelet::{ApiServer, Clock, Config, Container, Event, Node, Phase, Pod};
use shmesh_kubelet_api::dra::dra_plugin_client::DraPluginClient;
use shmesh_kubelet_api::dra::{
    Claim, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use shmesh_kubelet_api::pluginregistration::RegistrationStatus;
use shmesh_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use tonic::transport::{Channel, Endpoint};

use crate::kubelet::{LIMIT, Plugin, TestNode, until};

const A: &str = "aaaaaaaa-0000-1111-2222-333333333333";
const B: &str = "bbbbbbbb-0000-1111-2222-333333333333";
/// Groups that claims lease in these tests.
const GIDS: [u32; 2] = [61_000, 61_001];

/// A node whose API server is a double.
struct DraNode {
    place: TestNode,
    server: ApiServer,
    kubeconfig: PathBuf,
}

impl DraNode {
    /// `None` where this user cannot give directories to groups.
    async fn new() -> Option<Self> {
        let can = Command::new("setpriv").args(["--reuid", "65532", "--clear-groups", "true"]).status();
        if !can.is_ok_and(|status| status.success()) {
            eprintln!("skipped: groups and other users require root and setpriv");
            return None;
        }
        let mut place = TestNode::new();
        // Other users reach the directories of claims through it, as through /dev/shm.
        fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir_all(place.path("var/lib/kubelet/plugins")).unwrap();
        let server = ApiServer::new(Clock::runtime());
        let kubelet = place.path("var/lib/kubelet");
        let (api, node_name) = (Some(server.clone()), "n1".into());
        let status_period = Duration::from_millis(100);
        place.node = Node::new(Config { api, node_name, status_period, ..Config::new(kubelet) });
        let node: NodeObject = serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap();
        server.create(&node).unwrap();
        let address = server.listen().await.unwrap();
        let kubeconfig = place.path("kubeconfig");
        fs::write(&kubeconfig, ApiServer::kubeconfig(address)).unwrap();
        Some(Self { place, server, kubeconfig })
    }

    fn settings(&self) -> Vec<String> {
        let mut settings = self.place.settings();
        let under = |path: &str| self.place.path(path).display().to_string();
        settings.extend([
            "mode=dra".into(),
            format!("dra.gids={{first: {}, count: {}}}", GIDS[0], GIDS.len()),
            "dra.budget=256Mi".into(),
            format!("dra.attachments={}", GIDS.len()),
            format!("dra.pluginsDir={}", under("var/lib/kubelet/plugins")),
            format!("kubelet.pluginsRegistryDir={}", under("var/lib/kubelet/plugins_registry")),
        ]);
        settings
    }

    /// Uid 0 with the groups of claims and without capabilities, as the container of the plugin.
    fn start(&self) -> Plugin {
        self.start_with("-all")
    }

    fn start_with(&self, capabilities: &str) -> Plugin {
        Plugin::run(self.command("p1", capabilities))
    }

    fn command(&self, instance: &str, capabilities: &str) -> Command {
        let plain = Plugin::command(&self.settings(), &[], None);
        let mut command = Command::new("setpriv");
        let groups = format!("{},{},60001", GIDS[0], GIDS[1]);
        let bounding = format!("--bounding-set={capabilities}");
        command.args(["--groups", &groups, &bounding, "--inh-caps=-all", "--no-new-privs"]);
        command.arg(plain.get_program()).args(plain.get_args());
        command.args(["--node", "n1", "--pod-uid", instance]).env("KUBECONFIG", &self.kubeconfig);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Says what the kubelet says about the registration.
    async fn register(&self, error: &str) {
        let socket = self.place.path("var/lib/kubelet/plugins_registry/shmesh.io@p1-reg.sock");
        // A crash leaves the file of the socket.
        until("an answering socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
        let mut client = RegistrationClient::new(connect(socket).await);
        let (plugin_registered, error) = (error.is_empty(), error.to_owned());
        client.notify_registration_status(RegistrationStatus { plugin_registered, error }).await.unwrap();
    }

    async fn published(&self) -> Vec<String> {
        let names = || -> Vec<String> {
            let slices: Vec<ResourceSlice> = self.server.list();
            let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
            devices.map(|device| device.name).collect()
        };
        until("slices", || !names().is_empty()).await;
        names()
    }

    /// Creates a claim as the scheduler leaves it.
    fn claim(&self, name: &str, uid: &str, config: &Value) {
        let result = json!({
            "request": "domain", "driver": "shmesh.io", "pool": "n1", "device": "domain",
            "shareID": "33333333-0000-1111-2222-333333333333",
            "consumedCapacity": {"bytes": "64Mi", "attachments": "1"},
        });
        let config = json!([{"source": "FromClaim", "requests": [], "opaque": {"driver": "shmesh.io", "parameters": config}}]);
        let claim = json!({
            "metadata": {"namespace": "radio", "name": name, "uid": uid},
            "spec": {"devices": {"requests": [
                {"name": "domain", "exactly": {"deviceClassName": "shmesh-domain", "allocationMode": "ExactCount", "count": 1}}
            ]}},
            "status": {"allocation": {"devices": {"results": [result], "config": config}}},
        });
        self.server.create(&serde_json::from_value::<ResourceClaim>(claim).unwrap()).unwrap();
    }

    /// Creates the class of domains.
    fn create_class(&self) {
        let selector =
            "device.driver == \"shmesh.io\" && device.attributes[\"shmesh.io\"].kind == \"domain\"";
        let class = json!({"metadata": {"name": "shmesh-domain"}, "spec": {"selectors": [{"cel": {"expression": selector}}]}});
        self.server.create(&serde_json::from_value::<DeviceClass>(class).unwrap()).unwrap();
    }

    /// Creates a claim of that class, as a user does, and returns its uid.
    fn create_claim(&self, name: &str) -> String {
        let claim = json!({
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"devices": {
                "requests": [{"name": "domain", "exactly": {
                    "deviceClassName": "shmesh-domain", "capacity": {"requests": {"bytes": "26Mi"}},
                }}],
                "config": [{"requests": ["domain"], "opaque": {
                    "driver": "shmesh.io", "parameters": config(&json!({"links": [{"name": "fronthaul", "ring": {"len": 64}}]})),
                }}],
            }},
        });
        self.server.create(&serde_json::from_value::<ResourceClaim>(claim).unwrap()).unwrap();
        self.server.get::<ResourceClaim>("default", name).unwrap().metadata.uid.unwrap()
    }

    fn uid(&self, name: &str) -> String {
        let claim: ResourceClaim = self.server.get("radio", name).unwrap();
        claim.metadata.uid.unwrap()
    }

    async fn client(&self) -> DraPluginClient<Channel> {
        let socket = self.place.path("var/lib/kubelet/plugins/shmesh.io/dra-p1.sock");
        DraPluginClient::new(connect(socket).await)
    }

    async fn prepare(&self, name: &str, uid: &str) -> NodePrepareResourceResponse {
        let claim = Claim { namespace: "radio".into(), name: name.into(), uid: uid.into() };
        let request = NodePrepareResourcesRequest { claims: vec![claim] };
        let mut answer = self.client().await.node_prepare_resources(request).await.unwrap().into_inner();
        answer.claims.remove(uid).unwrap()
    }

    async fn unprepare(&self, name: &str, uid: &str) -> String {
        let claim = Claim { namespace: "radio".into(), name: name.into(), uid: uid.into() };
        let request = NodeUnprepareResourcesRequest { claims: vec![claim] };
        let mut answer = self.client().await.node_unprepare_resources(request).await.unwrap().into_inner();
        answer.claims.remove(uid).unwrap().error
    }

    fn directory(&self, uid: &str) -> PathBuf {
        self.place.path("dev/shm/shmesh-claims").join(uid)
    }

    fn spec(&self, uid: &str) -> PathBuf {
        self.place.path("var/run/cdi").join(format!("shmesh.io-claim-{uid}.json"))
    }

    fn entries(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.place.path(path)) else { return Vec::new() };
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        // Which domain owns the claims.
        names.retain(|name| name != ".shmesh-owner");
        names.sort();
        names
    }
}

async fn connect(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap()
}

fn config(more: &Value) -> Value {
    let mut config = json!({"apiVersion": "shmesh.io/v1alpha1", "kind": "DomainConfig"});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Whether another user with one group can do this.
fn can(user: u32, gid: u32, script: &str, path: &Path) -> bool {
    let (user, gid) = (user.to_string(), gid.to_string());
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--groups", &gid, "--bounding-set=-all"]);
    command.args(["sh", "-c", &format!("umask 007; {script}"), "sh"]).arg(path);
    command.stderr(Stdio::null()).stdout(Stdio::null()).status().unwrap().success()
}

#[tokio::test]
async fn killed_driver_goes_on_with_its_claims() {
    let Some(node) = DraNode::new().await else { return };
    let plugin = node.start();
    assert_eq!(node.published().await, ["domain", "gpu-a", "gpu-b", "pool-a"]);
    node.register("the endpoint does not answer").await;
    plugin.shows("shmesh_plugin_dra_registered", |registered| registered == 0.0).await;
    assert!(!plugin.get("/readyz").contains("200 OK"), "the kubelet would make no calls");
    node.register("").await;
    until("ready", || plugin.get("/readyz").contains("200 OK")).await;
    plugin.shows("shmesh_plugin_dra_registered", |registered| registered == 1.0).await;
    // Nothing of the device plugin.
    assert_eq!(node.place.plugin_sockets(), [] as [PathBuf; 0]);

    node.claim("a", A, &config(&json!({"links": [{"name": "fronthaul"}]})));
    let uid = node.uid("a");
    let first = node.prepare("a", &uid).await;
    assert_eq!(first.error, "");
    assert_eq!(first.devices[0].cdi_device_ids, [format!("shmesh.io/claim={uid}")]);
    assert_eq!(
        (&first.devices[0].pool_name, &first.devices[0].device_name),
        (&"n1".into(), &"domain".into())
    );
    let found = fs::metadata(node.directory(&uid)).unwrap();
    assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o3770, 0, GIDS[0]));
    fs::write(node.directory(&uid).join("fronthaul_shm"), "x").unwrap();
    let spec = fs::read(node.spec(&uid)).unwrap();
    assert!(String::from_utf8_lossy(&spec).contains("SHMESH_CLAIM=radio/a"));

    // The claim says so itself.
    let ready = || {
        let claim: ResourceClaim = node.server.get("radio", "a").unwrap();
        serde_json::to_value(claim.status.unwrap().devices).unwrap()
    };
    until("a status", || ready()[0]["conditions"][0]["type"] == "Ready").await;
    let data = json!({"directory": format!("/dev/shm/shmesh-claims/{uid}"), "bytes": 64 << 20});
    assert_eq!(ready()[0]["data"], data);

    plugin.crash();
    // What a crash leaves, and what only looks like it.
    fs::create_dir(node.directory(B)).unwrap();
    fs::remove_file(node.spec(&uid)).unwrap();
    let plugin = node.start();
    until("the specification is written again", || fs::read(node.spec(&uid)).is_ok_and(|now| now == spec))
        .await;
    until("what no claim has is removed", || !node.directory(B).exists()).await;
    node.register("").await;
    until("ready", || plugin.get("/readyz").contains("200 OK")).await;
    assert_eq!(node.prepare("a", &uid).await, first, "the same answer");
    assert!(node.directory(&uid).join("fronthaul_shm").exists(), "and nothing of the pod is lost");
    plugin.shows("shmesh_plugin_claims{state=\"prepared\"}", |count| count == 1.0).await;
    plugin.shows("shmesh_plugin_claims_reserved_bytes", |bytes| bytes == f64::from(64 << 20)).await;

    assert_eq!(node.unprepare("a", &uid).await, "");
    assert_eq!(node.entries("dev/shm/shmesh-claims"), [] as [&str; 0]);
    assert!(!node.spec(&uid).exists());
    assert_eq!(node.unprepare("a", &uid).await, "", "again");
    plugin.shows("shmesh_plugin_claims{state=\"prepared\"}", |count| count == 0.0).await;
    // The connections of this runtime must be able to end.
    assert!(tokio::task::spawn_blocking(|| plugin.end()).await.unwrap().success());
}

#[tokio::test]
async fn checkpoint_that_cannot_be_used_is_explained_in_the_log() {
    let Some(node) = DraNode::new().await else { return };
    let state = node.place.path("var/lib/kubelet/plugins/shmesh.io");
    fs::create_dir_all(&state).unwrap();
    for (text, kept, explained) in [
        (
            "shmesh-claims 2 0000000000000000\n{}",
            "claims.other-version",
            [
                "another version of the plugin wrote the checkpoint",
                "it has version 2, and this program reads 1",
                "install the other one again",
            ],
        ),
        (
            "{}",
            "claims.damaged",
            ["the checkpoint of claims is damaged", "it has no header", "delete the kept file"],
        ),
    ] {
        fs::write(state.join("claims.checkpoint"), text).unwrap();
        let plugin = node.start();
        let line = plugin.said("of claims");
        for part in explained.into_iter().chain([kept, "claims.checkpoint"]) {
            assert!(line.contains(part), "{line} names {part:?}");
        }
        assert_eq!(fs::read_to_string(state.join(kept)).unwrap(), text);
        plugin.crash();
    }
}

/// A kubelet and a scheduler in place of the calls of a test.
#[tokio::test]
async fn pods_of_one_claim_share_a_directory_until_the_last_ends() {
    let Some(node) = DraNode::new().await else { return };
    let kubelet = &node.place.node;
    node.create_class();
    let connections = |kubelet: &Node| {
        let is_connected = |event: &Event| matches!(event, Event::DriverConnection { connected: true, .. });
        kubelet.events().into_iter().filter(|record| is_connected(&record.event)).count()
    };
    let plugin = node.start();
    kubelet.start_kubelet().await.unwrap();
    kubelet.wait_for(LIMIT, |kubelet| connections(kubelet) == 1).await.unwrap();
    node.published().await;
    let uid = node.create_claim("radio");
    for name in ["phy", "mac"] {
        let pod = Pod::new(name).claim("shmesh", "radio").container(Container::new("main").claim("shmesh"));
        // The kubelet wipes the slices at its start, and the driver publishes them again.
        until("a scheduled pod", || node.server.schedule(&pod, &["n1"]).is_ok()).await;
        let status = kubelet.add_pod(pod).await;
        assert_eq!(status.phase, Phase::Running, "{status:?}");
        assert_eq!(status.containers["main"].options.cdi_devices, [format!("shmesh.io/claim={uid}")]);
    }
    let spec = fs::read_to_string(node.spec(&uid)).unwrap();
    assert!(spec.contains(&format!("SHMESH_BYTES={}", 26 << 20)), "as the scheduler reserved: {spec}");
    let file = node.directory(&uid).join("fronthaul_shm");
    fs::write(&file, "x").unwrap();

    // Both die. The kubelet wipes the slices, and containers start again with what the claim gives.
    plugin.crash();
    kubelet.kill_kubelet().await;
    fs::remove_file(node.spec(&uid)).unwrap();
    let plugin = node.start();
    kubelet.start_kubelet().await.unwrap();
    node.published().await;
    until("the specification is written again", || node.spec(&uid).exists()).await;
    let again = kubelet.restart_container("phy", "main").await.unwrap();
    assert_eq!(again.options.cdi_devices, [format!("shmesh.io/claim={uid}")]);
    // The kubelet releases claims through the driver, to which it must be connected.
    kubelet.wait_for(LIMIT, |kubelet| connections(kubelet) == 2).await.unwrap();
    assert!(file.exists(), "the pods have their files");
    kubelet.delete_pod("phy");
    until("one pod has ended", || !kubelet.is_ending_pods()).await;
    assert!(file.exists(), "the other one goes on");
    kubelet.delete_pod("mac");
    until("the last pod has ended", || !node.directory(&uid).exists() && !node.spec(&uid).exists()).await;
    plugin.crash();
}

#[tokio::test]
async fn claims_of_two_tenants_cannot_open_each_others_files() {
    let Some(node) = DraNode::new().await else { return };
    let plugin = node.start();
    node.published().await;
    node.claim("a", A, &config(&json!({})));
    node.claim("b", B, &config(&json!({})));
    let (a, b) = (node.uid("a"), node.uid("b"));
    for (name, uid) in [("a", &a), ("b", &b)] {
        assert_eq!(node.prepare(name, uid).await.error, "");
    }
    let (first, second) = (node.directory(&a), node.directory(&b));
    let gid = |path: &Path| fs::metadata(path).unwrap().gid();
    let (of_a, of_b) = (gid(&first), gid(&second));
    assert_ne!(of_a, of_b);
    // Two users on one claim: one creates, the other reads.
    assert!(can(1001, of_a, "echo secret > $1/file", &first));
    assert!(can(1002, of_a, "cat $1/file && ls $1", &first));
    assert!(!can(1002, of_a, "rm -f $1/file", &first), "only the owner removes it");
    // The other claim cannot list, open, create or remove.
    for script in ["ls $1", "cat $1/file", "echo x > $1/other", "rm -f $1/file", "rmdir $1", "chmod 777 $1"] {
        assert!(!can(1001, of_b, script, &first), "{script}");
    }
    assert!(!can(1001, of_b, "mv $1 $1-away", &first), "nor replace the directory");
    // Without a group either.
    assert!(!can(1003, 1003, "ls $1", &first));
    assert_eq!(node.unprepare("a", &a).await, "");
    assert!(second.exists() && !first.exists());
    // The files of other users are gone although the driver has no capabilities, and the group is free again.
    node.claim("c", A, &config(&json!({})));
    let c = node.uid("c");
    assert_eq!(node.prepare("c", &c).await.error, "");
    assert_eq!(gid(&node.directory(&c)), of_a);
    plugin.crash();
}

/// A user's `mkdtemp` leaves such a directory.
#[tokio::test]
async fn private_directory_of_another_user_is_removed_with_two_capabilities() {
    for (capabilities, is_removed) in [("-all", false), ("-all,+dac_override,+fowner", true)] {
        let Some(node) = DraNode::new().await else { return };
        let plugin = node.start_with(capabilities);
        node.published().await;
        node.claim("a", A, &config(&json!({})));
        let uid = node.uid("a");
        assert_eq!(node.prepare("a", &uid).await.error, "");
        let directory = node.directory(&uid);
        let script = "mkdir -m 700 $1/tmp && mkdir $1/tmp/sub && echo x > $1/tmp/sub/file && mkdir -m 755 $1/open && echo x > $1/open/file";
        assert!(can(1001, GIDS[0], script, &directory));
        assert_eq!(node.unprepare("a", &uid).await, "", "the claim is released in any case");
        assert!(!directory.exists());
        let left = node.entries("dev/shm/shmesh-claims");
        assert_eq!(left.is_empty(), is_removed, "{left:?}");
        let count = if is_removed { 0.0 } else { 1.0 };
        plugin.shows("shmesh_plugin_claims{state=\"released\"}", |released| released == count).await;
        plugin.crash();
    }
}

#[tokio::test]
async fn unusable_claims_are_refused_in_words() {
    let Some(node) = DraNode::new().await else { return };
    let plugin = node.start();
    node.published().await;
    for (name, more, part) in [
        ("unknown", json!({"extra": 1}), "extra: is not a known key"),
        ("links", json!({"links": [{"name": "a", "ring": {"len": 0}}]}), "links[0].ring.len"),
        (
            "large",
            json!({"links": [{"name": "a", "pools": {"cpu_data": {"buf_size_bytes": 1 << 20, "pool_len": 128}}}]}),
            "request bytes: ",
        ),
    ] {
        let wanted = config(&more);
        node.claim(name, A, &wanted);
        let said = node.prepare(name, &node.uid(name)).await.error;
        assert!(said.contains(part), "{said:?} has {part:?}");
    }
    // Some 10 KiB, which is what the API server allows.
    let deep = (0..1_000).fold(json!(1), |below, _| json!({"level": below}));
    node.claim("deep", A, &config(&json!({"links": deep})));
    let said = node.prepare("deep", &node.uid("deep")).await.error;
    assert!(said.contains("claim radio/deep cannot be read: its JSON nests more than 127 levels"), "{said}");
    // Two groups, three claims.
    for name in ["a", "b", "c"] {
        node.claim(name, A, &config(&json!({})));
    }
    let errors =
        [node.prepare("a", &node.uid("a")).await.error, node.prepare("b", &node.uid("b")).await.error];
    assert_eq!(errors, ["", ""]);
    let said = node.prepare("c", &node.uid("c")).await.error;
    assert!(said.contains("raise dra.gids.count"), "{said}");
    plugin
        .shows("shmesh_plugin_claim_failures_total{call=\"prepare\",reason=\"gids_exhausted\"}", |n| n == 1.0)
        .await;
    plugin
        .shows("shmesh_plugin_claim_failures_total{call=\"prepare\",reason=\"config\"}", |n| n == 2.0)
        .await;
    assert_eq!(node.unprepare("a", &node.uid("a")).await, "");
    assert_eq!(node.prepare("c", &node.uid("c")).await.error, "", "as the kubelet retries");
    plugin.crash();
}

#[tokio::test]
async fn drained_node_has_a_taint_until_it_is_undone() {
    let Some(node) = DraNode::new().await else { return };
    let taints = || -> Vec<String> {
        let slices: Vec<ResourceSlice> = node.server.list();
        let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        devices.flat_map(|device| device.taints.unwrap_or_default()).map(|taint| taint.key).collect()
    };
    let drain = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh-plugin"));
        command.arg("drain").args(more);
        for setting in node.settings() {
            command.args(["--set", &setting]);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    // Without a plugin too: it is done when the plugin starts.
    drain(&[]);
    let plugin = node.start();
    node.published().await;
    assert_eq!(taints(), vec!["shmesh.io/draining"; 4]);
    drain(&["--undo"]);
    until("no taint", || taints().is_empty()).await;
    drain(&["--undo"]);
    plugin.crash();
}

#[tokio::test]
async fn deleted_directory_of_claims_is_a_taint_until_the_plugin_is_restarted() {
    let Some(node) = DraNode::new().await else { return };
    let taints = || -> Vec<(String, String)> {
        let slices: Vec<ResourceSlice> = node.server.list();
        let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        let of = |device: k8s_openapi::api::resource::v1::Device| {
            let keys = device.taints.unwrap_or_default().into_iter().map(|taint| taint.key);
            keys.map(|key| (device.name.clone(), key)).collect::<Vec<_>>()
        };
        devices.flat_map(of).collect()
    };
    let plugin = node.start();
    node.published().await;
    assert_eq!(taints(), []);
    let claims = node.place.path("dev/shm/shmesh-claims");
    // Moved away, and back.
    let away = node.place.path("dev/shm/away");
    fs::rename(&claims, &away).unwrap();
    let of_domain = [("domain".to_owned(), "shmesh.io/unhealthy".to_owned())];
    until("a taint", || taints() == of_domain).await;
    fs::rename(&away, &claims).unwrap();
    until("no taint", || taints().is_empty()).await;
    // An empty directory of the same name is not what the pods have.
    fs::remove_dir_all(&claims).unwrap();
    until("a taint again", || taints() == of_domain).await;
    fs::create_dir(&claims).unwrap();
    let mark = node.place.path("var/lib/kubelet/plugins/shmesh.io/draining");
    fs::write(&mark, "").unwrap();
    let both = [of_domain[0].clone(), ("domain".to_owned(), "shmesh.io/draining".to_owned())];
    until("both taints", || both.iter().all(|taint| taints().contains(taint))).await;
    fs::remove_file(&mark).unwrap();
    plugin.crash();
    let plugin = node.start();
    until("no taint after a restart", || taints().is_empty()).await;
    plugin.crash();
}

#[tokio::test]
#[ignore = "long: 1,000 claims"]
async fn claims_come_and_go_a_thousand_times() {
    let Some(node) = DraNode::new().await else { return };
    let began = std::time::Instant::now();
    let plugin = node.start();
    node.published().await;
    let published = began.elapsed();
    for at in 0..1000 {
        let name = format!("c{at}");
        node.claim(&name, A, &config(&json!({"links": [{"name": "fronthaul"}]})));
        let uid = node.uid(&name);
        assert_eq!(node.prepare(&name, &uid).await.error, "");
        fs::write(node.directory(&uid).join("file"), "x").unwrap();
        assert_eq!(node.unprepare(&name, &uid).await, "");
    }
    assert_eq!(node.entries("dev/shm/shmesh-claims"), [] as [&str; 0]);
    assert_eq!(node.entries("var/run/cdi").iter().filter(|name| name.contains("claim")).count(), 0);
    let status = fs::read_to_string(format!("/proc/{}/status", plugin.pid())).unwrap();
    let resident: Vec<_> = status.lines().filter(|line| line.contains("Rss")).collect();
    eprintln!("slices published {published:?} after the start; {resident:?}");
    let metrics = plugin.get("/metrics");
    metrics
        .lines()
        .filter(|line| line.contains("claim_prepare_seconds"))
        .for_each(|line| eprintln!("{line}"));
    // Status is written for claims that change, and slices never.
    let count = |resource: &str| node.server.count(|kind| kind.agent != "test" && kind.resource == resource);
    assert_eq!(count("resourceclaims"), 1000, "one per Prepare");
    plugin.crash();
}
