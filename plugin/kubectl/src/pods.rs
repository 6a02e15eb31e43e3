//! Pods as the API server describes them; keys of an unexpected type count as missing.

use serde_json::Value;
use shmesh::config::{PodLink, pod_links};
use shmesh_injector::SIDECAR;

/// The string at a JSON pointer, or an empty one.
pub(crate) fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

/// The elements of the list at a JSON pointer.
pub(crate) fn list<'a>(object: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> {
    object.pointer(path).and_then(Value::as_array).into_iter().flatten()
}

/// The number at a JSON pointer, or 0.
pub(crate) fn number(object: &Value, path: &str) -> i64 {
    object.pointer(path).and_then(Value::as_i64).unwrap_or_default()
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "/metadata/namespace")
}

/// `namespace/name`.
pub(crate) fn full_name(object: &Value) -> String {
    format!("{}/{}", namespace(object), name(object))
}

/// The value of a label.
pub(crate) fn label<'a>(object: &'a Value, key: &str) -> &'a str {
    object.pointer("/metadata/labels").and_then(|labels| labels.get(key)?.as_str()).unwrap_or_default()
}

/// The value of an annotation.
pub(crate) fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object.pointer("/metadata/annotations")?.get(key)?.as_str()
}

/// The status of a condition, such as `True`, and its message.
pub(crate) fn condition<'a>(object: &'a Value, kind: &str) -> Option<(&'a str, &'a str)> {
    let found = list(object, "/status/conditions").find(|condition| text(condition, "/type") == kind)?;
    Some((text(found, "/status"), text(found, "/message")))
}

/// The containers of a pod, init containers first.
pub(crate) fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    list(pod, "/spec/initContainers").chain(list(pod, "/spec/containers"))
}

/// The states of the containers, init containers first.
pub(crate) fn container_statuses(pod: &Value) -> impl Iterator<Item = &Value> {
    list(pod, "/status/initContainerStatuses").chain(list(pod, "/status/containerStatuses"))
}

/// The container of the sidecar.
pub(crate) fn sidecar(pod: &Value) -> Option<&Value> {
    containers(pod).find(|container| name_of(container) == SIDECAR)
}

/// The state of the sidecar's container.
pub(crate) fn sidecar_status(pod: &Value) -> Option<&Value> {
    container_statuses(pod).find(|status| name_of(status) == SIDECAR)
}

fn name_of(container: &Value) -> &str {
    text(container, "/name")
}

/// Whether the containers have ended for good.
pub(crate) fn is_finished(pod: &Value) -> bool {
    matches!(text(pod, "/status/phase"), "Succeeded" | "Failed")
}

/// The links that the annotation `<domain>/links` asks for, or the mistake in it.
pub(crate) fn links(pod: &Value, domain: &str) -> Option<Result<Vec<PodLink>, String>> {
    let annotation = annotation(pod, &format!("{domain}/links"))?;
    Some(pod_links(annotation).map_err(|error| error.to_string()))
}
