//! Injection into YAML and JSON documents, for the command line and CI.

use serde_json::{Value, json};
use shmesh::config::show_yaml_error;
use thiserror::Error;

use crate::config::Config;
use crate::edit::escaped;
use crate::inject::inject;
use crate::pod::text;
use crate::refusal::Refusal;

/// Format of the output.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum OutputFormat {
    /// A stream of YAML documents; unchanged documents are copied verbatim.
    Yaml,
    /// One JSON object; several documents become a `List`.
    Json,
}

/// The documents after injection.
///
/// ```
/// use shmesh_injector::manifest::{OutputFormat, InjectedManifest, injected};
/// let text = "kind: ConfigMap # as it was\n";
/// let InjectedManifest { text: out, pods, .. } = injected(text, "default", &Default::default(), OutputFormat::Yaml)?;
/// assert_eq!((out.as_str(), pods), (text, 0));
/// # Ok::<(), shmesh_injector::manifest::ManifestError>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct InjectedManifest {
    /// All documents in the requested format.
    pub text: String,
    /// Number of pods and templates that were changed.
    pub pods: usize,
    /// Warnings, each with the name of the object.
    pub warnings: Vec<String>,
}

/// Why documents cannot be injected.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// A document is not valid YAML.
    #[error("document {document} is not YAML: {why}")]
    Yaml {
        /// Number of the document, starting at 1.
        document: usize,
        /// Message of the parser.
        why: String,
    },
    /// Pods were refused; lists all of them.
    #[error("{}", .0.iter().map(|(name, refusal)| format!("{name}: {refusal}")).collect::<Vec<_>>().join("\n"))]
    Refused(Vec<(String, Refusal)>),
}

/// Injects every pod and pod template of a text with any number of documents.
///
/// # Errors
/// A document cannot be parsed, or pods are refused; the error lists all refusals.
///
/// ```
/// use shmesh_injector::manifest::{OutputFormat, injected};
/// let text = "
/// apiVersion: apps/v1
/// kind: Deployment
/// metadata: {name: du}
/// spec:
///   template:
///     metadata: {annotations: {shmesh.io/links: '- name: fronthaul'}}
///     spec: {securityContext: {runAsUser: 1000}, containers: [{name: phy, image: phy}]}
/// ";
/// let written = injected(text, "default", &Default::default(), OutputFormat::Json)?;
/// assert_eq!(written.pods, 1);
/// assert!(written.text.contains("\"restartPolicy\": \"Always\""));
/// # Ok::<(), shmesh_injector::manifest::ManifestError>(())
/// ```
pub fn injected(
    text: &str,
    namespace: &str,
    config: &Config,
    form: OutputFormat,
) -> Result<InjectedManifest, ManifestError> {
    let mut all = Vec::new();
    let mut work = ManifestInjector { namespace, config, pods: 0, warnings: Vec::new(), refused: Vec::new() };
    for (at, document) in documents(text).into_iter().enumerate() {
        let value: Value =
            parse(at + 1, document).map_err(|why| ManifestError::Yaml { document: at + 1, why })?;
        let mut changed = value.clone();
        work.object(&mut changed);
        all.push((document, (changed != value).then_some(changed), value));
    }
    if !work.refused.is_empty() {
        return Err(ManifestError::Refused(work.refused));
    }
    let text = match form {
        OutputFormat::Yaml => {
            let mut written = Vec::with_capacity(all.len());
            for (at, (document, changed, _)) in all.into_iter().enumerate() {
                written.push(match changed {
                    None => document.to_owned(),
                    Some(value) => {
                        yaml(&value).map_err(|why| ManifestError::Yaml { document: at + 1, why })?
                    }
                });
            }
            joined(&written)
        }
        OutputFormat::Json => {
            let mut values: Vec<_> = all
                .into_iter()
                .map(|(_, changed, value)| changed.unwrap_or(value))
                .filter(|v| !v.is_null())
                .collect();
            let one = match values.len() {
                1 => values.remove(0),
                _ => json!({ "apiVersion": "v1", "kind": "List", "items": values }),
            };
            format!("{one:#}\n")
        }
    };
    Ok(InjectedManifest { text, pods: work.pods, warnings: work.warnings })
}

struct ManifestInjector<'a> {
    namespace: &'a str,
    config: &'a Config,
    pods: usize,
    warnings: Vec<String>,
    refused: Vec<(String, Refusal)>,
}

impl ManifestInjector<'_> {
    fn object(&mut self, object: &mut Value) {
        let kind = text(object, "/kind").unwrap_or("").to_owned();
        if kind == "List" {
            if let Some(items) = object.pointer_mut("/items").and_then(Value::as_array_mut) {
                items.iter_mut().for_each(|item| self.object(item));
            }
            return;
        }
        let group = text(object, "/apiVersion").unwrap_or("").split_once('/').map_or("", |(group, _)| group);
        let namespace = text(object, "/metadata/namespace").unwrap_or(self.namespace).to_owned();
        let name = text(object, "/metadata/name").or(text(object, "/metadata/generateName")).unwrap_or("?");
        let named = format!("{kind} {namespace}/{name}");
        let path = match (group, kind.as_str()) {
            ("", "Pod") => "",
            ("", "PodTemplate") => "/template",
            ("", "ReplicationController")
            | ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
            | ("batch", "Job") => "/spec/template",
            ("batch", "CronJob") => "/spec/jobTemplate/spec/template",
            // Another kind: search for pod templates by their structure.
            _ => return self.search(object, "", &namespace, &named),
        };
        if !path.is_empty()
            && let Some(annotation) = self.annotation_of(object)
        {
            self.misplaced(&named, "", &annotation);
        }
        if let Some(pod) = object.pointer_mut(path) {
            self.pod(pod, &namespace, &named);
        }
    }

    fn pod(&mut self, pod: &mut Value, namespace: &str, named: &str) {
        match inject(pod, namespace, self.config) {
            Ok(injected) => {
                self.pods += usize::from(!injected.operations.is_empty());
                self.warnings.extend(injected.warnings.iter().map(|warning| format!("{named}: {warning}")));
                *pod = injected.pod;
            }
            Err(refusal) => self.refused.push((named.to_owned(), refusal)),
        }
    }

    /// Injects every object with the annotation and containers, at any depth. `path` is the path of `value`.
    fn search(&mut self, value: &mut Value, path: &str, namespace: &str, named: &str) {
        if let Some(annotation) = self.annotation_of(value) {
            if value.pointer("/spec/containers").is_some_and(Value::is_array) {
                let place = if path.is_empty() { named.to_owned() } else { format!("{named}, {path}") };
                return self.pod(value, namespace, &place);
            }
            self.misplaced(named, path, &annotation);
        }
        let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        match value {
            Value::Object(map) => {
                for (key, inner) in map {
                    self.search(inner, &below(key), namespace, named);
                }
            }
            Value::Array(list) => {
                for (at, inner) in list.iter_mut().enumerate() {
                    self.search(inner, &format!("{path}[{at}]"), namespace, named);
                }
            }
            _ => {}
        }
    }

    /// Returns the key of the annotation by which an object asks for injection.
    fn annotation_of(&self, object: &Value) -> Option<String> {
        let keys = ["links", "share", "as"].map(|name| self.config.annotation(name));
        keys.into_iter()
            .find(|key| text(object, &format!("/metadata/annotations/{}", escaped(key))).is_some())
    }

    fn misplaced(&mut self, named: &str, path: &str, annotation: &str) {
        let dot = if path.is_empty() { "" } else { "." };
        self.warnings.push(format!(
            "{named}: {path}{dot}metadata has the annotation {annotation} but belongs to no pod or pod template, so it is \
             ignored: annotate the template that has the containers"
        ));
    }
}

/// Splits a YAML stream. Only a document marker starts a line with three dashes, even in block scalars.
fn documents(text: &str) -> Vec<&str> {
    let is_marker = |line: &str| {
        line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
    };
    let mut documents = Vec::new();
    let (mut begin, mut at) = (0, 0);
    for line in text.split_inclusive('\n') {
        if is_marker(line) {
            documents.push(&text[begin..at]);
            // Text after the marker on its line belongs to the document.
            begin = at + 3 + usize::from(line.len() > 3);
        }
        at += line.len();
    }
    documents.push(&text[begin..]);
    // The text before the first marker may consist of comments only.
    let has_content = |document: &str| {
        document.lines().any(|line| {
            !line.trim().is_empty() && !line.trim_start().starts_with('#') && !line.starts_with('%')
        })
    };
    documents.into_iter().filter(|document| has_content(document)).collect()
}

fn joined(documents: &[String]) -> String {
    let mut text = String::new();
    for (at, document) in documents.iter().enumerate() {
        if at > 0 {
            text.push_str("---\n");
        }
        text.push_str(document);
        if !text.ends_with('\n') {
            text.push('\n');
        }
    }
    text
}

/// Parses YAML with the Kubernetes rules: `0644` is octal, and `yes` is a string.
fn parse(number: usize, text: &str) -> Result<Value, String> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        legacy_octal_numbers: true,
        emit_comments: false,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| show_yaml_error(&format!("document {number}"), text, &error))
}

fn yaml(value: &Value) -> Result<String, String> {
    serde_saphyr::to_string(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "metadata: {name: p, annotations: {shmesh.io/links: '- name: a'}}\n\
                       spec: {securityContext: {runAsUser: 1000}, containers: [{name: a, image: a}]}\n";

    fn yaml_of(text: &str) -> InjectedManifest {
        injected(text, "default", &Config::default(), OutputFormat::Yaml).unwrap()
    }

    #[test]
    fn documents_are_split_at_markers() {
        assert_eq!(
            documents("# only a comment\n---\na: 1\n---\n\n--- {b: 2}\n---\nc: |\n  ---\n"),
            ["a: 1\n", "{b: 2}\n", "c: |\n  ---\n"]
        );
        assert_eq!(documents(""), [""; 0]);
        assert_eq!(documents("a: 1\r\n---\r\nb: ---x\n---"), ["a: 1\r\n", "\nb: ---x\n"]);
    }

    #[test]
    fn other_documents_are_unchanged() {
        let map = "apiVersion: v1\nkind: ConfigMap   # a comment\ndata: {mode: 0644, word: yes}\n";
        let text = format!("{map}---\napiVersion: v1\nkind: Pod\n{POD}");
        let written = yaml_of(&text);
        assert_eq!(written.pods, 1);
        assert!(written.text.starts_with(&format!("{map}---\n")), "{}", written.text);
        assert_eq!(yaml_of(&written.text).text, written.text, "and a second time nothing happens");
    }

    #[test]
    fn templates_are_found() {
        let indent =
            |by: usize| POD.lines().map(|line| format!("{}{line}\n", " ".repeat(by))).collect::<String>();
        for (version, kind, head, by) in [
            ("apps/v1", "Deployment", "spec:\n  template:\n", 4),
            ("apps/v1", "StatefulSet", "spec:\n  template:\n", 4),
            ("apps/v1", "DaemonSet", "spec:\n  template:\n", 4),
            ("batch/v1", "Job", "spec:\n  template:\n", 4),
            ("batch/v1", "CronJob", "spec:\n  jobTemplate:\n    spec:\n      template:\n", 8),
            ("v1", "PodTemplate", "template:\n", 2),
        ] {
            let text = format!("apiVersion: {version}\nkind: {kind}\n{head}{}", indent(by));
            assert_eq!(yaml_of(&text).pods, 1, "{kind}");
            let list = format!("apiVersion: v1\nkind: List\nitems:\n- {}", text.replace('\n', "\n  "));
            assert_eq!(yaml_of(&list).pods, 1, "a list of {kind}");
        }
    }

    #[test]
    fn pod_templates_are_found_in_any_kind() {
        let indent =
            |by: usize| POD.lines().map(|line| format!("{}{line}\n", " ".repeat(by))).collect::<String>();
        for (version, kind, head, by) in [
            (
                "kubeflow.org/v1",
                "PyTorchJob",
                "spec:\n  pytorchReplicaSpecs:\n    Master:\n      template:\n",
                8,
            ),
            (
                "leaderworkerset.x-k8s.io/v1",
                "LeaderWorkerSet",
                "spec:\n  leaderWorkerTemplate:\n    workerTemplate:\n",
                6,
            ),
            ("ray.io/v1", "RayCluster", "spec:\n  workerGroupSpecs:\n  - template:\n", 6),
            ("argoproj.io/v1", "Job", "spec:\n  template:\n", 4),
        ] {
            let written = yaml_of(&format!("apiVersion: {version}\nkind: {kind}\n{head}{}", indent(by)));
            assert_eq!((written.pods, written.warnings.len()), (1, 0), "{kind}");
        }
    }

    #[test]
    fn annotations_outside_of_templates_are_reported() {
        let links = ("links", "'- name: a'");
        for (version, kind, (name, value)) in [
            ("apps/v1", "Deployment", links),
            ("ray.io/v1", "RayCluster", links),
            ("apps/v1", "Deployment", ("share", "radio")),
            ("apps/v1", "Deployment", ("as", "posix")),
        ] {
            let text = format!(
                "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: d, annotations: {{shmesh.io/{name}: {value}}}}}\n\
                 spec: {{template: {{spec: {{containers: [{{name: a, image: a}}]}}}}}}\n"
            );
            let written = yaml_of(&text);
            assert_eq!((written.pods, written.text.as_str()), (0, text.as_str()));
            let [warning] = &written.warnings[..] else { panic!("{:?}", written.warnings) };
            assert!(
                warning
                    .starts_with(&format!("{kind} default/d: metadata has the annotation shmesh.io/{name} ")),
                "{warning}"
            );
        }
    }

    #[test]
    fn ambiguous_yaml_scalars_keep_their_type() {
        let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, annotations: {shmesh.io/links: '- name: a', x: \"yes\", y: '0x10'}}\n\
                   spec:\n  securityContext: {runAsUser: 1000}\n  volumes: [{name: s, secret: {secretName: s, defaultMode: 0400}}]\n  \
                   containers: [{name: a, image: a, args: ['on', '1e3', 'null', '~', '0644', '- a: b', \"two\\nlines\"]}]\n";
        let written = yaml_of(pod);
        // YAML 1.1 parsers could misread these values unless they are quoted.
        let again: Value = serde_saphyr::from_str(&written.text).unwrap();
        assert_eq!(again["spec"]["volumes"][0]["secret"]["defaultMode"], 0o400);
        assert_eq!(again["metadata"]["annotations"]["x"], "yes");
        assert_eq!(again["metadata"]["annotations"]["y"], "0x10");
        let args = json!(["on", "1e3", "null", "~", "0644", "- a: b", "two\nlines"]);
        assert_eq!(again["spec"]["containers"][0]["args"], args);
        for word in ["yes", "on", "1e3", "0644"] {
            assert!(
                !written.text.lines().any(|line| line.trim_end().ends_with(&format!(" {word}"))),
                "{word} is bare"
            );
        }
    }

    #[test]
    fn all_refusals_are_reported() {
        let bad = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME, annotations: {shmesh.io/links: '- name: a/b'}}\nspec: {containers: []}\n";
        let text = format!("{}---\n{}", bad.replace("NAME", "p"), bad.replace("NAME", "q"));
        let error = injected(&text, "radio", &Config::default(), OutputFormat::Yaml).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 2);
        assert!(
            error.contains("Pod radio/p: metadata.annotations[shmesh.io/links]: ")
                && error.contains("Pod radio/q"),
            "{error}"
        );
    }
}
