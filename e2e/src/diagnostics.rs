//! Diagnostics after a failure: nodes, pods, Events, logs.

use std::fmt::Write;

use k8s_openapi::api::core::v1::{Event, Pod};

use crate::cluster::Cluster;
use crate::{node, pods, tools};

/// Maximum Events per namespace in the output.
const MOST_EVENTS: usize = 40;
const MOST_LINES: usize = 25;

/// Gathers the diagnostics. Errors appear in place of missing parts.
pub(crate) async fn gather(cluster: &Cluster, namespaces: &[&str]) -> String {
    let mut text = String::from("--- nodes\n");
    match cluster.nodes().await {
        Ok(nodes) => {
            for one in nodes {
                let name = one.metadata.name.as_deref().unwrap_or_default();
                let conditions = one.status.iter().flat_map(|status| status.conditions.iter().flatten());
                let is_ready = conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True");
                let word = if is_ready { "ready" } else { "not ready" };
                let _ = writeln!(text, "{name}: {word}, allocatable {:?}", node::allocatable(&one));
            }
        }
        Err(error) => drop(writeln!(text, "{error:#}")),
    }
    for namespace in namespaces {
        let _ = writeln!(text, "--- namespace {namespace}: pods");
        let all = cluster.pods(namespace, "").await.unwrap_or_else(|error| {
            let _ = writeln!(text, "{error:#}");
            Vec::new()
        });
        for pod in &all {
            let _ = writeln!(text, "{}", pods::describe(pod));
        }
        let _ = writeln!(text, "--- namespace {namespace}: events");
        match cluster.events(namespace).await {
            Ok(events) => text.push_str(&lines(events)),
            Err(error) => drop(writeln!(text, "{error:#}")),
        }
        for pod in &all {
            logs(cluster, namespace, pod, &mut text).await;
        }
    }
    text
}

/// Formats the last Events in order.
fn lines(mut events: Vec<Event>) -> String {
    let time = |event: &Event| {
        let precise = event.event_time.as_ref().map(|time| time.0);
        event.last_timestamp.as_ref().map(|time| time.0).or(precise).or(event
            .metadata
            .creation_timestamp
            .as_ref()
            .map(|time| time.0))
    };
    events.sort_by_key(time);
    let mut text = String::new();
    for event in &events[events.len().saturating_sub(MOST_EVENTS)..] {
        let about = event.involved_object.name.as_deref().unwrap_or_default();
        let [kind, reason, message] =
            [&event.type_, &event.reason, &event.message].map(|one| one.as_deref().unwrap_or_default());
        let count = event
            .count
            .filter(|count| *count > 1)
            .map(|count| format!(" ({count} times)"))
            .unwrap_or_default();
        let _ = writeln!(text, "{kind} {about} {reason}: {}{count}", message.trim());
    }
    text
}

async fn logs(cluster: &Cluster, namespace: &str, pod: &Pod, text: &mut String) {
    let name = pods::name(pod);
    for container in pods::containers(pod) {
        let restarted = (container.restart_count > 0).then_some(true);
        for previous in restarted.into_iter().chain([false]) {
            let when = if previous { ", before its restart" } else { "" };
            let _ = writeln!(text, "--- log of {namespace}/{name}, container {}{when}", container.name);
            let log = cluster.log(namespace, name, &container.name, previous).await;
            let log = log.unwrap_or_else(|error| format!("{error:#}"));
            let _ = writeln!(text, "{}", tools::last_lines(log.trim_end(), MOST_LINES));
        }
    }
}
