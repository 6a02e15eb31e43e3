//! Rolling updates of the DRA driver: claims are prepared and released while an instance takes over from another one.

use std::time::Instant;

use super::*;

/// Pods of each replacement, at least.
const PODS: u32 = 10;
const TAKEN_OVER: &str = "another instance of the plugin has taken over";

/// A node whose pod `stays` keeps its claim while instances come and go.
struct Rollout {
    node: DraNode,
    /// Directory of the claim that stays.
    directory: PathBuf,
    pods: u32,
}

impl Rollout {
    async fn new() -> Option<(Self, Plugin)> {
        let node = DraNode::new().await?;
        node.create_class();
        let plugin = start(&node, "p0");
        node.place.node.start_kubelet().await.unwrap();
        let mut rollout = Self { node, directory: PathBuf::new(), pods: 0 };
        rollout.connected("p0").await;
        rollout.directory = rollout.add("stays").await;
        fs::write(rollout.directory.join("fronthaul_shm"), "x").unwrap();
        Some((rollout, plugin))
    }

    /// Adds a pod with a claim of its own, which runs at once, and returns the directory of the claim.
    async fn add(&self, name: &str) -> PathBuf {
        let uid = self.node.create_claim(name);
        let pod = Pod::new(name).claim("shmesh", name).container(Container::new("main").claim("shmesh"));
        until("a scheduled pod", || self.node.server.schedule(&pod, &["n1"]).is_ok()).await;
        let status = self.node.place.node.add_pod(pod).await;
        assert_eq!(status.phase, Phase::Running, "{name}: {status:?}, {:?}", self.failures());
        assert!(self.node.spec(&uid).exists(), "{name}");
        let directory = self.node.directory(&uid);
        assert!(directory.is_dir(), "{name}");
        directory
    }

    /// A pod comes and goes. The node has two groups, so the next one needs the group of this one.
    async fn pass(&mut self) {
        self.pods += 1;
        let name = format!("pod-{}", self.pods);
        let directory = self.add(&name).await;
        self.node.place.node.delete_pod(&name);
        until("its claim is released", || !self.node.place.node.is_ending_pods()).await;
        assert!(!directory.exists(), "{name}");
        assert!(self.directory.join("fronthaul_shm").exists(), "after {name}");
    }

    /// Calls that failed. The kubelet repeats one of a Prepare after a minute only.
    fn failures(&self) -> Vec<Event> {
        let failed = |event: &Event| {
            matches!(event, Event::PrepareFailed { .. } | Event::UnprepareFailed { .. })
                || matches!(event, Event::SlicesWiped { deleted, .. } if *deleted > 0)
        };
        let events = self.node.place.node.events().into_iter().map(|record| record.event);
        events.filter(failed).collect()
    }

    fn is_connected(&self, instance: &str) -> bool {
        // The whole name: the random part of a temporary directory may contain the instance.
        let name = format!("/dra-{instance}.sock");
        let events = self.node.place.node.events().into_iter().rev();
        let mut of_instance = events.filter_map(|record| match record.event {
            Event::DriverConnection { socket, connected, .. } if socket.ends_with(&name) => Some(connected),
            _ => None,
        });
        of_instance.next().unwrap_or(false)
    }

    async fn connected(&self, instance: &str) {
        until("a connection of the kubelet", || self.is_connected(instance)).await;
    }

    /// Pods come and go while an instance takes over from another one.
    async fn replace(&mut self, old: Plugin, instance: &str) -> Plugin {
        let (began, first) = (Instant::now(), self.pods);
        for _ in 0..PODS / 4 {
            self.pass().await;
        }
        let new = start(&self.node, instance);
        let is_replaced = || new.get("/readyz").contains("200 OK") && old.get("/readyz").contains(TAKEN_OVER);
        while self.pods < first + PODS || !is_replaced() {
            assert!(began.elapsed() < LIMIT, "not replaced after {} pods", self.pods - first);
            self.pass().await;
        }
        assert!(old.end().success());
        self.pass().await;
        new
    }

    /// One checkpoint with one claim is left, and after the last pod nothing.
    async fn end(self, plugin: Plugin) {
        let state = self.node.entries("var/lib/kubelet/plugins/shmesh.io");
        let checkpoints: Vec<_> = state.iter().filter(|name| name.starts_with("claims.")).collect();
        assert_eq!(checkpoints, ["claims.checkpoint", "claims.lock"]);
        plugin.shows("shmesh_plugin_claims{state=\"prepared\"}", |count| count == 1.0).await;
        let text =
            fs::read_to_string(self.node.place.path("var/lib/kubelet/plugins/shmesh.io/claims.checkpoint"));
        let text = text.unwrap();
        let claims: Value = serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
        let uids: Vec<_> = claims["claims"].as_object().unwrap().keys().collect();
        assert_eq!(uids, [self.directory.file_name().unwrap().to_str().unwrap()]);
        self.node.place.node.delete_pod("stays");
        until("the last pod has ended", || !self.node.place.node.is_ending_pods()).await;
        assert_eq!(self.node.entries("dev/shm/shmesh-claims"), [] as [&str; 0]);
        assert_eq!(self.failures(), []);
        plugin.crash();
    }
}

fn start(node: &DraNode, instance: &str) -> Plugin {
    let mut command = node.command(instance, "-all");
    command.args(["--settle", "0"]);
    Plugin::run(command)
}

async fn replacements(rounds: u32) {
    let Some((mut rollout, mut plugin)) = Rollout::new().await else { return };
    for round in 1..=rounds {
        plugin = rollout.replace(plugin, &format!("p{round}")).await;
    }
    rollout.end(plugin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_fails_no_claim() {
    replacements(1).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: ten replacements"]
async fn ten_rollouts_fail_no_claim() {
    replacements(10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_instance_of_a_rollout_loses_no_claim() {
    let Some((mut rollout, old)) = Rollout::new().await else { return };
    // The newer one dies: the older one goes on.
    let new = start(&rollout.node, "p1");
    old.said("handed over");
    rollout.pass().await;
    new.crash();
    until("no connection", || !rollout.is_connected("p1")).await;
    rollout.pass().await;
    old.said("this instance continues to serve");
    rollout.pass().await;
    // The older one dies while the next one takes over.
    let new = start(&rollout.node, "p2");
    old.said("handed over");
    rollout.connected("p2").await;
    old.crash();
    until("no connection", || !rollout.is_connected("p0")).await;
    rollout.pass().await;
    until("ready", || new.get("/readyz").contains("200 OK")).await;
    rollout.end(new).await;
}
