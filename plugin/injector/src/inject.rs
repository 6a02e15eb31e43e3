//! Turns a plan into a patch.

use serde_json::{Value, json};
use shmesh::Side;
use shmesh::config::{Far, PodLink, Position, Scope};

use crate::bridge;
use crate::config::Config;
use crate::edit::{Edit, Operation, ShapeError};
use crate::plan::Plan;
use crate::pod::{self, Container, INFO_VOLUME, SHM_VOLUME};
use crate::preload::Preload;
use crate::refusal::Refusal;
use crate::share::ShareAnnotation;
use crate::sidecar;
use shmesh_sys::quantity::Bytes;

/// The result of injecting a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Injection {
    /// The patch, which only adds: keys, elements of lists, and text at the end of `LD_PRELOAD`.
    pub operations: Vec<Operation>,
    /// The pod with the patch applied.
    pub pod: Value,
    /// Warnings about settings that may not work.
    pub warnings: Vec<String>,
}

/// Injects the links, or the shared pool or claim, that a pod requests. `namespace` is the request's, which the pod itself
/// need not have.
///
/// Existing settings are kept, and injecting twice has the effect of injecting once.
///
/// # Errors
/// A request that cannot be honoured, with the line of the annotation and the remedy.
pub fn inject(pod: &Value, namespace: &str, config: &Config) -> Result<Injection, Refusal> {
    let mut edit = Edit::new(pod.clone());
    let mut warnings = Vec::new();
    let unexpected = |annotation: &str, ShapeError(path): ShapeError| {
        let what = format!("the pod's {path} has another type than Kubernetes specifies");
        Refusal::new(annotation, Position::default(), "pod", what, "correct the pod")
    };
    Preload::check_alone(pod, config)?;
    if let Some(share) = ShareAnnotation::of(pod, config)? {
        warnings = share.check()?;
        share.add_to(&mut edit).map_err(|error| unexpected(&share.annotation, error))?;
    } else if let Some(plan) = Plan::of(pod, namespace, config)? {
        warnings = plan.check()?;
        edited(&plan, &mut edit).map_err(|error| unexpected(&plan.annotation, error))?;
    }
    Ok(Injection { operations: edit.operations, pod: edit.pod, warnings })
}

fn edited(plan: &Plan<'_>, edit: &mut Edit) -> Result<(), ShapeError> {
    volumes(plan, edit)?;
    plan.claims.add_entries(edit)?;
    // Before inserting the sidecar shifts the indexes of init containers.
    for container in pod::containers(plan.pod) {
        if let Some(scope) = plan.directories.get(container.name()) {
            participant(plan, &container, scope, edit)?;
        }
    }
    for (planned, pool) in plan.in_pools(Side::Primary) {
        edit.ensure("/metadata/labels", &label(plan, planned.link.config.name.as_str()), json!(pool))?;
    }
    for (planned, pool) in plan.in_pools(Side::Secondary) {
        beside_primary(plan, &planned.link, pool, edit)?;
    }
    if let Some(bridge) = &plan.bridge {
        bridge::add_to(plan, bridge, edit)?;
    }
    if let Some(scope) = &plan.kept
        && !pod::containers(plan.pod).any(|container| container.is_our_sidecar())
    {
        edit.first("/spec/initContainers", sidecar::container(plan, scope))?;
    }
    Ok(())
}

fn volumes(plan: &Plan<'_>, edit: &mut Edit) -> Result<(), ShapeError> {
    let has = |name| pod::named(plan.pod, "/spec/volumes", name).is_some();
    if plan.directories.values().any(|scope| *scope == Scope::Pod) && !has(SHM_VOLUME) {
        let size = Bytes(plan.memory.directory).to_string();
        let volume = json!({ "name": SHM_VOLUME, "emptyDir": { "medium": "Memory", "sizeLimit": size } });
        edit.push("/spec/volumes", volume)?;
    }
    if plan.kept.is_some() && !has(INFO_VOLUME) {
        let field = format!("metadata.annotations['{}']", plan.annotation);
        let item = json!({ "path": "links", "fieldRef": { "apiVersion": "v1", "fieldPath": field } });
        edit.push("/spec/volumes", json!({ "name": INFO_VOLUME, "downwardAPI": { "items": [item] } }))?;
    }
    Ok(())
}

/// Adds the directory and its environment variable to a container on a link.
fn participant(
    plan: &Plan<'_>,
    container: &Container<'_>,
    scope: &Scope,
    edit: &mut Edit,
) -> Result<(), ShapeError> {
    let directory = plan.directory_in(container, scope);
    match scope {
        Scope::Pod => {
            if container.mounted_at(directory).is_none() {
                let mount = json!({ "name": SHM_VOLUME, "mountPath": directory });
                edit.push(&format!("{}/volumeMounts", container.path()), mount)?;
            }
        }
        Scope::Pool(pool) => {
            edit.pool_resource(container, &format!("{}/{pool}", plan.config.domain))?;
        }
        // The node mounts the directory and sets the variable.
        Scope::Claim(claim) => return plan.claims.give(claim, container, edit),
    }
    edit.directory_variable(container, directory)
}

/// Returns the label of pods that are primary of a link.
fn label(plan: &Plan<'_>, link: &str) -> String {
    // Link names may begin and end with characters that label names may not.
    format!("{}/link.{link}.primary", plan.config.domain)
}

/// Adds affinity to the node of the primary. Only pods of the same namespace match, so labels in other
/// namespaces have no effect.
fn beside_primary(plan: &Plan<'_>, link: &PodLink, pool: &str, edit: &mut Edit) -> Result<(), ShapeError> {
    let term = json!({
        "labelSelector": { "matchLabels": { label(plan, link.config.name.as_str()): pool } },
        "topologyKey": "kubernetes.io/hostname",
    });
    let (list, term) = match link.far {
        Far::Never => ("requiredDuringSchedulingIgnoredDuringExecution", term),
        Far::Allow => (
            "preferredDuringSchedulingIgnoredDuringExecution",
            json!({ "weight": 100, "podAffinityTerm": term }),
        ),
        Far::Require => return Ok(()),
    };
    let list = format!("/spec/affinity/podAffinity/{list}");
    if pod::list(&edit.pod, &list).any(|there| *there == term) {
        return Ok(());
    }
    edit.push(&list, term)
}
