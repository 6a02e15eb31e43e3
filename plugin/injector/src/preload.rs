//! Brings `libshmesh_posix.so` to programs that know nothing of shmesh: an init container that copies it, and `LD_PRELOAD`.

use serde_json::{Map, Value, json};
use shmesh::config::Position;

use crate::config::Config;
use crate::edit::{Edit, ShapeError};
use crate::plan::read;
use crate::pod::{self, Container, LIBRARY, LIBRARY_DIR};
use crate::refusal::Refusal;
use crate::sidecar::restricted;
use shmesh_sys::quantity::Bytes;

const VARIABLE: &str = "LD_PRELOAD";
/// Where containers find the library. glibc replaces `$LIB`; musl does not, finds nothing, and starts programs without the
/// library, which it could not load.
const PATH: &str = "/run/shmesh/library/$LIB/libshmesh_posix.so";
/// Limit of the volume, on the node's disk: the library and the copy that replaces it have less than 1 MiB each.
const VOLUME_BYTES: u64 = 16 << 20;

/// The request for the library.
#[derive(Debug)]
pub(crate) struct Preload {
    annotation: String,
}

impl Preload {
    /// Reads the annotation. Returns `None` if the pod does not ask for the library.
    pub(crate) fn of(pod: &Value, config: &Config) -> Result<Option<Self>, Refusal> {
        let annotation = config.annotation("as");
        let Some(text) = read(pod, &annotation)? else { return Ok(None) };
        let preload = Self { annotation };
        if text.trim() != "posix" {
            let what = format!("{text:?} is not a kind of shared memory that programs can have");
            return Err(preload.refuse("annotation", what, "write posix, or remove the annotation"));
        }
        Ok(Some(preload))
    }

    /// Refuses the annotation in a pod that shares nothing.
    pub(crate) fn check_alone(pod: &Value, config: &Config) -> Result<(), Refusal> {
        let share = config.annotation("share");
        if read(pod, &share)?.is_some() {
            return Ok(());
        }
        let Some(preload) = Self::of(pod, config)? else { return Ok(()) };
        let what = format!("the pod has no annotation {share}, so its programs have nothing to share");
        Err(preload.refuse(
            "annotation",
            what,
            format!("name a pool or a claim by {share}, or remove the annotation"),
        ))
    }

    /// Refuses other things with our names.
    pub(crate) fn check_names(&self, pod: &Value) -> Result<(), Refusal> {
        if pod::containers(pod).any(|container| container.name() == LIBRARY && !container.is_library()) {
            let what =
                format!("the pod has a container {LIBRARY:?}, which is the name of that with the library");
            return Err(self.refuse("name", what, "rename it"));
        }
        let volume = pod::named(pod, "/spec/volumes", LIBRARY);
        if volume.is_some_and(|volume| !volume.get("emptyDir").is_some_and(Value::is_object)) {
            let what = format!("the pod has a volume {LIBRARY:?} that is not an emptyDir");
            return Err(self.refuse("name", what, "rename it"));
        }
        Ok(())
    }

    /// Refuses a container that cannot get the library.
    pub(crate) fn check(&self, container: &Container<'_>) -> Result<(), Refusal> {
        let name = container.name();
        let is_from_elsewhere = |variable: &Value| {
            pod::text(variable, "/name") == Some(VARIABLE)
                && variable.get("valueFrom").is_some_and(|from| !from.is_null())
        };
        if pod::list(container.value, "/env").any(is_from_elsewhere) {
            let what = format!(
                "container {name} has {VARIABLE} by valueFrom, and the library is appended to a value that is known here"
            );
            let remedy = format!("write its value in the manifest, with {PATH} at its end or without");
            return Err(self.refuse("variable", what, remedy));
        }
        match container.mounted_at(LIBRARY_DIR) {
            Some(volume) if volume != LIBRARY => {
                let what =
                    format!("container {name} mounts volume {volume} at {LIBRARY_DIR}, where the library is");
                Err(self.refuse("mount", what, "mount it elsewhere"))
            }
            _ => Ok(()),
        }
    }

    /// Mounts the library in a container, and has its programs load it.
    pub(crate) fn add_to(&self, container: &Container<'_>, edit: &mut Edit) -> Result<(), ShapeError> {
        if container.mounted_at(LIBRARY_DIR).is_none() {
            let mount = json!({ "name": LIBRARY, "mountPath": LIBRARY_DIR, "readOnly": true });
            edit.push(&format!("{}/volumeMounts", container.path()), mount)?;
        }
        edit.append_variable(container, VARIABLE, ':', PATH)
    }

    /// Adds the volume, and the init container that copies the library into it before all others run.
    pub(crate) fn bring(&self, pod: &Value, config: &Config, edit: &mut Edit) -> Result<(), ShapeError> {
        if pod::named(pod, "/spec/volumes", LIBRARY).is_none() {
            let limit = Bytes(VOLUME_BYTES).to_string();
            edit.push("/spec/volumes", json!({ "name": LIBRARY, "emptyDir": { "sizeLimit": limit } }))?;
        }
        if pod::containers(pod).any(|container| container.is_library()) {
            return Ok(());
        }
        edit.first("/spec/initContainers", installer(pod, config))
    }

    fn refuse(&self, reason: &'static str, what: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal::new(&self.annotation, Position::default(), reason, what, remedy)
    }
}

/// Creates the init container, which needs no more than a sidecar without links.
fn installer(pod: &Value, config: &Config) -> Value {
    let settings = &config.sidecar;
    let mut limits = Map::from_iter([("memory".to_owned(), json!(settings.memory.to_string()))]);
    let mut requests = limits.clone();
    requests.insert("cpu".into(), json!(settings.cpu));
    if pod::is_guaranteed(pod) {
        limits.insert("cpu".into(), json!(settings.cpu));
    }
    let is_root = pod.pointer("/spec/securityContext/runAsUser").and_then(Value::as_u64) == Some(0);
    json!({
        "name": LIBRARY,
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "args": ["install-library", LIBRARY_DIR],
        "resources": { "limits": limits, "requests": requests },
        "securityContext": restricted(is_root.then_some(settings.user.into())),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{ "name": LIBRARY, "mountPath": LIBRARY_DIR }],
    })
}
