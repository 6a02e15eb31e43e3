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
    /// No pod asks for a claim.
    #[error(
        "no pod has the annotation {links}, or {share} with claim/<name>; annotate the pod, or the template that has the containers"
    )]
    NoClaim {
        /// Key of the annotation with links.
        links: String,
        /// Key of the annotation that names what is shared.
        share: String,
    },
    /// The name is for links in no claim, and there are none.
    #[error("-n {name}: every link names its claim by scope claim/<name>, and shares do too; remove -n")]
    UnusedClaimName {
        /// The value of `-n`.
        name: String,
    },
    /// A claim is larger than the API server accepts.
    #[error("claim {claim}: {what}")]
    ClaimTooLarge {
        /// Name of the claim.
        claim: String,
        /// The sizes, and the remedy.
        what: String,
    },
}

/// Injects every pod and pod template of a text with any number of documents.
///
/// # Errors
/// A document cannot be parsed, or pods are refused; the error lists all refusals.
pub fn injected(
    text: &str,
    namespace: &str,
    config: &Config,
    form: OutputFormat,
) -> Result<InjectedManifest, ManifestError> {
    let mut all = Vec::new();
    let (mut pods, mut of_pods, mut refused) = (0, Vec::new(), Vec::new());
    let mut finder =
        PodFinder::new(namespace, config, |pod, named| match inject(pod, named.namespace, config) {
            Ok(injected) => {
                pods += usize::from(!injected.operations.is_empty());
                of_pods.extend(injected.warnings.iter().map(|warning| format!("{}: {warning}", named.shown)));
                *pod = injected.pod;
            }
            Err(refusal) => refused.push((named.shown.to_owned(), refusal)),
        });
    for (at, document) in documents(text).into_iter().enumerate() {
        let value = parse(at + 1, document)?;
        let mut changed = value.clone();
        finder.object(&mut changed);
        all.push((document, (changed != value).then_some(changed), value));
    }
    let mut warnings = finder.warnings;
    warnings.append(&mut of_pods);
    if !refused.is_empty() {
        return Err(ManifestError::Refused(refused));
    }
    let text = match form {
        OutputFormat::Yaml => {
            let mut written = Vec::with_capacity(all.len());
            for (at, (document, changed, _)) in all.into_iter().enumerate() {
                written.push(match changed {
                    None => document.to_owned(),
                    Some(value) => yaml(at + 1, &value)?,
                });
            }
            joined(&written)
        }
        OutputFormat::Json => {
            let values = all.into_iter().map(|(_, changed, value)| changed.unwrap_or(value));
            json_text(values.filter(|value| !value.is_null()).collect())
        }
    };
    Ok(InjectedManifest { text, pods, warnings })
}

/// Writes objects as a text.
pub(crate) fn written(objects: Vec<Value>, form: OutputFormat) -> Result<String, ManifestError> {
    match form {
        OutputFormat::Yaml => {
            let texts = objects.iter().enumerate().map(|(at, object)| yaml(at + 1, object));
            Ok(joined(&texts.collect::<Result<Vec<_>, _>>()?))
        }
        OutputFormat::Json => Ok(json_text(objects)),
    }
}

fn json_text(mut objects: Vec<Value>) -> String {
    let one = match objects.len() {
        1 => objects.remove(0),
        _ => json!({ "apiVersion": "v1", "kind": "List", "items": objects }),
    };
    format!("{one:#}\n")
}

/// Visits the pods and pod templates of a text that ask for something, and returns warnings.
pub(crate) fn visit_pods(
    text: &str,
    namespace: &str,
    config: &Config,
    visit: impl FnMut(&mut Value, PodName<'_>),
) -> Result<Vec<String>, ManifestError> {
    let mut finder = PodFinder::new(namespace, config, visit);
    for (at, document) in documents(text).into_iter().enumerate() {
        finder.object(&mut parse(at + 1, document)?);
    }
    Ok(finder.warnings)
}

/// Names of the object that a pod or pod template is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PodName<'a> {
    /// Name of the object.
    pub(crate) object: &'a str,
    pub(crate) namespace: &'a str,
    /// Kind, namespace and name, and where the template is in an object of an unknown kind.
    pub(crate) shown: &'a str,
}

struct PodFinder<'a, V> {
    namespace: &'a str,
    config: &'a Config,
    visit: V,
    warnings: Vec<String>,
}

impl<'a, V: FnMut(&mut Value, PodName<'_>)> PodFinder<'a, V> {
    fn new(namespace: &'a str, config: &'a Config, visit: V) -> Self {
        Self { namespace, config, visit, warnings: Vec::new() }
    }

    fn object(&mut self, object: &mut Value) {
        let kind = text(object, "/kind").unwrap_or("").to_owned();
        if kind == "List" {
            if let Some(items) = object.pointer_mut("/items").and_then(Value::as_array_mut) {
                items.iter_mut().for_each(|item| self.object(item));
            }
            return;
        }
        let group = text(object, "/apiVersion").unwrap_or("").split_once('/').map_or("", |(group, _)| group);
        let path = match (group, kind.as_str()) {
            ("", "Pod") => Some(""),
            ("", "PodTemplate") => Some("/template"),
            ("", "ReplicationController")
            | ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
            | ("batch", "Job") => Some("/spec/template"),
            ("batch", "CronJob") => Some("/spec/jobTemplate/spec/template"),
            _ => None,
        };
        let namespace = text(object, "/metadata/namespace").unwrap_or(self.namespace).to_owned();
        let name = text(object, "/metadata/name")
            .or(text(object, "/metadata/generateName"))
            .unwrap_or("?")
            .to_owned();
        let shown = format!("{kind} {namespace}/{name}");
        let named = PodName { object: &name, namespace: &namespace, shown: &shown };
        // Another kind: search for pod templates by their structure.
        let Some(path) = path else { return self.search(object, "", named) };
        if !path.is_empty()
            && let Some(annotation) = self.annotation_of(object)
        {
            self.misplaced(&shown, "", &annotation);
        }
        if let Some(pod) = object.pointer_mut(path) {
            (self.visit)(pod, named);
        }
    }

    /// Visits every object with the annotation and containers, at any depth. `path` is the path of `value`.
    fn search(&mut self, value: &mut Value, path: &str, named: PodName<'_>) {
        if let Some(annotation) = self.annotation_of(value) {
            if value.pointer("/spec/containers").is_some_and(Value::is_array) {
                let shown =
                    if path.is_empty() { named.shown.to_owned() } else { format!("{}, {path}", named.shown) };
                return (self.visit)(value, PodName { shown: &shown, ..named });
            }
            self.misplaced(named.shown, path, &annotation);
        }
        let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        match value {
            Value::Object(map) => {
                for (key, inner) in map {
                    self.search(inner, &below(key), named);
                }
            }
            Value::Array(list) => {
                for (at, inner) in list.iter_mut().enumerate() {
                    self.search(inner, &format!("{path}[{at}]"), named);
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
fn parse(number: usize, text: &str) -> Result<Value, ManifestError> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        legacy_octal_numbers: true,
        emit_comments: false,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| show_yaml_error(&format!("document {number}"), text, &error))
        .map_err(|why| ManifestError::Yaml { document: number, why })
}

fn yaml(number: usize, value: &Value) -> Result<String, ManifestError> {
    serde_saphyr::to_string(value)
        .map_err(|error| ManifestError::Yaml { document: number, why: error.to_string() })
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
