//! Each question with objects of a healthy cluster, made from `manifests/install.yaml` and the samples, and with a mistake in them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use shmesh_injector::certificate::{Bundle, make};
use shmesh_injector::{Config, inject};

use super::state::ClusterState;
use super::*;

/// Seconds since 1970 at which the cluster is seen.
const NOW: u64 = 1_800_000_000;
const DAY: u64 = 86_400;

fn documents(path: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    let text = fs::read_to_string(path).unwrap();
    // Options of the chart between @ are not read here.
    let documents = text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).unwrap());
    documents.filter(|document| !document.is_null()).collect()
}

fn kind(object: &Value) -> &'static str {
    match object["kind"].as_str().unwrap() {
        "DaemonSet" => "daemonsets",
        "Deployment" => "deployments",
        "Service" => "services",
        "ConfigMap" => "configmaps",
        "Namespace" => "namespaces",
        "Pod" => "pods",
        "MutatingWebhookConfiguration" => "mutatingwebhookconfigurations",
        "MutatingAdmissionPolicyBinding" => "mutatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding" => "validatingadmissionpolicybindings",
        "ClusterRoleBinding" => "clusterrolebindings",
        "RoleBinding" => "rolebindings",
        _ => "others",
    }
}

impl ClusterState {
    fn add(&mut self, kind: &'static str, object: Value) {
        self.objects.entry(kind).or_insert_with(|| Ok(Vec::new())).as_mut().unwrap().push(object);
    }

    fn list_mut(&mut self, kind: &'static str) -> &mut Vec<Value> {
        self.objects.get_mut(kind).unwrap().as_mut().unwrap()
    }

    /// The object of a name.
    fn object(&mut self, kind: &'static str, name: &str) -> &mut Value {
        self.list_mut(kind).iter_mut().find(|object| object["metadata"]["name"] == name).unwrap()
    }

    fn replace_config(&mut self, map: &str, file: &str, from: &str, to: &str) {
        let text = &mut self.object("configmaps", map)["data"][file];
        assert!(text.as_str().unwrap().contains(from), "{text}");
        *text = text.as_str().unwrap().replace(from, to).into();
    }
}

const HOST: &str = "shmesh-injector.shmesh-system.svc";

/// A certificate that ends 60 days after a time.
fn bundle(name: &str, now: u64) -> Bundle {
    let start = UNIX_EPOCH + Duration::from_secs(now - 30 * DAY);
    make(&[name.to_owned()], Duration::from_secs(90 * DAY), start, None).unwrap()
}

/// Sets the caBundle of the webhook, and the certificate in the Secret of the injector.
fn set_certificates(state: &mut ClusterState, authorities: &str, certificate: &str) {
    hook(state)["clientConfig"]["caBundle"] = BASE64_STANDARD.encode(authorities).into();
    state.objects.insert("secret", Ok(vec![BASE64_STANDARD.encode(certificate).into()]));
}

/// A pod of a workload object, as its controller and the kubelet make it.
fn pod_of(owner: &Value, name: &str, node: &str) -> Value {
    let template = &owner["spec"]["template"];
    let mut pod = json!({ "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"] });
    pod["metadata"]["name"] = name.into();
    pod["metadata"]["namespace"] = owner["metadata"]["namespace"].clone();
    run(&mut pod, node);
    pod
}

fn run(pod: &mut Value, node: &str) {
    pod["spec"]["nodeName"] = node.into();
    let running = |containers: &Value| -> Value {
        let one = |container: &Value| json!({ "name": container["name"], "ready": true, "restartCount": 0, "state": { "running": {} } });
        containers.as_array().into_iter().flatten().map(one).collect()
    };
    pod["status"] = json!({
        "phase": "Running",
        "conditions": [{ "type": "Ready", "status": "True" }, { "type": "PodScheduled", "status": "True" }],
        "initContainerStatuses": running(&pod["spec"]["initContainers"]),
        "containerStatuses": running(&pod["spec"]["containers"]),
    });
}

fn healthy() -> ClusterState {
    let mut state = ClusterState { now: NOW, ..ClusterState::default() };
    for object in documents("manifests/install.yaml") {
        state.add(kind(&object), object);
    }
    state.replace_config(
        "shmesh-plugin",
        "plugin.yaml",
        "pools: []",
        "pools: [{name: fronthaul, gid: 60001}]",
    );
    state.replace_config("shmesh-injector", "injector.yaml", "pools: []", "pools: [{name: fronthaul}]");
    let plugin = state.object("daemonsets", "shmesh-plugin");
    plugin["metadata"]["generation"] = 1.into();
    plugin["status"] =
        json!({ "observedGeneration": 1, "desiredNumberScheduled": 2, "updatedNumberScheduled": 2 });
    plugin["spec"]["template"]["spec"]["securityContext"]["supplementalGroups"] = json!([65_532, 60_001]);
    let injector = state.object("deployments", "shmesh-injector");
    injector["status"] = json!({ "availableReplicas": 2 });
    let (plugin, injector) =
        (state.list_mut("daemonsets")[0].clone(), state.list_mut("deployments")[0].clone());
    for node in ["a", "b"] {
        let amounts = json!({ "memory": "16Gi", "shmesh.io/shm": "128", "shmesh.io/agent": "256", "shmesh.io/fronthaul": "64" });
        state.add(
            "nodes",
            json!({
                "metadata": { "name": node, "labels": { "kubernetes.io/os": "linux" } },
                "status": {
                    "capacity": amounts,
                    "allocatable": amounts,
                    "nodeInfo": { "containerRuntimeVersion": "containerd://2.1.9" },
                    "conditions": [{ "type": "Ready", "status": "True" }, { "type": "MemoryPressure", "status": "False" }],
                },
            }),
        );
        state.add("pods", pod_of(&plugin, &format!("plugin-{node}"), node));
        state.add("pods", pod_of(&injector, &format!("injector-{node}"), node));
    }
    state.add("version", json!({ "major": "1", "minor": "36", "gitVersion": "v1.36.2" }));
    let mut slice = state.object("services", "shmesh-injector").clone();
    slice["metadata"]["labels"]["kubernetes.io/service-name"] = "shmesh-injector".into();
    slice["endpoints"] = json!([{ "conditions": { "ready": true } }, { "conditions": { "ready": true } }]);
    state.add("endpointslices", slice);
    let bundle = bundle(HOST, NOW);
    set_certificates(&mut state, &bundle.authorities, &bundle.certificate);
    let config = Config::from_yaml("", "pools: [{name: fronthaul}]").unwrap();
    for sample in documents("manifests/samples/two-pods.yaml").iter().filter(|object| kind(object) == "pods")
    {
        let mut pod = inject(sample, "shmesh-sample", &config).unwrap().pod;
        run(&mut pod, "a");
        state.add("pods", pod);
    }
    state
}

/// A healthy cluster in mode `dra`.
fn healthy_dra() -> ClusterState {
    let mut state = healthy();
    state.replace_config("shmesh-plugin", "plugin.yaml", "domain: shmesh.io", "domain: shmesh.io\nmode: dra");
    for object in documents("helm/policy/claims.yaml") {
        state.add(kind(&object), object);
    }
    for class in ["shmesh-domain", "shmesh-pool-fronthaul"] {
        state.add("deviceclasses", json!({ "metadata": { "name": class } }));
    }
    for node in ["a", "b"] {
        let spec = json!({ "driver": "shmesh.io", "nodeName": node, "devices": [{ "name": "domain" }] });
        state.add("resourceslices", json!({ "metadata": { "name": node }, "spec": spec }));
    }
    let claim = json!({
        "metadata": { "name": "radio", "namespace": "ran" },
        "status": {
            "allocation": { "devices": { "results": [{ "driver": "shmesh.io" }] } },
            "reservedFor": [{ "resource": "pods", "name": "phy" }],
            "devices": [{ "driver": "shmesh.io", "conditions": [{ "type": "Ready", "status": "True" }] }],
        },
    });
    state.add("resourceclaims", claim);
    let mut binding = state.object("clusterrolebindings", "shmesh-plugin-pods").clone();
    binding["roleRef"]["name"] = "shmesh-plugin-dra".into();
    state.add("clusterrolebindings", binding);
    state
}

fn answer(state: &ClusterState, id: &str) -> CheckAnswer {
    questions().into_iter().find(|question| question.id == id).unwrap().answer(state)
}

#[test]
fn healthy_cluster_has_no_findings() {
    for (state, skipped) in [(healthy(), 5), (healthy_dra(), 1)] {
        let answers: Vec<_> =
            questions().iter().map(|question| (question.id, question.answer(&state))).collect();
        for (id, answer) in &answers {
            assert!(matches!(answer.outcome, Outcome::Ok | Outcome::Skipped), "{id}: {answer:?}");
            assert!(!answer.seen.is_empty() && answer.remedy.is_empty(), "{id}: {answer:?}");
        }
        let is_skipped = |(_, answer): &&(&str, CheckAnswer)| answer.outcome == Outcome::Skipped;
        assert_eq!(answers.iter().filter(is_skipped).count(), skipped, "{answers:?}");
    }
}

/// A mistake, the question that finds it, its outcome and a part of what it says.
type Case = (&'static str, Outcome, &'static str, fn(&mut ClusterState));

const MISTAKES: &[Case] = {
    use Outcome::{Failure, Warning};
    &[
        ("api-server", Failure, "no route", |s| _ = s.objects.insert("version", Err("no route".into()))),
        ("api-server", Failure, "v1.30.1", |s| {
            s.list_mut("version")[0] = json!({ "major": "1", "minor": "30+", "gitVersion": "v1.30.1" });
        }),
        ("installation", Failure, "no DaemonSet", |s| s.list_mut("daemonsets").clear()),
        ("installation", Failure, "in namespace other", |s| s.namespace = Some("other".into())),
        ("installation", Warning, "also other/shmesh-plugin", |s| {
            let mut other = s.list_mut("daemonsets")[0].clone();
            other["metadata"]["namespace"] = "other".into();
            s.add("daemonsets", other);
        }),
        ("pod-security", Failure, "level restricted", |s| {
            s.object("namespaces", "shmesh-system")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] =
                "restricted".into();
        }),
        ("pod-security", Warning, "no Pod Security level", |s| {
            s.object("namespaces", "shmesh-system")["metadata"]["labels"] = json!({});
            s.list_mut("pods")
                .retain(|pod| !pod["metadata"]["name"].as_str().unwrap().starts_with("plugin-"));
        }),
        ("runtime", Failure, "b: docker://1", |s| {
            s.object("nodes", "b")["status"]["nodeInfo"]["containerRuntimeVersion"] = "docker://1".into();
        }),
        ("runtime", Warning, "a: containerd://1.7.24", |s| {
            s.object("nodes", "a")["status"]["nodeInfo"]["containerRuntimeVersion"] =
                "containerd://1.7.24".into();
        }),
        ("plugin-config", Failure, "wrong: ", |s| {
            s.replace_config("shmesh-plugin", "plugin.yaml", "hostRoot:", "wrong: 1\nhostRoot:");
        }),
        ("plugin-config", Failure, "shm.budget", |s| {
            s.replace_config("shmesh-plugin", "plugin.yaml", "50%", "32Gi")
        }),
        ("plugin-scheduled", Failure, "selects no node", |s| s.list_mut("nodes").clear()),
        ("plugin-scheduled", Failure, "no pod on b", |s| {
            s.list_mut("pods").retain(|pod| pod["metadata"]["name"] != "plugin-b")
        }),
        ("plugin-scheduled", Failure, "no pod on b", |s| {
            s.object("pods", "plugin-b")["spec"]["nodeName"] = Value::Null;
        }),
        ("plugin-scheduled", Warning, "no pod on b", |s| {
            s.list_mut("pods").retain(|pod| pod["metadata"]["name"] != "plugin-b");
            s.object("daemonsets", "shmesh-plugin")["status"]["desiredNumberScheduled"] = 1.into();
        }),
        ("plugin-ready", Failure, "plugin-a on a: plugin ImagePullBackOff: no image", |s| {
            break_container(s, "plugin-a")
        }),
        ("plugin-rollout", Warning, "1 of 2", |s| {
            s.object("daemonsets", "shmesh-plugin")["status"]["updatedNumberScheduled"] = 1.into();
        }),
        ("plugin-rollout", Warning, "2 of 2", |s| {
            s.object("daemonsets", "shmesh-plugin")["metadata"]["generation"] = 2.into()
        }),
        ("plugin-restarts", Warning, "plugin-a plugin: 3 times, OOMKilled", |s| {
            restart(s, "plugin-a", "containerStatuses")
        }),
        ("plugin-restarts", Warning, "3 times, OOMKilled at 2027-01-14T09:00:00Z", |s| {
            restart(s, "plugin-a", "containerStatuses");
            s.object("pods", "plugin-a")["status"]["containerStatuses"][0]["state"] =
                json!({ "waiting": { "reason": "CrashLoopBackOff" } });
            s.now += DAY;
        }),
        ("plugin-groups", Failure, "fronthaul: 60001", |s| {
            s.object("daemonsets", "shmesh-plugin")["spec"]["template"]["spec"]["securityContext"]["supplementalGroups"] =
                json!([65_532]);
        }),
        ("plugin-rights", Failure, "to create Events", |s| {
            s.list_mut("rolebindings").retain(|one| one["metadata"]["name"] != "shmesh-plugin-events");
        }),
        ("plugin-rights", Failure, "to watch pods", |s| {
            s.object("clusterrolebindings", "shmesh-plugin-pods")["subjects"][0]["namespace"] =
                "other".into();
        }),
        ("node-pressure", Warning, "memory: b", |s| {
            s.object("nodes", "b")["status"]["conditions"][1]["status"] = "True".into()
        }),
        ("node-pressure", Warning, "memory: a", |s| {
            s.object("nodes", "a")["status"]["conditions"][0]["status"] = "Unknown".into()
        }),
        ("node-resources", Failure, "b lacks shmesh.io/fronthaul", |s| {
            _ = s.object("nodes", "b")["status"]["capacity"]
                .as_object_mut()
                .unwrap()
                .remove("shmesh.io/fronthaul");
        }),
        ("node-health", Warning, "a: 64 of 64 shmesh.io/fronthaul", |s| {
            s.object("nodes", "a")["status"]["allocatable"]["shmesh.io/fronthaul"] = "0".into();
        }),
        ("injector-mode", Warning, "no webhook and no policy", |s| s.list_mut("deployments").clear()),
        ("injector-config", Failure, "wrong", |s| {
            s.replace_config("shmesh-injector", "injector.yaml", "limits:", "wrong: 1\nlimits:");
        }),
        ("injector-config", Failure, "pools [] and [fronthaul]", |s| {
            s.replace_config("shmesh-injector", "injector.yaml", "[{name: fronthaul}]", "[]");
        }),
        ("injector-ready", Failure, "injector-a on a: injector ImagePullBackOff", |s| {
            break_container(s, "injector-a")
        }),
        ("injector-replicas", Failure, "0 of 2", |s| {
            s.object("deployments", "shmesh-injector")["status"] = json!({})
        }),
        ("injector-replicas", Warning, "1 of 2", |s| {
            s.object("deployments", "shmesh-injector")["status"]["availableReplicas"] = 1.into();
        }),
        ("injector-endpoints", Failure, "no ready endpoint", |s| {
            s.list_mut("endpointslices")[0]["endpoints"] = json!([{ "conditions": { "ready": false } }]);
        }),
        ("injector-rights", Failure, "its Secret", |s| s.list_mut("rolebindings").clear()),
        ("injector-rights", Failure, "its webhook configuration", |s| {
            s.list_mut("clusterrolebindings").clear()
        }),
        ("webhook-service", Failure, "shmesh-system/gone:443", |s| {
            hook(s)["clientConfig"]["service"]["name"] = "gone".into()
        }),
        ("webhook-service", Failure, "no MutatingWebhookConfiguration", |s| {
            s.list_mut("mutatingwebhookconfigurations").clear()
        }),
        ("webhook-certificate", Failure, "no caBundle", |s| {
            _ = hook(s)["clientConfig"].as_object_mut().unwrap().remove("caBundle")
        }),
        ("webhook-certificate", Failure, "not an X.509 certificate", |s| {
            let pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
            hook(s)["clientConfig"]["caBundle"] = BASE64_STANDARD.encode(pem).into();
        }),
        ("webhook-certificate", Failure, "the caBundle expired 1 day ago", |s| {
            set_certificates(s, &bundle(HOST, NOW - 61 * DAY).authorities, &bundle(HOST, NOW).certificate);
        }),
        ("webhook-certificate", Failure, "the certificate expired 2 days ago", |s| {
            set_certificates(s, &bundle(HOST, NOW).authorities, &bundle(HOST, NOW - 62 * DAY).certificate);
        }),
        ("webhook-certificate", Warning, "the certificate expires in 13 days", |s| {
            set_certificates(s, &bundle(HOST, NOW).authorities, &bundle(HOST, NOW - 47 * DAY).certificate);
        }),
        ("webhook-certificate", Failure, "the certificate: it has no certificate", |s| {
            set_certificates(s, &bundle(HOST, NOW).authorities, "x");
        }),
        ("webhook-trust", Failure, "no tls.crt", |s| s.list_mut("secret").clear()),
        ("webhook-trust", Failure, "UnknownIssuer", |s| {
            set_certificates(s, &bundle(HOST, NOW - DAY).authorities, &bundle(HOST, NOW).certificate);
        }),
        ("webhook-trust", Failure, "not valid for name", |s| {
            let other = bundle("shmesh-injector.other.svc", NOW);
            set_certificates(s, &other.authorities, &other.certificate);
        }),
        ("webhook-scope", Warning, "failurePolicy Ignore", |s| hook(s)["failurePolicy"] = "Ignore".into()),
        ("webhook-scope", Failure, "kube-system", |s| hook(s)["namespaceSelector"] = json!({})),
        ("annotations", Failure, "shmesh-sample/mac: ", |s| {
            s.object("pods", "mac")["metadata"]["annotations"]["shmesh.io/links"] = "- nam: radio".into();
        }),
        ("pods-injected", Failure, "shmesh-sample/phy", |s| {
            s.object("pods", "phy")["spec"]["initContainers"] = json!([])
        }),
        ("sidecars-ready", Failure, "shmesh-sample/phy: shmesh ImagePullBackOff: no image", |s| {
            break_status(&mut s.object("pods", "phy")["status"]["initContainerStatuses"][0]);
        }),
        ("sidecars-ready", Warning, "shmesh-sample/phy: shmesh PodInitializing", |s| {
            let status = &mut s.object("pods", "phy")["status"]["initContainerStatuses"][0];
            *status = json!({ "name": "shmesh", "ready": false, "state": { "waiting": { "reason": "PodInitializing" } } });
        }),
        ("sidecars-restarts", Warning, "shmesh-sample/phy shmesh: 3 times, OOMKilled", |s| {
            restart(s, "phy", "initContainerStatuses")
        }),
        ("sidecars-image", Warning, "shmesh-sample/phy", |s| {
            s.object("pods", "phy")["spec"]["initContainers"][0]["image"] = "old".into()
        }),
        ("peers", Warning, "radio in pool/fronthaul: shmesh-sample/mac has no primary", |s| {
            s.list_mut("pods").retain(|pod| pod["metadata"]["name"] != "phy");
        }),
        ("peers", Warning, "shmesh-sample/mac has no primary", |s| {
            s.object("pods", "mac")["spec"]["nodeName"] = "b".into();
        }),
        ("peers", Warning, "shmesh-sample/phy has no secondary", |s| {
            s.object("pods", "mac")["status"]["phase"] = "Failed".into()
        }),
        ("pods-pending", Failure, "2 Insufficient shmesh.io/fronthaul", |s| {
            s.object("pods", "mac")["status"]["conditions"] = json!([{
                "type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 Insufficient shmesh.io/fronthaul."
            }]);
        }),
        ("pods-admitted", Warning, "Allocate failed", |s| {
            s.object("pods", "mac")["status"] = json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed" });
        }),
        ("pods-cdi", Failure, "unresolvable CDI devices", |s| {
            s.object("pods", "mac")["status"]["containerStatuses"][0]["state"] = json!({ "waiting": {
                "reason": "CreateContainerError", "message": "CDI device injection failed: unresolvable CDI devices shmesh.io/pool=p"
            } });
        }),
        ("versions", Warning, "plugin 0.0.9", |s| {
            s.object("daemonsets", "shmesh-plugin")["metadata"]["labels"]["app.kubernetes.io/version"] =
                "0.0.9".into();
        }),
    ]
};

/// The same in mode `dra`.
const DRA_MISTAKES: &[Case] = {
    use Outcome::{Failure, Warning};
    &[
        ("api-server", Failure, "v1.35.0", |s| {
            s.list_mut("version")[0] = json!({ "major": "1", "minor": "35", "gitVersion": "v1.35.0" });
        }),
        ("plugin-rights", Failure, "to read claims", |s| _ = s.list_mut("clusterrolebindings").pop()),
        ("claim-classes", Failure, "shmesh-domain", |s| _ = s.list_mut("deviceclasses").remove(0)),
        ("claim-policy", Warning, "shmesh-slices", |s| {
            _ = s.list_mut("validatingadmissionpolicybindings").pop()
        }),
        ("claim-slices", Failure, "shmesh.io on b", |s| _ = s.list_mut("resourceslices").pop()),
        ("claim-drained", Warning, "no new claims on a", |s| {
            s.object("resourceslices", "a")["spec"]["devices"][0]["taints"] =
                json!([{ "key": "shmesh.io/draining" }]);
        }),
        ("claim-ready", Warning, "ran/radio", |s| {
            s.list_mut("resourceclaims")[0]["status"]["devices"][0]["conditions"][0]["status"] =
                "False".into();
        }),
    ]
};

fn hook(state: &mut ClusterState) -> &mut Value {
    &mut state.object("mutatingwebhookconfigurations", "shmesh-injector")["webhooks"][0]
}

fn break_status(status: &mut Value) {
    status["ready"] = false.into();
    status["state"] = json!({ "waiting": { "reason": "ImagePullBackOff", "message": "no image" } });
}

fn break_container(state: &mut ClusterState, pod: &str) {
    let status = &mut state.object("pods", pod)["status"];
    status["conditions"] = json!([{ "type": "Ready", "status": "False" }]);
    break_status(&mut status["containerStatuses"][0]);
}

fn restart(state: &mut ClusterState, pod: &str, statuses: &str) {
    let status = &mut state.object("pods", pod)["status"][statuses][0];
    status["restartCount"] = 3.into();
    status["lastState"] =
        json!({ "terminated": { "reason": "OOMKilled", "finishedAt": "2027-01-14T09:00:00Z" } });
}

#[test]
fn each_mistake_is_found_by_its_question() {
    let mut found = BTreeSet::new();
    for (healthy, cases) in [(healthy(), MISTAKES), (healthy_dra(), DRA_MISTAKES)] {
        for (id, outcome, seen, mistake) in cases {
            let mut state = healthy.clone();
            mistake(&mut state);
            let answer = answer(&state, id);
            assert!(
                answer.outcome == *outcome && answer.seen.contains(seen),
                "{id}: expected {seen:?}: {answer:?}"
            );
            assert!(!answer.remedy.is_empty(), "{id}: {answer:?}");
            found.insert(*id);
        }
    }
    let all: BTreeSet<&str> = questions().iter().map(|question| question.id).collect();
    assert_eq!(found, all);
    assert_eq!(questions().len(), all.len(), "two questions have one name");
}

/// The question that could take a state for a mistake, and the state.
type HarmlessState = (&'static str, fn(&mut ClusterState));

/// States that look like mistakes and are none.
#[test]
fn ordinary_states_have_no_findings() {
    let states: [HarmlessState; 7] = [
        ("injector-ready", |s| {
            let mut evicted = s.object("pods", "injector-a").clone();
            evicted["metadata"]["name"] = "injector-evicted".into();
            evicted["status"] = json!({ "phase": "Failed", "reason": "Evicted" });
            s.add("pods", evicted);
        }),
        ("pod-security", |s| s.object("namespaces", "shmesh-system")["metadata"]["labels"] = json!({})),
        ("runtime", |s| {
            s.replace_config("shmesh-plugin", "plugin.yaml", "hostRoot:", "cdi: {enabled: false}\nhostRoot:");
            s.replace_config("shmesh-plugin", "plugin.yaml", "50%", "0");
            s.replace_config("shmesh-plugin", "plugin.yaml", ", gid: 60001", "");
            s.object("nodes", "a")["status"]["nodeInfo"]["containerRuntimeVersion"] =
                "containerd://1.6.1".into();
        }),
        ("plugin-restarts", |s| {
            restart(s, "plugin-a", "containerStatuses");
            s.now += DAY;
        }),
        ("sidecars-restarts", |s| {
            restart(s, "phy", "initContainerStatuses");
            s.now += DAY;
        }),
        ("sidecars-ready", |s| {
            let pod = s.object("pods", "phy");
            pod["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z".into();
            break_status(&mut pod["status"]["initContainerStatuses"][0]);
        }),
        ("pods-cdi", |s| {
            s.object("pods", "mac")["status"]["containerStatuses"][0]["state"] = json!({ "waiting": {
                "reason": "CreateContainerError", "message": "unresolvable CDI devices nvidia.com/gpu=0"
            } });
        }),
    ];
    let healthy = healthy();
    for (id, change) in states {
        let mut state = healthy.clone();
        change(&mut state);
        let answer = answer(&state, id);
        assert!(matches!(answer.outcome, Outcome::Ok | Outcome::Skipped), "{id}: {answer:?}");
    }
}

#[test]
fn objects_that_cannot_be_read_are_warnings() {
    let healthy = healthy();
    for kind in healthy.objects.keys().filter(|kind| !["version", "others"].contains(kind)) {
        let mut state = healthy.clone();
        state.objects.insert(kind, Err("Forbidden".to_owned()));
        let answers: Vec<_> = questions().iter().map(|question| question.answer(&state)).collect();
        let is_warned =
            |answer: &CheckAnswer| answer.outcome == Outcome::Warning && answer.seen.contains("Forbidden");
        let is_used =
            !["mutatingadmissionpolicybindings", "validatingadmissionpolicybindings"].contains(kind);
        assert!(!is_used || answers.iter().any(is_warned), "{kind}");
        assert!(answers.iter().all(|answer| answer.outcome != Outcome::Failure), "{kind}: {answers:?}");
    }
}

#[test]
fn release_with_a_policy_in_place_of_the_webhook_skips_the_webhook() {
    let mut state = healthy();
    state.list_mut("deployments").clear();
    for object in documents("helm/policy/policy.yaml") {
        state.add(kind(&object), object);
    }
    assert_eq!(answer(&state, "injector-mode"), ok("by the MutatingAdmissionPolicy shmesh-inject"));
    for question in questions().iter().filter(|question| question.id.starts_with("webhook-")) {
        assert_eq!(question.answer(&state).outcome, Outcome::Skipped, "{}", question.id);
    }
}

#[test]
fn releases_of_one_name_in_two_namespaces_are_told_apart() {
    let mut state = healthy();
    let mut first = ClusterState { namespace: Some("shmesh-system".to_owned()), ..ClusterState::default() };
    for object in documents("manifests/install.yaml") {
        let mut object: Value =
            serde_json::from_str(&object.to_string().replace("shmesh-system", "a-namespace")).unwrap();
        object["status"] = json!({});
        if object["kind"] != "ClusterRole" {
            first.add(kind(&object), object);
        }
    }
    // The objects of the other release come first in each list.
    for (kind, mut objects) in first.objects {
        objects.as_mut().unwrap().append(state.list_mut(kind));
        state.objects.insert(kind, objects);
    }
    state.namespace = first.namespace;
    for question in questions() {
        let answer = question.answer(&state);
        assert!(
            matches!(answer.outcome, Outcome::Ok | Outcome::Skipped) || question.id == "installation",
            "{}: {answer:?}",
            question.id
        );
    }
}

#[test]
fn report_has_outcome_remedy_and_summary() {
    let mut state = healthy();
    restart(&mut state, "plugin-a", "containerStatuses");
    let answers: Vec<_> =
        questions().into_iter().map(|question| (question.answer(&state), question)).collect();
    let mut out = Vec::new();
    print_text(&answers, Style { has_color: false, columns: Some(60) }, &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(
        text.starts_with("cluster\n  ok       the API server answers and is supported: v1.36.2\n"),
        "{text}"
    );
    assert!(text.contains("\n  warning  no container of the plugin restarted"), "{text}");
    assert!(text.contains("\n           remedy: kubectl logs"), "{text}");
    assert!(text.ends_with(&format!("\n0 failures, 1 warning of {} questions\n", answers.len())), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    let mut out = Vec::new();
    print_text(&answers, Style { has_color: true, columns: None }, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("\x1b[33mwarning\x1b[0m"));
}

#[test]
fn check_fetches_what_the_questions_need_and_fails_only_with_failures() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("kubectl");
    shmesh_testing::write_script(&program, include_str!("../../tests/kubectl.sh"));
    let mut state = healthy();
    let now = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let bundle = bundle(HOST, now);
    set_certificates(&mut state, &bundle.authorities, &bundle.certificate);
    fs::write(dir.path().join("secret"), BASE64_STANDARD.encode(bundle.certificate)).unwrap();
    let save = |kind: &str, objects: &[Value]| {
        let text =
            if kind == "version" { objects[0].to_string() } else { json!({ "items": objects }).to_string() };
        fs::write(dir.path().join(format!("{kind}.json")), text).unwrap();
    };
    for (kind, objects) in &state.objects {
        save(kind, objects.as_ref().unwrap());
    }
    for kind in ["mutatingadmissionpolicybindings", "resourceslices", "resourceclaims", "deviceclasses"] {
        let unknown = "error: the server doesn't have a resource type \"x\"\n";
        fs::write(dir.path().join(format!("{kind}.json.error")), unknown).unwrap();
    }
    let args: Vec<_> = ["kubectl-shmesh", "check", "--kubectl", program.to_str().unwrap()].to_vec();
    let cli = <crate::Cli as clap::Parser>::parse_from(args);
    let crate::Command::Check(args) = cli.command else { panic!() };
    let mut out = Vec::new();
    assert!(check(&args, &mut out).unwrap());
    let text = String::from_utf8(out).unwrap();
    assert!(
        text.ends_with(&format!("\n0 failures, 0 warnings of {} questions\n", questions().len())),
        "{text}"
    );
    save("endpointslices", &[]);
    assert!(!check(&args, &mut Vec::new()).unwrap());
}
