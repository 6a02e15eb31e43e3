//! The opaque configuration of a claim. It is refused for every unknown key and every value that cannot be honoured.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use shmesh::config::{MAX_LINKS, Scope, pod_links};

use crate::config::{Problem, UserNamespaces, check_mount_path, conform};

/// API version and kind of the configuration.
const API_VERSION: &str = "shmesh.io/v1alpha1";
const KIND: &str = "DomainConfig";
/// Deeper values than this have no meaning here.
const MAX_DEPTH: usize = 16;
/// Maximum length of a refusal, which becomes the note of a Kubernetes Event.
const MAX_TEXT: usize = 700;

/// The keys of the configuration.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DomainKeys {
    api_version: String,
    kind: String,
    #[serde(default)]
    links: Vec<Value>,
    #[serde(default = "default_mount_path")]
    mount_path: PathBuf,
    #[serde(default)]
    user_namespaces: UserNamespaces,
}

fn default_mount_path() -> PathBuf {
    shmesh::DEFAULT_DIR.into()
}

/// How the containers of a claim get its directory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct DomainConfig {
    /// Mount path in containers.
    pub(crate) mount_path: PathBuf,
    /// Whether the pods of the claim have user namespaces.
    pub(crate) has_user_namespaces: bool,
    /// Bytes that the listed links need.
    pub(crate) link_bytes: u64,
}

impl Default for DomainConfig {
    fn default() -> Self {
        Self { mount_path: default_mount_path(), has_user_namespaces: false, link_bytes: 0 }
    }
}

impl DomainConfig {
    /// Reads the parameters of a claim or a device class. The error lists every mistake with the path of its key.
    pub(crate) fn parse(parameters: &Value) -> Result<Self, String> {
        if is_deeper_than(parameters, MAX_DEPTH) {
            return Err(format!("it nests more than {MAX_DEPTH} levels deep; write the keys of a {KIND}"));
        }
        let mut document = parameters.clone();
        let schema = schemars::schema_for!(DomainKeys);
        let mut problems = conform(&mut document, schema.as_value());
        let keys = match serde_json::from_value::<DomainKeys>(document) {
            Ok(keys) => keys,
            Err(error) if problems.is_empty() => return Err(error.to_string()),
            Err(_) => return Err(shown(&problems)),
        };
        let mut say = |path: &str, what: String| problems.push(Problem { path: path.into(), what });
        if (keys.api_version.as_str(), keys.kind.as_str()) != (API_VERSION, KIND) {
            say("apiVersion", format!("this driver reads apiVersion {API_VERSION} with kind {KIND}"));
        }
        if let Err(what) = check_mount_path(&keys.mount_path) {
            say("mountPath", what);
        }
        if keys.user_namespaces == UserNamespaces::Mixed {
            say(
                "userNamespaces",
                "the mount of a claim works with or without user namespaces, not both; write never or always"
                    .into(),
            );
        }
        let mut link_bytes = 0;
        if !keys.links.is_empty() {
            match bytes_of_links(&keys.links) {
                Ok(bytes) => link_bytes = bytes,
                Err(problem) => problems.push(problem),
            }
        }
        if !problems.is_empty() {
            return Err(shown(&problems));
        }
        let has_user_namespaces = keys.user_namespaces == UserNamespaces::Always;
        Ok(Self { mount_path: keys.mount_path, has_user_namespaces, link_bytes })
    }
}

/// Returns the bytes of all links, which the annotation's parser reads.
fn bytes_of_links(links: &[Value]) -> Result<u64, Problem> {
    if links.len() > MAX_LINKS {
        let what = format!("has {} links; the maximum is {MAX_LINKS}", links.len());
        return Err(Problem { path: "links".into(), what });
    }
    let mut text = LineText::default();
    text.list("links", links);
    let links = pod_links(&text.text).map_err(|error| {
        let line = error.location().and_then(|(line, _)| usize::try_from(line).ok()).unwrap_or(0);
        let path = line.checked_sub(1).and_then(|line| text.paths.get(line)).map_or("links", String::as_str);
        // Paths replace the positions in the printed text.
        let what = without_positions(&error.to_string());
        Problem { path: path.to_owned(), what }
    })?;
    for (at, link) in links.iter().enumerate() {
        if matches!(link.scope, Scope::Pool(_)) {
            let what = "the links of a claim are in the claim's directory; remove the key";
            return Err(Problem { path: format!("links[{at}].scope"), what: what.into() });
        }
    }
    Ok(links.iter().fold(0, |sum: u64, link| sum.saturating_add(link.config.segment_bytes())))
}

/// Removes every ` (line 1, column 2)`.
fn without_positions(text: &str) -> String {
    let mut parts = text.split(" (line ");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once(')').map_or("", |(_, rest)| rest))
}

/// A JSON value as text with at most one key or element per line, and the path of each line: the parser reports
/// lines, and a claim is written in another form than this text.
#[derive(Default)]
struct LineText {
    text: String,
    paths: Vec<String>,
}

impl LineText {
    fn line(&mut self, path: &str, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
        self.paths.push(path.to_owned());
    }

    fn list(&mut self, path: &str, values: &[Value]) {
        self.line(path, "[");
        for (at, value) in values.iter().enumerate() {
            self.value(&format!("{path}[{at}]"), "", value);
            self.line(path, ",");
        }
        self.line(path, "]");
    }

    fn value(&mut self, path: &str, key: &str, value: &Value) {
        match value {
            Value::Object(map) => {
                self.line(path, &format!("{key}{{"));
                for (name, value) in map {
                    // Quoted, as JSON does it.
                    let quoted = format!("{}: ", Value::from(name.as_str()));
                    self.value(&format!("{path}.{name}"), &quoted, value);
                    self.line(path, ",");
                }
                self.line(path, "}");
            }
            Value::Array(values) => {
                if !key.is_empty() {
                    self.line(path, key);
                }
                self.list(path, values);
            }
            scalar => self.line(path, &format!("{key}{scalar}")),
        }
    }
}

/// Whether a value nests deeper, without recursion.
fn is_deeper_than(value: &Value, limit: usize) -> bool {
    let mut level = vec![value];
    for _ in 0..=limit {
        let mut below = Vec::new();
        for value in level {
            match value {
                Value::Array(values) => below.extend(values),
                Value::Object(map) => below.extend(map.values()),
                _ => {}
            }
        }
        level = below;
    }
    !level.is_empty()
}

fn shown(problems: &[Problem]) -> String {
    let text = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    match text.char_indices().nth(MAX_TEXT) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(more: Value) -> Result<DomainConfig, String> {
        let mut all = json!({"apiVersion": API_VERSION, "kind": KIND});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        DomainConfig::parse(&all)
    }

    /// The links in what `shmesh-plugin claim` prints need the bytes that it requests.
    #[test]
    fn printed_claims_are_accepted() {
        use shmesh_injector::{Bytes, ClaimKind, Config, claims, manifest::OutputFormat};
        let pod = "kind: Pod\nmetadata:\n  name: du\n  annotations:\n    shmesh.io/links: |\n      \
                   - {name: a, ring: {len: 64}, memory: {file_mode: 0660, huge_pages: off}}\n      \
                   - {name: b, scope: claim/du, side: primary, containers: [x], backing: memfd}\n\
                   spec: {hostUsers: false, containers: [{name: x}]}\n";
        let (text, _) =
            claims(pod, "default", None, &Config::default(), ClaimKind::Claim, OutputFormat::Json).unwrap();
        let devices = serde_json::from_str::<Value>(&text).unwrap()["spec"]["devices"].take();
        let parsed = DomainConfig::parse(&devices["config"][0]["opaque"]["parameters"]).unwrap();
        let asked = &devices["requests"][0]["exactly"]["capacity"]["requests"]["bytes"];
        let Bytes(asked) = asked.as_str().unwrap().parse().unwrap();
        assert_eq!(parsed.link_bytes.next_multiple_of(super::super::slice::STEP_BYTES), asked);
        assert!(parsed.has_user_namespaces && parsed.link_bytes > 0);
    }

    #[test]
    fn defaults_and_all_keys_are_read() {
        assert_eq!(config(json!({})).unwrap(), DomainConfig::default());
        let links = json!([{"name": "a", "ring": {"len": 64}}, {"name": "b"}]);
        let all = json!({"links": links, "mountPath": "/ipc", "userNamespaces": "always"});
        let read = config(all).unwrap();
        assert_eq!((read.mount_path, read.has_user_namespaces), ("/ipc".into(), true));
        let listed = pod_links("- name: a\n  ring: {len: 64}\n- name: b\n").unwrap();
        let bytes: u64 = listed.iter().map(|link| link.config.segment_bytes()).sum();
        assert_eq!(read.link_bytes, bytes);
        assert!(bytes > 0);
    }

    #[test]
    fn every_mistake_is_named_by_its_key() {
        for (more, path) in [
            (json!({"extra": 1}), "extra: is not a known key"),
            (json!({"kind": "Other"}), "apiVersion: this driver reads"),
            (json!({"apiVersion": "shmesh.io/v9"}), "apiVersion: this driver reads"),
            (json!({"mountPath": "dev/shm"}), "mountPath: "),
            (json!({"mountPath": "/proc/x"}), "mountPath: "),
            (json!({"mountPath": 7}), "mountPath: 7 is not a valid string"),
            (json!({"userNamespaces": "mixed"}), "userNamespaces: "),
            (json!({"links": {}}), "links: "),
            (json!({"links": [7]}), "links[0]: "),
            (json!({"links": [{"name": "a"}, {"nme": "b"}]}), "links[1].nme: unknown key"),
            (json!({"links": [{"name": "a"}, {"ring": {}}]}), "links[1].ring: key \"name\" is missing"),
            (json!({"links": [{"name": "a", "ring": {"len": 0}}]}), "links[0].ring.len: "),
            (
                json!({"links": [{"name": "a", "pools": {"cpu_data": {"pool_len": -1}}}]}),
                "links[0].pools.cpu_data.pool_len: ",
            ),
            (json!({"links": [{"name": "a/b"}]}), "links[0].name: "),
            (
                json!({"links": [{"name": "a", "scope": "pool/x", "side": "primary"}]}),
                "links[0].scope: the links of a claim",
            ),
            (json!({"links": [{"name": "a"}, {"name": "a"}]}), "links[1]"),
        ] {
            let said = config(more.clone()).unwrap_err();
            assert!(said.starts_with(path), "{more}: {said:?} begins with {path:?}");
            assert!(!said.contains("(line"), "{said}");
        }
        // All of them at once.
        let said = config(json!({"extra": 1, "mountPath": "x", "links": [{"name": ""}]})).unwrap_err();
        assert!(["extra: ", "mountPath: ", "links[0]"].iter().all(|part| said.contains(part)), "{said}");
    }

    #[test]
    fn values_that_are_not_objects_are_refused() {
        for value in [json!(null), json!([]), json!("text"), json!(7), json!({})] {
            assert!(DomainConfig::parse(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn deep_and_long_values_are_refused_with_a_short_text() {
        let mut deep = json!(1);
        for _ in 0..120 {
            deep = json!([deep]);
        }
        let said = config(json!({"links": [{"name": "a", "ring": deep.clone()}]})).unwrap_err();
        assert!(said.contains("more than 16 levels"), "{said}");
        let wide: Vec<_> = (0..400).map(|at| (format!("key{at}"), json!(at))).collect();
        let said = config(Value::Object(wide.into_iter().collect())).unwrap_err();
        assert!(said.chars().count() <= MAX_TEXT + 1, "{}", said.len());
    }
}
