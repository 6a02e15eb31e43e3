//! `AdmissionReview` requests and responses of the API server.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::Config;
use crate::inject::inject;

const VERSION: &str = "admission.k8s.io/v1";

/// The outcome of an admission request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The pod is patched.
    Injected,
    /// The pod requests no links, or was injected before.
    Unchanged,
    /// The pod is refused, with the reason as one word.
    Refused(&'static str),
}

impl Outcome {
    /// Returns the outcome as one word, for metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Injected => "injected",
            Self::Unchanged => "unchanged",
            Self::Refused(_) => "refused",
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewRequest {
    api_version: String,
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    kind: ObjectKind,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    object: Value,
}

#[derive(Deserialize)]
struct ObjectKind {
    #[serde(default)]
    group: String,
    kind: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: &'static str,
    kind: &'static str,
    response: AdmissionResponse,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionResponse {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Status {
    code: u16,
    reason: &'static str,
    message: String,
}

/// The API server truncates warnings at this length.
const WARNING_CHARS: usize = 256;

/// Maximum of [`memory_bytes`]: some 30,000 environment variables.
pub(crate) const MAX_MEMORY_BYTES: usize = 24 << 20;

/// Estimates the memory that a request takes when it is read, in bytes. Small values take far more in memory than in JSON.
pub(crate) fn memory_bytes(question: &[u8]) -> usize {
    let (mut is_string, mut is_escaped) = (false, false);
    let values = question.iter().map(|byte| {
        if is_string {
            is_string = is_escaped || *byte != b'"';
            is_escaped = !is_escaped && *byte == b'\\';
            return 0;
        }
        match byte {
            b'"' => is_string = true,
            // The first node of a map, the first four elements of an array, a key, and an element with room to grow.
            b'{' => return 640,
            b'[' => return 128,
            b':' => return 32,
            b',' => return 64,
            _ => {}
        }
        0
    });
    question.len() + values.sum::<usize>()
}

/// Answers one `AdmissionReview` request with a response.
///
/// # Errors
/// The request is invalid; the message can be returned to the client.
pub fn answer(question: &[u8], config: &Config) -> Result<(Outcome, Vec<u8>), String> {
    let ReviewRequest { api_version, request } =
        serde_json::from_slice(question).map_err(|error| format!("not a valid AdmissionReview: {error}"))?;
    if api_version != VERSION {
        return Err(format!("AdmissionReview has version {api_version:?}, but only {VERSION} is supported"));
    }
    let is_new_pod =
        request.kind.group.is_empty() && request.kind.kind == "Pod" && request.operation == "CREATE";
    let mut response = AdmissionResponse { uid: request.uid, allowed: true, ..AdmissionResponse::default() };
    let mut outcome = Outcome::Unchanged;
    if is_new_pod {
        match inject(&request.object, &request.namespace, config) {
            Ok(injected) => {
                let short = |warning: String| warning.chars().take(WARNING_CHARS).collect();
                response.warnings = injected.warnings.into_iter().map(short).collect();
                if !injected.operations.is_empty() {
                    outcome = Outcome::Injected;
                    response.patch_type = Some("JSONPatch");
                    response.patch = Some(STANDARD.encode(encoded(&injected.operations)?));
                }
            }
            Err(refusal) => {
                outcome = Outcome::Refused(refusal.reason);
                response.allowed = false;
                response.status = Some(Status { code: 422, reason: "Invalid", message: refusal.to_string() });
            }
        }
    }
    let review = Review { api_version: VERSION, kind: "AdmissionReview", response };
    Ok((outcome, encoded(&review)?))
}

fn encoded(value: &impl Serialize) -> Result<Vec<u8>, String> {
    serde_json::to_vec(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked(kind: &str, operation: &str, object: &Value) -> (Outcome, Value) {
        let question = json!({
            "apiVersion": VERSION, "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "kind": {"group": "", "version": "v1", "kind": kind}, "operation": operation,
                "namespace": "radio", "object": object, "unknown": {"a": 1},
            },
        });
        let (outcome, bytes) = answer(question.to_string().as_bytes(), &Config::default()).unwrap();
        (outcome, serde_json::from_slice(&bytes).unwrap())
    }

    fn pod(links: &str) -> Value {
        json!({
            "metadata": {"annotations": {"shmesh.io/links": links}},
            "spec": {"securityContext": {"runAsUser": 1000}, "containers": [{"name": "a"}]},
        })
    }

    #[test]
    fn patch_equals_injection() {
        let object = pod("- name: a\n");
        let (outcome, review) = asked("Pod", "CREATE", &object);
        assert_eq!(outcome, Outcome::Injected);
        let response = &review["response"];
        assert_eq!((&response["uid"], &response["allowed"]), (&json!("u-1"), &json!(true)));
        assert_eq!(
            (&review["kind"], &response["patchType"]),
            (&json!("AdmissionReview"), &json!("JSONPatch"))
        );
        let patch = STANDARD.decode(response["patch"].as_str().unwrap()).unwrap();
        let patch: json_patch::Patch = serde_json::from_slice(&patch).unwrap();
        let mut patched = object.clone();
        json_patch::patch(&mut patched, &patch).unwrap();
        assert_eq!(patched, inject(&object, "radio", &Config::default()).unwrap().pod);
    }

    #[test]
    fn other_requests_are_allowed_unchanged() {
        let plain = json!({"metadata": {}, "spec": {"containers": [{"name": "a"}]}});
        for (kind, operation, object) in [
            ("Pod", "CREATE", &plain),
            ("Pod", "UPDATE", &pod("- name: [")),
            ("Node", "CREATE", &pod("- name: [")),
        ] {
            let (outcome, review) = asked(kind, operation, object);
            assert_eq!(outcome, Outcome::Unchanged);
            assert_eq!(review["response"], json!({"uid": "u-1", "allowed": true}));
        }
    }

    #[test]
    fn refused_with_a_message() {
        let (outcome, review) =
            asked("Pod", "CREATE", &pod("- name: a\n  scope: pool/none\n  side: primary\n"));
        assert_eq!(outcome, Outcome::Refused("pool"));
        let status = &review["response"]["status"];
        assert_eq!(status["code"], 422);
        let message = status["message"].as_str().unwrap();
        assert!(
            message.contains("there is no pool \"none\"") && message.ends_with("(line 2, column 10)"),
            "{message}"
        );
    }

    #[test]
    fn invalid_reviews_are_errors() {
        for wrong in ["", "{}", "[]", r#"{"apiVersion":"admission.k8s.io/v1"}"#] {
            answer(wrong.as_bytes(), &Config::default()).unwrap_err();
        }
        let old = r#"{"apiVersion":"admission.k8s.io/v1beta1","request":{"uid":"","kind":{"kind":"Pod"}}}"#;
        assert!(answer(old.as_bytes(), &Config::default()).unwrap_err().contains("v1beta1"));
    }
}
