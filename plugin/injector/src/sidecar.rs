//! The container of the injected sidecar.

use serde_json::{Map, Value, json};
use shmesh::config::Scope;

use crate::plan::Plan;
use crate::pod::{self, INFO_DIR, INFO_VOLUME, SHM_VOLUME, SIDECAR};
use shmesh_sys::quantity::Bytes;

/// Path of the sidecar in its image.
const PROGRAM: &str = "/usr/bin/shmesh-sidecar";
/// Bytes that the kernel zeroes per second on a slow machine, which extends the limit for large links.
const FILLED_PER_SECOND: u64 = 256 << 20;
/// Start time limit in seconds without the zeroing of links.
const START_SECONDS: u64 = 60;

/// Creates a restartable init container, which starts before the others and ends after them.
pub(crate) fn container(plan: &Plan<'_>, scope: &Scope) -> Value {
    let settings = &plan.config.sidecar;
    let directory = plan.directory(scope);
    let port = settings.admin_port;
    let probe = |path: &str| json!({ "path": path, "port": port });
    let start = START_SECONDS + plan.memory.all() / FILLED_PER_SECOND;
    let mut mounts = Vec::new();
    if *scope == Scope::Pod {
        mounts.push(json!({ "name": SHM_VOLUME, "mountPath": directory }));
    }
    // A claim brings its own variable.
    let variable = directory.map(|directory| json!({ "name": shmesh::DIR_VARIABLE, "value": directory }));
    let mut env = vec![json!({ "name": "SHMESH_ANNOTATION", "value": format!("{INFO_DIR}/links") })];
    env.extend(variable);
    env.extend([
        json!({ "name": "SHMESH_ADMIN", "value": format!("{}:{port}", settings.admin_address) }),
        json!({ "name": "SHMESH_LOG", "value": settings.log }),
        json!({ "name": "SHMESH_LOG_FORMAT", "value": "json" }),
    ]);
    mounts.push(json!({ "name": INFO_VOLUME, "mountPath": INFO_DIR, "readOnly": true }));
    json!({
        "name": SIDECAR,
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "env": env,
        "ports": [{ "name": "shmesh-admin", "containerPort": port, "protocol": "TCP" }],
        "resources": resources(plan, scope),
        "securityContext": security(plan),
        // The kubelet starts the next container after the hook; with a startup probe it would do so a second later. A link that stays bad
        // must not keep the pod's containers from starting; it keeps the pod from being ready.
        "lifecycle": { "postStart": { "exec": { "command": [PROGRAM, "await-start", "--seconds", start.to_string()] } } },
        "readinessProbe": { "httpGet": probe("/readyz"), "periodSeconds": 5, "failureThreshold": 2 },
        "livenessProbe": { "httpGet": probe("/livez"), "periodSeconds": 10, "failureThreshold": 6 },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    })
}

/// Requests the full memory of the links, because all pages are allocated at start.
fn resources(plan: &Plan<'_>, scope: &Scope) -> Value {
    let settings = &plan.config.sidecar;
    let mut limits = Map::new();
    // More was refused.
    let memory = plan.sidecar_memory().unwrap_or(u64::MAX);
    limits.insert("memory".into(), Bytes(memory).to_string().into());
    if plan.memory.huge > 0 {
        limits.insert("hugepages-2Mi".into(), Bytes(plan.memory.huge).to_string().into());
    }
    if let Some(resource) = resource(plan, scope) {
        limits.insert(resource, "1".into());
    }
    let mut requests = limits.clone();
    requests.insert("cpu".into(), settings.cpu.clone().into());
    if pod::is_guaranteed(plan.pod) {
        limits.insert("cpu".into(), settings.cpu.clone().into());
    }
    let mut resources = json!({ "limits": limits, "requests": requests });
    if let (Scope::Claim(claim), Some(resources)) = (scope, resources.as_object_mut()) {
        resources.insert("claims".into(), json!([{ "name": plan.claims.entry(claim) }]));
    }
    resources
}

/// Returns the resource with the pool, or with the identity service alone, which a claim has too.
fn resource(plan: &Plan<'_>, scope: &Scope) -> Option<String> {
    let name = match scope {
        Scope::Pool(pool) => pool.as_str(),
        Scope::Pod => Some(plan.config.agent_resource.as_str()).filter(|name| !name.is_empty())?,
        Scope::Claim(_) => return None,
    };
    Some(format!("{}/{name}", plan.config.domain))
}

/// Creates a security context whose user owns the links' files.
fn security(plan: &Plan<'_>) -> Value {
    security_as(plan, plan.sidecar_user())
}

/// Creates a security context with the common user of the containers on links; `None` means that there is none.
pub(crate) fn security_as(plan: &Plan<'_>, user: Option<u64>) -> Value {
    let of_pod = plan.pod.pointer("/spec/securityContext/runAsUser").and_then(Value::as_u64);
    let user = match user {
        Some(user) if of_pod == Some(user) => None,
        Some(user) => Some(user),
        None if of_pod == Some(0) => Some(plan.config.sidecar.user.into()),
        None => None,
    };
    restricted(user)
}

/// Creates a security context that satisfies Pod Security *restricted*, with the user if the pod's is not right.
pub(crate) fn restricted(user: Option<u64>) -> Value {
    let mut context = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": true,
        "capabilities": { "drop": ["ALL"] },
        "seccompProfile": { "type": "RuntimeDefault" },
    });
    if let (Some(user), Some(context)) = (user, context.as_object_mut()) {
        context.insert("runAsUser".into(), user.into());
    }
    context
}
