//! Looking at a pod without believing its shape: what is not as Kubernetes has it counts as not there.

use serde_json::Value;

use crate::quantity::bytes_of;

/// The sidecar's name.
pub(crate) const SIDECAR: &str = "shmesh";
/// The volume that is the pod's IPC directory.
pub(crate) const SHM_VOLUME: &str = "shmesh-shm";
/// The volume that shows the annotation to the sidecar.
pub(crate) const INFO_VOLUME: &str = "shmesh-podinfo";
/// Where the sidecar sees it.
pub(crate) const INFO_DIR: &str = "/run/shmesh/podinfo";
/// Where containers have shared memory.
pub(crate) const SHM_DIR: &str = shmesh::DEFAULT_DIR;

/// A container of a pod, and where it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Container<'a> {
    pub(crate) value: &'a Value,
    pub(crate) is_init: bool,
    /// Its place in its list.
    pub(crate) index: usize,
}

/// All containers, those that initialise first.
pub(crate) fn containers(pod: &Value) -> impl Iterator<Item = Container<'_>> {
    [("/spec/initContainers", true), ("/spec/containers", false)].into_iter().flat_map(|(path, is_init)| {
        let list = pod.pointer(path).and_then(Value::as_array).into_iter().flatten();
        list.enumerate().map(move |(index, value)| Container { value, is_init, index })
    })
}

/// The text at a pointer.
pub(crate) fn text<'a>(value: &'a Value, path: &str) -> Option<&'a str> {
    value.pointer(path).and_then(Value::as_str)
}

/// Whether something is said to be so.
pub(crate) fn is_true(value: &Value, path: &str) -> bool {
    value.pointer(path).and_then(Value::as_bool) == Some(true)
}

/// The elements of a list; none where there is no list.
pub(crate) fn list<'a>(value: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> {
    value.pointer(path).and_then(Value::as_array).into_iter().flatten()
}

/// The element of a list that has this name.
pub(crate) fn named<'a>(value: &'a Value, path: &str, name: &str) -> Option<&'a Value> {
    list(value, path).find(|item| text(item, "/name") == Some(name))
}

impl<'a> Container<'a> {
    pub(crate) fn name(&self) -> &'a str {
        text(self.value, "/name").unwrap_or("")
    }

    /// Where it stands, for a patch.
    pub(crate) fn path(&self) -> String {
        let list = if self.is_init { "initContainers" } else { "containers" };
        format!("/spec/{list}/{}", self.index)
    }

    /// Whether it runs beside the others although it starts before them.
    pub(crate) fn is_sidecar(&self) -> bool {
        self.is_init && text(self.value, "/restartPolicy") == Some("Always")
    }

    /// Whether this is the sidecar of ours.
    pub(crate) fn is_ours(&self) -> bool {
        self.name() == SIDECAR
            && self.is_sidecar()
            && list(self.value, "/volumeMounts").any(|mount| text(mount, "/name") == Some(INFO_VOLUME))
    }

    /// How much of a resource it has, by limit or else by request.
    pub(crate) fn resource(&self, name: &str) -> Option<u64> {
        let of = |kind: &str| self.value.pointer(kind)?.get(name).and_then(bytes_of);
        of("/resources/limits").or_else(|| of("/resources/requests"))
    }

    /// The volume that is mounted at a path.
    pub(crate) fn mounted_at(&self, path: &str) -> Option<&'a str> {
        let is_there = |mount: &&Value| {
            text(mount, "/mountPath").is_some_and(|at| at.trim_end_matches('/') == path.trim_end_matches('/'))
        };
        let mount = list(self.value, "/volumeMounts").find(is_there)?;
        Some(text(mount, "/name").unwrap_or(""))
    }

    /// A number of its security context, or of the pod's.
    pub(crate) fn security<'v>(&self, pod: &'v Value, key: &str) -> Option<&'v Value>
    where
        'a: 'v,
    {
        let own = self.value.get("securityContext").and_then(|context| context.get(key));
        let of_pod = || pod.pointer("/spec/securityContext")?.get(key);
        own.filter(|value| !value.is_null()).or_else(of_pod).filter(|value| !value.is_null())
    }

    /// Which user it runs as, if the pod says.
    pub(crate) fn user(&self, pod: &Value) -> Option<u64> {
        self.security(pod, "runAsUser").and_then(Value::as_u64)
    }
}

/// Whether all containers have equal requests and limits of CPU and memory, so that the pod is in the best class.
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
