//! Access to an untrusted pod: values of an unexpected type count as missing.

use serde_json::Value;

use crate::quantity::bytes_of;

/// Name of the sidecar's container.
pub const SIDECAR: &str = "shmesh";
/// Volume with the IPC directory of the pod.
pub(crate) const SHM_VOLUME: &str = "shmesh-shm";
/// Volume through which the sidecar reads the annotation.
pub(crate) const INFO_VOLUME: &str = "shmesh-podinfo";
/// Mount path of that volume.
pub(crate) const INFO_DIR: &str = "/run/shmesh/podinfo";
/// Name of the init container that brings the preload library, and of the volume that it brings it in.
pub(crate) const LIBRARY: &str = "shmesh-library";
/// Mount path of that volume.
pub(crate) const LIBRARY_DIR: &str = "/run/shmesh/library";
/// Name of the bridge's container.
pub(crate) const BRIDGE: &str = "shmesh-bridge";
/// Volume with the certificates of the bridge, and the Secret that it is from.
pub(crate) const BRIDGE_TLS: &str = "shmesh-bridge-tls";
/// Mount path of that volume.
pub(crate) const BRIDGE_TLS_DIR: &str = "/run/shmesh/bridge-tls";
/// Port on which bridges listen: of UDP, for QUIC.
pub(crate) const BRIDGE_PORT: u16 = 7447;
/// Default IPC directory in containers.
pub(crate) const SHM_DIR: &str = shmesh::DEFAULT_DIR;

/// A container of a pod and its position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Container<'a> {
    pub(crate) value: &'a Value,
    pub(crate) is_init: bool,
    /// Index in its list of containers.
    pub(crate) index: usize,
}

/// Returns all containers, init containers first.
pub(crate) fn containers(pod: &Value) -> impl Iterator<Item = Container<'_>> {
    [("/spec/initContainers", true), ("/spec/containers", false)].into_iter().flat_map(|(path, is_init)| {
        let list = pod.pointer(path).and_then(Value::as_array).into_iter().flatten();
        list.enumerate().map(move |(index, value)| Container { value, is_init, index })
    })
}

/// Returns the string at a JSON pointer.
pub(crate) fn text<'a>(value: &'a Value, path: &str) -> Option<&'a str> {
    value.pointer(path).and_then(Value::as_str)
}

/// Whether the value at a JSON pointer is `true`.
pub(crate) fn is_true(value: &Value, path: &str) -> bool {
    value.pointer(path).and_then(Value::as_bool) == Some(true)
}

/// Returns the elements of a list, or none if it is missing.
pub(crate) fn list<'a>(value: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> {
    value.pointer(path).and_then(Value::as_array).into_iter().flatten()
}

/// Returns the element of a list with this name.
pub(crate) fn named<'a>(value: &'a Value, path: &str, name: &str) -> Option<&'a Value> {
    list(value, path).find(|item| text(item, "/name") == Some(name))
}

impl<'a> Container<'a> {
    pub(crate) fn name(&self) -> &'a str {
        text(self.value, "/name").unwrap_or("")
    }

    /// Returns the JSON pointer to the container.
    pub(crate) fn path(&self) -> String {
        let list = if self.is_init { "initContainers" } else { "containers" };
        format!("/spec/{list}/{}", self.index)
    }

    /// Whether this is a restartable init container.
    pub(crate) fn is_sidecar(&self) -> bool {
        self.is_init && text(self.value, "/restartPolicy") == Some("Always")
    }

    /// Whether the injector adds this container.
    pub(crate) fn is_ours(&self) -> bool {
        self.is_our_sidecar() || self.is_bridge() || self.is_library()
    }

    /// Whether this is the bridge that the injector adds.
    pub(crate) fn is_bridge(&self) -> bool {
        self.name() == BRIDGE && self.is_sidecar() && self.mounts(BRIDGE_TLS)
    }

    /// Whether this is the sidecar that the injector adds.
    pub(crate) fn is_our_sidecar(&self) -> bool {
        self.name() == SIDECAR && self.is_sidecar() && self.mounts(INFO_VOLUME)
    }

    /// Whether this is the init container that the injector adds for the preload library.
    pub(crate) fn is_library(&self) -> bool {
        self.name() == LIBRARY && self.is_init && self.mounts(LIBRARY)
    }

    fn mounts(&self, volume: &str) -> bool {
        list(self.value, "/volumeMounts").any(|mount| text(mount, "/name") == Some(volume))
    }

    /// Returns the amount of a resource, from limits or else requests.
    pub(crate) fn resource(&self, name: &str) -> Option<u64> {
        let of = |kind: &str| self.value.pointer(kind)?.get(name).and_then(bytes_of);
        of("/resources/limits").or_else(|| of("/resources/requests"))
    }

    /// Returns the name of the volume mounted at a path.
    pub(crate) fn mounted_at(&self, path: &str) -> Option<&'a str> {
        let is_there = |mount: &&Value| {
            text(mount, "/mountPath").is_some_and(|at| at.trim_end_matches('/') == path.trim_end_matches('/'))
        };
        let mount = list(self.value, "/volumeMounts").find(is_there)?;
        Some(text(mount, "/name").unwrap_or(""))
    }

    /// Returns a field of the security context of the container or else the pod.
    pub(crate) fn security<'v>(&self, pod: &'v Value, key: &str) -> Option<&'v Value>
    where
        'a: 'v,
    {
        let own = self.value.get("securityContext").and_then(|context| context.get(key));
        let of_pod = || pod.pointer("/spec/securityContext")?.get(key);
        own.filter(|value| !value.is_null()).or_else(of_pod).filter(|value| !value.is_null())
    }

    /// Returns the user id if the pod specifies it.
    pub(crate) fn user(&self, pod: &Value) -> Option<u64> {
        self.security(pod, "runAsUser").and_then(Value::as_u64)
    }
}

/// Whether the pod has QoS class Guaranteed.
pub(crate) fn is_guaranteed(pod: &Value) -> bool {
    let mut any = false;
    containers(pod).filter(|container| !container.is_ours()).all(|container| {
        any = true;
        ["cpu", "memory"].iter().all(|resource| {
            let of = |kind: &str| container.value.pointer(kind).and_then(|list| list.get(*resource));
            let limit = of("/resources/limits");
            limit.is_some() && of("/resources/requests").is_none_or(|request| Some(request) == limit)
        })
    }) && any
}
