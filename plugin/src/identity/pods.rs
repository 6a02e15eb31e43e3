//! Sources of pod names for the identity service.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use shmesh::config::show_yaml_error;
use shmesh_proto::identity::Pod;
use thiserror::Error;

use super::limits::{MAX_CONTAINERS, MAX_PODS_BYTES};

/// A source of pod names. Lookups must not block.
pub(crate) trait Pods: std::fmt::Debug {
    /// Finds a pod by uid and container id. `confirmed` is set if the source vouches for its names; for an unknown
    /// container the result has no container name. Without a uid, the container id alone decides.
    fn find(&self, uid: Option<&str>, container_id: &str) -> Option<Pod>;
}

/// No source: pods have a uid and a container id and are unconfirmed.
#[derive(Debug)]
pub(crate) struct NoPods;

impl Pods for NoPods {
    fn find(&self, _uid: Option<&str>, _container_id: &str) -> Option<Pod> {
        None
    }
}

/// Pods from a file, for tests and static nodes.
#[derive(Debug, Default)]
pub(crate) struct PodFile {
    by_uid: HashMap<String, Pod>,
    by_container: HashMap<String, Pod>,
}

/// Why a file of pods was rejected.
#[derive(Debug, Error)]
pub(crate) enum PodsError {
    /// The file cannot be read.
    #[error("cannot read the file of pods {0}")]
    Read(PathBuf, #[source] std::io::Error),
    /// The file exceeds the size limit.
    #[error("the file of pods {0} has more than {MAX_PODS_BYTES} bytes")]
    TooLong(PathBuf),
    /// The file is not valid YAML or lacks keys.
    #[error("{0} is not a valid file of pods: {1}")]
    Parse(PathBuf, String),
    /// The file exceeds the limit of containers.
    #[error("{0} has more than {MAX_CONTAINERS} containers")]
    TooMany(PathBuf),
    /// A uid or container id is empty or duplicate.
    #[error("{0} has an empty or duplicate id {1:?}")]
    Ambiguous(PathBuf, String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    pods: Vec<PodEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PodEntry {
    uid: String,
    namespace: String,
    name: String,
    #[serde(default)]
    service_account: String,
    #[serde(default)]
    containers: Vec<PodContainer>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PodContainer {
    name: String,
    id: String,
}

impl PodFile {
    /// Loads a file in YAML or JSON.
    pub(crate) fn load(path: &Path) -> Result<Self, PodsError> {
        let read = |error| PodsError::Read(path.to_owned(), error);
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(MAX_PODS_BYTES + 1).read_to_string(&mut text))
            .map_err(read)?;
        if text.len() as u64 > MAX_PODS_BYTES {
            return Err(PodsError::TooLong(path.to_owned()));
        }
        let document: Document = serde_saphyr::from_str(&text)
            .map_err(|error| show_yaml_error(&path.display().to_string(), &text, &error))
            .map_err(|shown| PodsError::Parse(path.to_owned(), shown))?;
        Self::index(document, path)
    }

    fn index(document: Document, path: &Path) -> Result<Self, PodsError> {
        if document.pods.iter().map(|pod| pod.containers.len()).sum::<usize>() > MAX_CONTAINERS {
            return Err(PodsError::TooMany(path.to_owned()));
        }
        let mut pods = Self::default();
        for PodEntry { uid, namespace, name, service_account, containers } in document.pods {
            let pod = Pod { uid: uid.clone(), namespace, name, service_account, ..Pod::default() };
            for PodContainer { name, id } in containers {
                // Accepts `containerd://<id>`, as in the API, and bare ids.
                let id = id.rsplit_once("://").map_or(id.as_str(), |(_, id)| id).to_owned();
                let container =
                    Pod { container: name, container_id: id.clone(), confirmed: true, ..pod.clone() };
                if id.is_empty() || pods.by_container.insert(id.clone(), container).is_some() {
                    return Err(PodsError::Ambiguous(path.to_owned(), id));
                }
            }
            if uid.is_empty() || pods.by_uid.insert(uid.clone(), pod).is_some() {
                return Err(PodsError::Ambiguous(path.to_owned(), uid));
            }
        }
        Ok(pods)
    }

    /// Returns the number of pods and containers.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.by_uid.len(), self.by_container.len())
    }
}

impl Pods for PodFile {
    fn find(&self, uid: Option<&str>, container_id: &str) -> Option<Pod> {
        let container = self.by_container.get(container_id);
        container.or_else(|| self.by_uid.get(uid?)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str = "\
pods:
- uid: 9a5f0e5c-7d6b-4c1e-8f3a-2b6d1c0e4f57
  namespace: radio
  name: du-0
  serviceAccount: du
  containers:
  - {name: phy, id: 'containerd://abc'}
  - {name: mac, id: def}
";

    fn load(text: &str) -> Result<PodFile, PodsError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        PodFile::load(file.path())
    }

    #[test]
    fn known_container_is_confirmed_and_pod_alone_is_not() {
        let pods = load(YAML).unwrap();
        let uid = Some("9a5f0e5c-7d6b-4c1e-8f3a-2b6d1c0e4f57");
        let phy = pods.find(uid, "abc").unwrap();
        assert_eq!((phy.namespace.as_str(), phy.container.as_str(), phy.confirmed), ("radio", "phy", true));
        assert_eq!(pods.find(None, "abc"), Some(phy));
        let other = pods.find(uid, "not there yet").unwrap();
        assert_eq!((other.name.as_str(), other.container.as_str(), other.confirmed), ("du-0", "", false));
        assert_eq!(pods.find(None, "not there"), None);
        assert_eq!(pods.find(Some("another"), "not there"), None);
        assert_eq!(pods.counts(), (1, 2));
    }

    #[test]
    fn json_is_accepted() {
        let pods = load(r#"{"pods": [{"uid": "u", "namespace": "n", "name": "p"}]}"#).unwrap();
        assert_eq!(pods.counts(), (1, 0));
    }

    #[test]
    fn invalid_files_are_rejected() {
        assert!(matches!(load("pods: [{uid: u, namespace: n, name: p, x: 1}]"), Err(PodsError::Parse(..))));
        assert!(matches!(load(&YAML.replace("def", "abc")), Err(PodsError::Ambiguous(..))));
        assert!(matches!(
            load(&YAML.replace("9a5f0e5c-7d6b-4c1e-8f3a-2b6d1c0e4f57", "''")),
            Err(PodsError::Ambiguous(..))
        ));
        assert!(matches!(load("&a [*a]"), Err(PodsError::Parse(..))));
        assert!(matches!(PodFile::load(Path::new("/nowhere")), Err(PodsError::Read(..))));
        let many = format!(
            "pods:\n- uid: u\n  namespace: n\n  name: p\n  containers:\n{}",
            "  - {name: a, id: b}\n".repeat(MAX_CONTAINERS + 1)
        );
        assert!(matches!(load(&many), Err(PodsError::TooMany(_))));
    }
}
