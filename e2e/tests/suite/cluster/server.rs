//! An API server's double with what matters here: namespaces, pods that become what they should at once, logs, events. And a
//! kubelet's: a tool's pod that kills a container makes it restart.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use serde_json::{Value, json};

/// The failure to simulate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Wrong {
    #[default]
    Nothing,
    /// Some messages are lost.
    Loses,
    /// Nodes cannot get the image of this pod.
    NoImage(&'static str),
    /// When one container is killed, another restarts too.
    Spreads,
    /// Something stays on the node.
    Litters,
    /// Another release is there.
    Installed,
}

#[derive(Default)]
struct World {
    wrong: Wrong,
    /// The fake of Helm writes its arguments.
    calls: PathBuf,
    /// With their Pod Security; and the same, whether they are still there or not.
    namespaces: BTreeMap<String, String>,
    made: BTreeMap<String, String>,
    pods: BTreeMap<(String, String), Value>,
    restarts: BTreeMap<(String, String), u32>,
    /// Restarts in pods that were deleted.
    restarts_before: BTreeMap<(String, String), u32>,
    reads: BTreeMap<String, u64>,
    ids: u64,
}

/// A server that runs until the test ends.
#[derive(Clone)]
pub(crate) struct Server(Arc<Mutex<World>>);

impl Server {
    pub(crate) fn new(wrong: Wrong, calls: &Path) -> Self {
        Self(Arc::new(Mutex::new(World { wrong, calls: calls.to_owned(), ..World::default() })))
    }

    pub(crate) async fn start(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    /// Namespaces that are there.
    pub(crate) fn namespaces(&self) -> Vec<String> {
        self.0.lock().unwrap().namespaces.keys().cloned().collect()
    }

    /// Owned by another user.
    pub(crate) fn add_namespace(&self, name: &str) {
        self.0.lock().unwrap().namespaces.insert(name.to_owned(), String::new());
    }

    /// All that were ever made, with their Pod Security.
    pub(crate) fn made(&self) -> BTreeMap<String, String> {
        self.0.lock().unwrap().made.clone()
    }

    /// How often containers were killed, as `POD/CONTAINER`.
    pub(crate) fn killed(&self) -> BTreeMap<String, u32> {
        let world = self.0.lock().unwrap();
        let mut killed = BTreeMap::new();
        for ((pod, container), count) in world.restarts.iter().chain(&world.restarts_before) {
            *killed.entry(format!("{pod}/{container}")).or_default() += count;
        }
        killed
    }
}

async fn answer(
    State(server): State<Server>,
    method: Method,
    uri: Uri,
    body: String,
) -> (StatusCode, String) {
    let body = serde_json::from_str(&body).unwrap_or(Value::Null);
    let path: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
    let (code, answer) =
        server.0.lock().unwrap().answer(&method, &path, uri.query().unwrap_or_default(), body);
    let text = answer.as_str().map_or_else(|| answer.to_string(), str::to_owned);
    (StatusCode::from_u16(code).unwrap(), text)
}

fn failure(code: u16, message: &str) -> (u16, Value) {
    let reason = match code {
        404 => "NotFound",
        409 => "AlreadyExists",
        _ => "Forbidden",
    };
    let (kind, status) = ("Status", "Failure");
    (
        code,
        json!({"kind": kind, "apiVersion": "v1", "status": status, "code": code, "message": message, "reason": reason}),
    )
}

fn list(items: &[Value]) -> (u16, Value) {
    (200, json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}))
}

impl World {
    fn answer(&mut self, method: &Method, path: &[&str], query: &str, body: Value) -> (u16, Value) {
        match (method, path) {
            (&Method::GET, ["api", "v1", "nodes"]) => list(&[self.node()]),
            (&Method::GET, ["apis", "apps", "v1", "daemonsets"]) => {
                let there = json!({"metadata": {"name": "shmesh-plugin", "namespace": "shmesh-system"}});
                list(if self.wrong == Wrong::Installed { std::slice::from_ref(&there) } else { &[] })
            }
            (&Method::POST, ["api", "v1", "namespaces"]) => {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                if self.namespaces.contains_key(&name) {
                    return failure(409, "it is there");
                }
                let level =
                    body["metadata"]["labels"]["pod-security.kubernetes.io/enforce"].as_str().unwrap();
                self.namespaces.insert(name.clone(), level.to_owned());
                self.made.insert(name, level.to_owned());
                (201, body)
            }
            (method, ["api", "v1", "namespaces", name]) => {
                let namespace = json!({"metadata": {"name": name}});
                match (*method == Method::DELETE, self.namespaces.contains_key(*name)) {
                    (_, false) => failure(404, "no such namespace"),
                    (false, true) => (200, namespace),
                    (true, true) => {
                        self.namespaces.remove(*name);
                        self.pods.retain(|(of, _), _| of != name);
                        (200, namespace)
                    }
                }
            }
            (_, ["api", "v1", "namespaces", namespace, ..]) if !self.namespaces.contains_key(*namespace) => {
                failure(404, "no such namespace")
            }
            (&Method::GET, ["api", "v1", "namespaces", _, "events"]) => list(&[json!({
                "metadata": {"name": "e", "namespace": "n"}, "involvedObject": {"name": "phy"}, "type": "Warning",
                "reason": "FailedScheduling", "message": "0/1 nodes are available", "count": 3,
                "lastTimestamp": "2026-11-20T10:00:00Z",
            })]),
            (&Method::PATCH, ["api", "v1", "namespaces", namespace, "pods", name]) => {
                if !query.contains("fieldValidation=Strict") || !query.contains("fieldManager=shmesh-e2e") {
                    return failure(400, "it would not see unknown fields");
                }
                self.apply(namespace, name, body)
            }
            (&Method::PATCH, ["api", "v1", "namespaces", _, "serviceaccounts", _]) => (201, body),
            (&Method::GET, ["api", "v1", "namespaces", namespace, "pods"]) => {
                let is_plugins = query.contains("component%3Dplugin");
                let of = |(key, _): &(&(String, String), &Value)| key.0 == *namespace;
                let mut pods: Vec<Value> = self.pods.iter().filter(of).map(|(_, pod)| pod.clone()).collect();
                let plugin = self.plugin();
                if is_plugins {
                    pods.clear();
                }
                if self.made.get(*namespace).is_some_and(|level| level == "privileged") {
                    pods.extend(plugin);
                }
                list(&pods)
            }
            (&Method::DELETE, ["api", "v1", "namespaces", namespace, "pods", name]) => {
                let key = ((*namespace).to_owned(), (*name).to_owned());
                let Some(pod) = self.pods.remove(&key) else { return failure(404, "no such pod") };
                let (gone, kept) =
                    std::mem::take(&mut self.restarts).into_iter().partition(|((pod, _), _)| pod == name);
                self.restarts = kept;
                let gone: BTreeMap<(String, String), u32> = gone;
                for (container, count) in gone {
                    *self.restarts_before.entry(container).or_default() += count;
                }
                (200, pod)
            }
            (&Method::GET, ["api", "v1", "namespaces", namespace, "pods", name]) => {
                let key = ((*namespace).to_owned(), (*name).to_owned());
                let plugin = self.plugin().filter(|plugin| plugin["metadata"]["name"] == *name);
                self.pods
                    .get(&key)
                    .cloned()
                    .or(plugin)
                    .map_or_else(|| failure(404, "no such pod"), |pod| (200, pod))
            }
            (&Method::GET, ["api", "v1", "namespaces", namespace, "pods", name, "log"]) => {
                let container = query.split('&').find_map(|one| one.strip_prefix("container=")).unwrap();
                let was_killed = self.restarts.contains_key(&((*name).to_owned(), container.to_owned()));
                if query.contains("previous=true") && !was_killed {
                    return failure(400, "previous terminated container not found");
                }
                (200, self.log(namespace, name, container).into())
            }
            _ => failure(405, &format!("not in this double: {method} {path:?}")),
        }
    }

    fn called(&self, verb: &str) -> u64 {
        let calls = std::fs::read_to_string(&self.calls).unwrap_or_default();
        calls.lines().filter(|line| line.starts_with(&format!("helm {verb}"))).count() as u64
    }

    fn is_installed(&self) -> bool {
        self.called("install") > 0 && self.called("uninstall") == 0
    }

    fn node(&self) -> Value {
        let count = |number: &str| if self.is_installed() { number } else { "0" }.to_owned();
        json!({
            "metadata": {"name": "n1"},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {
                    "cpu": "2", "memory": "4Gi",
                    "shmesh.io/shm": count("8"), "shmesh.io/fronthaul": count("64"), "shmesh.io/agent": count("256"),
                },
            },
        })
    }

    /// One for each revision.
    fn plugin(&self) -> Option<Value> {
        let revision = self.called("install") + self.called("upgrade") + self.called("rollback");
        let name = format!("plugin-{revision}");
        let pod =
            json!({"metadata": {"name": name, "uid": format!("uid-{revision}")}, "spec": {"nodeName": "n1"}});
        self.is_installed().then(|| self.running(pod, &["plugin", "identity"], &[]))
    }

    fn container(&self, pod: &str, name: &str) -> Value {
        let restarts = self.restarts.get(&(pod.to_owned(), name.to_owned())).copied().unwrap_or(0);
        json!({
            "name": name, "ready": true, "restartCount": restarts, "image": "", "imageID": "",
            "containerID": format!("containerd://{}", id(pod, name, restarts)), "state": {"running": {}},
        })
    }

    fn running(&self, mut pod: Value, containers: &[&str], sidecars: &[&str]) -> Value {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        let all = |names: &[&str]| names.iter().map(|one| self.container(&name, one)).collect::<Vec<_>>();
        pod["status"] = json!({
            "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": all(containers), "initContainerStatuses": all(sidecars),
        });
        pod
    }

    /// Creates a pod, as admission, the scheduler and the kubelet do.
    fn apply(&mut self, namespace: &str, name: &str, mut pod: Value) -> (u16, Value) {
        self.ids += 1;
        pod["metadata"]["uid"] = format!("pod-{}", self.ids).into();
        let level = &self.namespaces[namespace];
        if level == "restricted" && pod["spec"]["hostPID"] == true {
            return failure(403, "violates PodSecurity \"restricted\"");
        }
        if pod["spec"]["nodeName"].is_null() {
            pod["spec"]["nodeName"] = "n1".into();
        }
        let all = pod["spec"]["containers"].as_array().unwrap();
        let names: Vec<String> = all.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let is_last = all[0]["command"].as_array().is_some_and(|_| pod["spec"]["restartPolicy"] == "Never");
        let is_secondary = pod["metadata"]["annotations"]["shmesh.io/links"]
            .as_str()
            .is_some_and(|links| links.contains("side: secondary"));
        let has_links = pod["metadata"]["annotations"]["shmesh.io/links"].is_string();
        if let Some(words) = all[0]["command"].as_array().filter(|words| words.len() > 4).cloned() {
            self.tool(&words[4..]);
        }
        let mut pod = self.running(pod, &names, if has_links && !is_secondary { &["shmesh"] } else { &[] });
        if is_last {
            pod["status"]["phase"] = "Succeeded".into();
            pod["status"]["conditions"] = json!([]);
        }
        if matches!(self.wrong, Wrong::NoImage(without) if without == name) {
            pod["status"]["phase"] = "Pending".into();
            pod["status"]["conditions"] =
                json!([{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]);
            pod["status"]["containerStatuses"][0]["ready"] = false.into();
            pod["status"]["containerStatuses"][0]["state"] =
                json!({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}});
        }
        self.pods.insert((namespace.to_owned(), name.to_owned()), pod.clone());
        (201, pod)
    }

    /// Runs the command of a tool's pod: a container that it kills restarts.
    fn tool(&mut self, words: &[Value]) {
        let words: Vec<_> = words.iter().filter_map(Value::as_str).collect();
        match &words[..] {
            ["container", victim] => self.kill(victim),
            ["together", _seed, victims @ ..] => victims.iter().for_each(|victim| self.kill(victim)),
            _ => {}
        }
    }

    fn kill(&mut self, victim: &str) {
        let mut all: Vec<Value> = self.pods.values().cloned().chain(self.plugin()).collect();
        let mut found = false;
        for pod in &mut all {
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            let statuses = ["containerStatuses", "initContainerStatuses"]
                .map(|key| pod["status"][key].as_array().cloned().unwrap_or_default());
            for status in statuses.concat() {
                let is_it =
                    status["containerID"].as_str().is_some_and(|id| id.ends_with(&format!("//{victim}")));
                if is_it || (self.wrong == Wrong::Spreads && name == "mac") {
                    found |= is_it;
                    *self
                        .restarts
                        .entry((name.clone(), status["name"].as_str().unwrap().to_owned()))
                        .or_default() += 1;
                }
            }
        }
        assert!(found, "no container {victim}");
        let keys: Vec<_> = self.pods.keys().cloned().collect();
        for key in keys {
            for list in ["containerStatuses", "initContainerStatuses"] {
                let names: Vec<String> = self.pods[&key]["status"][list]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|one| one["name"].as_str().unwrap().to_owned())
                    .collect();
                let new: Vec<Value> = names.iter().map(|name| self.container(&key.1, name)).collect();
                self.pods.get_mut(&key).unwrap()["status"][list] = new.into();
            }
        }
    }

    fn log(&mut self, namespace: &str, pod: &str, container: &str) -> String {
        let reads = self.reads.entry(format!("{namespace}/{pod}/{container}")).or_default();
        *reads += 1;
        let (count, wrong) = (*reads * 50, u32::from(self.wrong == Wrong::Loses && *reads > 1));
        match (pod, container) {
            (_, "shmesh") => {
                "ready\n{\"op\":\"import\",\"outcome\":\"refused\",\"reason\":\"not_admitted\"}\n".into()
            }
            ("sized", _) => "size 131072 KiB\nfilled 134217728\nfull\n".into(),
            ("wrong", _) => "attached\nrefused: the key is for process 1\n".into(),
            ("stranger", _) => "attached\nrefused: the key is not for this process\n".into(),
            ("borrower" | "reader", _) => {
                "read 1048576 bytes of the other side's region; all are as written\n".into()
            }
            (_, "tool") if self.wrong == Wrong::Litters => {
                "left /run/shmesh/agent/agent.sock\nleft /run/cdi/shmesh.io-shm.json\nlooked\n".into()
            }
            (_, "tool") => "left /run/cdi/shmesh.io-shm.json\nlooked\n".into(),
            (_, "plugin" | "identity") => "the kubelet has every resource\n".into(),
            _ => format!("attached\nsent {count}, received {count}, lost or duplicate {wrong}\n"),
        }
    }
}

/// 64 characters, as the runtimes have it.
fn id(pod: &str, container: &str, restarts: u32) -> String {
    let bytes = format!("{pod}/{container}/{restarts}");
    let hex: String = bytes.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex:0<64}")[..64].to_owned()
}
