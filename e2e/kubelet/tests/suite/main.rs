//! Each behaviour of the real kubelet, by its number in the README's table, against a scripted plugin. Time is virtual.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod admission;
mod allocation;
mod apiserver;
mod claim_soak;
mod claims;
mod driver;
mod lists;
mod plugin;
mod registration;
mod restarts;
mod watcher;

use std::time::Duration;

use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::json;
use shmesh_fake_kubelet::{Config, Container, Event, Node, Pod};
use tempfile::TempDir;

/// The resource of most tests.
pub(crate) const R: &str = "example.com/dev";
/// The driver of most tests of claims.
pub(crate) const D: &str = "dra.example.com";
/// Longer than anything that should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(2);

/// A node whose kubelet runs. The directory lasts as long as it is held.
pub(crate) async fn node() -> (TempDir, Node) {
    node_with(|_| {}).await
}

/// As `node`, with changes to its configuration.
pub(crate) async fn node_with(change: impl FnOnce(&mut Config)) -> (TempDir, Node) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(dir.path());
    change(&mut config);
    let node = Node::new(config);
    node.start_kubelet().await.unwrap();
    (dir, node)
}

/// A pod with one container, `main`, that asks for so many devices.
pub(crate) fn pod(name: &str, count: u64) -> Pod {
    Pod::new(name).container(Container::new("main").limit(R, count))
}

pub(crate) async fn allocatable(node: &Node, count: u64) {
    node.wait_for(SOON, |node| node.allocatable(R) == count).await.unwrap();
}

pub(crate) fn count(node: &Node, which: impl Fn(&Event) -> bool) -> usize {
    node.events().iter().filter(|record| which(&record.event)).count()
}

pub(crate) fn find<T>(node: &Node, which: impl Fn(&Event) -> Option<T>) -> T {
    node.events().iter().rev().find_map(|record| which(&record.event)).expect("no such event")
}

/// The only slice of a pool that has the name of its node.
pub(crate) fn slice(name: &str, node: &str, devices: &[&str]) -> ResourceSlice {
    let devices: Vec<_> = devices.iter().map(|name| json!({ "name": name })).collect();
    let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
    let spec = json!({"driver": D, "nodeName": node, "pool": pool, "devices": devices});
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
}

/// The class of the devices of `D`.
pub(crate) fn class() -> DeviceClass {
    let selector = json!({"cel": {"expression": format!("device.driver == '{D}'")}});
    serde_json::from_value(json!({"metadata": {"name": "class"}, "spec": {"selectors": [selector]}})).unwrap()
}

/// A claim of one request, `r`, for a device, and for so many bytes of it.
pub(crate) fn claim(name: &str, bytes: Option<&str>) -> ResourceClaim {
    let capacity = bytes.map(|bytes| json!({"requests": {"bytes": bytes}}));
    let exactly = json!({"deviceClassName": "class", "capacity": capacity});
    let spec = json!({"devices": {"requests": [{"name": "r", "exactly": exactly}]}});
    serde_json::from_value(json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec})).unwrap()
}
