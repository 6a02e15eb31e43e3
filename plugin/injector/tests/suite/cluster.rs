//! The store in a cluster, against an API server that has only what matters: versions, conflicts, 404.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use axum::body::to_bytes;
use axum::http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use shmesh_injector::certificate::{CertResolver, CertRotator, CertStore, KubeStore, make};

const SECRET: &str = "/api/v1/namespaces/shmesh/secrets/tls";
const WEBHOOK: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/injector";
const LIFE: Duration = Duration::from_secs(86_400);

/// Objects by path, each with its version, and how many were written.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<(BTreeMap<String, Value>, u64)>>);

impl Server {
    fn put(&self, path: &str, mut object: Value) -> Value {
        let mut inside = self.0.lock().unwrap();
        inside.1 += 1;
        object["metadata"]["resourceVersion"] = inside.1.to_string().into();
        inside.0.insert(path.to_owned(), object.clone());
        object
    }

    fn object(&self, path: &str) -> Option<Value> {
        self.0.lock().unwrap().0.get(path).cloned()
    }

    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (u16, Value) {
        let failed = |code: u16, reason: &str| {
            (
                code,
                json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason}),
            )
        };
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        match *method {
            Method::GET => self.object(path).map_or_else(|| failed(404, "NotFound"), |object| (200, object)),
            Method::PUT => match self.object(path) {
                None => failed(404, "NotFound"),
                Some(there)
                    if there["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] =>
                {
                    failed(409, "Conflict")
                }
                // The type of a Secret cannot be changed.
                Some(there) if there["type"] != body["type"] => failed(422, "Invalid"),
                Some(_) => (200, self.put(path, body)),
            },
            Method::POST => {
                let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
                match self.object(&path) {
                    Some(_) => failed(409, "AlreadyExists"),
                    None => (201, self.put(&path, body)),
                }
            }
            _ => failed(405, "MethodNotAllowed"),
        }
    }

    fn store(&self) -> KubeStore {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = to_bytes(axum::body::Body::new(body), 1 << 20).await.unwrap();
                let (code, object) = server.answer(&parts.method, parts.uri.path(), &body);
                let response = Response::builder().status(StatusCode::from_u16(code).unwrap());
                Ok::<_, Infallible>(response.body(Body::from(object.to_string().into_bytes())).unwrap())
            }
        });
        KubeStore::new(kube::Client::new(service, "shmesh"), "shmesh", "tls", "injector")
    }

    fn with_webhooks() -> Self {
        let server = Self::default();
        let webhook = |name: &str| {
            json!({
                "name": name, "sideEffects": "None", "admissionReviewVersions": ["v1"],
                "clientConfig": {"service": {"name": "injector", "namespace": "shmesh", "path": "/inject"}},
            })
        };
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "injector"}, "webhooks": [webhook("a.shmesh.io"), webhook("b.shmesh.io")],
        });
        server.put(WEBHOOK, configuration);
        server
    }
}

fn rotator(server: &Server) -> (CertRotator<KubeStore>, CertResolver) {
    let served = CertResolver::default();
    let rotator =
        CertRotator::new(server.store(), served.clone(), vec!["injector.shmesh.svc".to_owned()], LIFE);
    (rotator, served)
}

#[tokio::test]
async fn replicas_create_a_missing_secret() {
    let server = Server::with_webhooks();
    let ((mut a, of_a), (mut b, of_b)) = (rotator(&server), rotator(&server));
    let now = SystemTime::now();
    let (first, second) = tokio::join!(a.step(now), b.step(now));
    let made = usize::from(first.as_ref().unwrap().made) + usize::from(second.as_ref().unwrap().made);
    assert_eq!(made, 1, "they agree by the version");
    assert!(of_a.is_loaded() && of_b.is_loaded());
    let secret = server.object(SECRET).unwrap();
    assert_eq!(secret["type"], "kubernetes.io/tls");
    let authorities = &secret["data"]["ca.crt"];
    for webhook in server.object(WEBHOOK).unwrap()["webhooks"].as_array().unwrap() {
        assert_eq!(&webhook["clientConfig"]["caBundle"], authorities);
    }
    let written = server.0.lock().unwrap().1;
    assert!(!a.step(now).await.unwrap().published);
    assert_eq!(server.0.lock().unwrap().1, written, "nothing is written that is there");
}

#[tokio::test]
async fn empty_secret_is_filled_and_keeps_its_labels() {
    let server = Server::with_webhooks();
    let empty = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": {"name": "tls", "namespace": "shmesh", "labels": {"app": "shmesh"}},
    });
    server.put(SECRET, empty);
    let (mut rotator, _) = rotator(&server);
    assert!(rotator.step(SystemTime::now()).await.unwrap().made);
    let secret = server.object(SECRET).unwrap();
    assert_eq!((&secret["type"], &secret["metadata"]["labels"]["app"]), (&json!("Opaque"), &json!("shmesh")));
    assert_eq!(secret["data"].as_object().unwrap().len(), 4);
}

#[tokio::test]
async fn conflicting_secret_write_is_detected() {
    let server = Server::with_webhooks();
    let store = server.store();
    let bundle = make(&["injector.shmesh.svc".to_owned()], LIFE, SystemTime::now(), None).unwrap();
    let nothing = store.read().await.unwrap();
    assert!(store.write(&nothing, &bundle).await.unwrap());
    assert!(!store.write(&nothing, &bundle).await.unwrap(), "it is there already");
    let found = store.read().await.unwrap();
    assert_eq!(found.bundle.as_ref(), Some(&bundle));
    assert!(store.write(&found, &bundle).await.unwrap());
    assert!(!store.write(&found, &bundle).await.unwrap(), "another version by now");
}

#[tokio::test]
async fn missing_webhook_configuration_is_reported() {
    let server = Server::default();
    let (mut rotator, served) = rotator(&server);
    let error = format!("{:#}", rotator.step(SystemTime::now()).await.unwrap_err());
    assert!(error.contains("webhook configuration injector"), "{error}");
    assert!(served.is_loaded());
}
