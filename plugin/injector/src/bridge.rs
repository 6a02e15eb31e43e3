//! The bridge's container, which carries links to other nodes, and what it needs around it.

use serde_json::{Map, Value, json};
use shmesh::Side;
use shmesh::config::{Far, PodLink, Scope};
use shmesh_sys::quantity::Bytes;

use crate::edit::{Edit, ShapeError};
use crate::plan::{BridgePlan, Plan};
use crate::pod::{self, BRIDGE, BRIDGE_PORT, BRIDGE_TLS, BRIDGE_TLS_DIR};
use crate::sidecar::security_as;

/// Variable with the name of the node, in the bridge.
const NODE_VARIABLE: &str = "SHMESH_BRIDGE_NODE";

/// Adds the bridge, its certificates, and the labels by which Services and policies select its pod.
pub(crate) fn add_to(plan: &Plan<'_>, bridge: &BridgePlan, edit: &mut Edit) -> Result<(), ShapeError> {
    for (key, value) in bridge.labels(plan) {
        edit.ensure("/metadata/labels", &key, json!(value))?;
    }
    if pod::named(plan.pod, "/spec/volumes", BRIDGE_TLS).is_none() {
        let volume = json!({ "name": BRIDGE_TLS, "secret": { "secretName": BRIDGE_TLS } });
        edit.push("/spec/volumes", volume)?;
    }
    if pod::containers(plan.pod).any(|container| container.is_bridge()) {
        return Ok(());
    }
    edit.first("/spec/initContainers", container(plan, bridge))
}

impl BridgePlan {
    /// Returns the labels by which Services and policies select the pod.
    pub(crate) fn labels(&self, plan: &Plan<'_>) -> Vec<(String, &'static str)> {
        let domain = &plan.config.domain;
        let end = if self.side == Side::Primary { "home" } else { "far" };
        let of_link = |link: &PodLink| (format!("{domain}/far-{}", link.config.name), end);
        let links = plan.far().filter(|_| self.side == Side::Primary).map(of_link);
        std::iter::once((format!("{domain}/bridge"), end)).chain(links).collect()
    }
}

/// Creates a restartable init container. It needs no sidecar: it waits for the link, and makes the replicas itself.
fn container(plan: &Plan<'_>, bridge: &BridgePlan) -> Value {
    let settings = &plan.config.bridge;
    let port = settings.admin_port;
    let probe = |path: &str| json!({ "path": path, "port": port });
    let mut ports = vec![json!({ "name": "bridge-admin", "containerPort": port, "protocol": "TCP" })];
    if bridge.side == Side::Primary {
        ports.push(json!({ "name": "shmesh-bridge", "containerPort": BRIDGE_PORT, "protocol": "UDP" }));
    }
    let node = json!({ "fieldRef": { "apiVersion": "v1", "fieldPath": "spec.nodeName" } });
    let mut env = vec![json!({ "name": NODE_VARIABLE, "valueFrom": node })];
    // A claim brings its own variable.
    env.extend(
        plan.directory(&bridge.scope)
            .map(|directory| json!({ "name": shmesh::DIR_VARIABLE, "value": directory })),
    );
    env.extend([
        json!({ "name": "SHMESH_ADMIN", "value": format!("{}:{port}", plan.config.sidecar.admin_address) }),
        json!({ "name": "SHMESH_LOG", "value": settings.log }),
        json!({ "name": "SHMESH_LOG_FORMAT", "value": "json" }),
    ]);
    json!({
        "name": BRIDGE,
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "args": args(plan, bridge),
        "env": env,
        "ports": ports,
        "resources": resources(plan, bridge),
        "securityContext": security_as(plan, plan.bridge_user()),
        "readinessProbe": { "httpGet": probe("/readyz"), "periodSeconds": 5, "failureThreshold": 2 },
        "livenessProbe": { "httpGet": probe("/livez"), "periodSeconds": 10, "failureThreshold": 6 },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{ "name": BRIDGE_TLS, "mountPath": BRIDGE_TLS_DIR, "readOnly": true }],
    })
}

fn args(plan: &Plan<'_>, bridge: &BridgePlan) -> Vec<String> {
    let namespace = plan.namespace;
    let mut args = Vec::new();
    for link in plan.far() {
        let name = &link.config.name;
        args.push(format!("--link={name}"));
        if bridge.side == Side::Secondary {
            args.push(format!("--connect={name}=quic/shmesh-far-{name}.{namespace}.svc:{BRIDGE_PORT}"));
            if link.far == Far::Allow {
                args.push(format!("--near={name}"));
            }
        }
    }
    if bridge.side == Side::Primary {
        args.push(format!("--listen=quic/{}:{BRIDGE_PORT}", plan.config.sidecar.admin_address));
        args.push(format!("--peers={}", plan.config.bridge.peers));
    }
    args.push(format!("--group={}/{namespace}", plan.config.bridge.cluster));
    args.push(format!("--cluster-node=$({NODE_VARIABLE})"));
    for (flag, file) in [("authority", "ca.crt"), ("certificate", "tls.crt"), ("key", "tls.key")] {
        args.push(format!("--{flag}={BRIDGE_TLS_DIR}/{file}"));
    }
    args.push(format!("--allow-certificate={namespace}.shmesh"));
    args
}

/// Requests the IPC directory, and the memory of the replicas, whose pages are allocated when they are made, and of the messages that
/// the bridge holds.
fn resources(plan: &Plan<'_>, bridge: &BridgePlan) -> Value {
    let settings = &plan.config.bridge;
    let mut limits = Map::new();
    // More was refused.
    let memory = plan.bridge_memory().unwrap_or(u64::MAX);
    limits.insert("memory".into(), Bytes(memory).to_string().into());
    if let Scope::Pool(pool) = &bridge.scope {
        limits.insert(format!("{}/{pool}", plan.config.domain), "1".into());
    }
    let mut requests = limits.clone();
    requests.insert("cpu".into(), settings.cpu.clone().into());
    if pod::is_guaranteed(plan.pod) {
        limits.insert("cpu".into(), settings.cpu.clone().into());
    }
    let mut resources = json!({ "limits": limits, "requests": requests });
    if let (Scope::Claim(claim), Some(resources)) = (&bridge.scope, resources.as_object_mut()) {
        resources.insert("claims".into(), json!([{ "name": plan.claims.entry(claim) }]));
    }
    resources
}
