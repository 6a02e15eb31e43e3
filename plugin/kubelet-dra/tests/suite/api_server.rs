//! A small API server: nodes, claims and slices over HTTP, with watches and server-side apply by one manager.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

#[derive(Default)]
struct Store {
    version: u64,
    /// Each object by its path.
    objects: BTreeMap<String, Value>,
    events: Vec<(u64, &'static str, Value)>,
    /// The oldest version from which a watch can go on; 0 for all.
    oldest: u64,
    requests: Vec<String>,
    failures: VecDeque<u16>,
    /// A field of devices that the server does not know.
    dropped: Option<&'static str>,
}

/// The server, as long as its runtime lives.
#[derive(Clone)]
pub(crate) struct ApiServer {
    store: Arc<Mutex<Store>>,
    changes: watch::Sender<u64>,
    url: String,
}

impl ApiServer {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("it has one"));
        let server = Self { store: Arc::default(), changes: watch::Sender::new(0), url };
        let router = Router::new().fallback(handle).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        server.put_node("node-uid-1");
        server
    }

    pub(crate) fn client(&self) -> Client {
        Client::try_from(Config::new(self.url.parse().expect("a valid URL"))).expect("a client")
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().expect("no test panicked")
    }

    pub(crate) fn put_node(&self, uid: &str) {
        self.put(
            "/api/v1/nodes/n1",
            json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n1", "uid": uid}}),
        );
    }

    pub(crate) fn put(&self, path: &str, mut object: Value) {
        let mut store = self.store();
        store.version += 1;
        object["metadata"]["resourceVersion"] = json!(store.version.to_string());
        let kind = if store.objects.contains_key(path) { "MODIFIED" } else { "ADDED" };
        store.objects.insert(path.into(), object.clone());
        let version = store.version;
        store.events.push((version, kind, object));
        drop(store);
        self.changes.send_replace(version);
    }

    pub(crate) fn remove(&self, path: &str) -> Option<Value> {
        self.remove_all(|found| found == path).pop()
    }

    /// All at once: watches see all of it or nothing.
    fn remove_all(&self, matches: impl Fn(&str) -> bool) -> Vec<Value> {
        let mut store = self.store();
        let paths: Vec<String> = store.objects.keys().filter(|path| matches(path)).cloned().collect();
        let mut removed = Vec::new();
        for path in paths {
            let mut object = store.objects.remove(&path).expect("it was listed");
            store.version += 1;
            object["metadata"]["resourceVersion"] = json!(store.version.to_string());
            let version = store.version;
            store.events.push((version, "DELETED", object.clone()));
            removed.push(object);
        }
        let version = store.version;
        drop(store);
        self.changes.send_replace(version);
        removed
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.store().objects.get(path).cloned()
    }

    /// All slices, in the order of their names.
    pub(crate) fn slices(&self) -> Vec<Value> {
        self.store()
            .objects
            .iter()
            .filter(|(path, _)| path.starts_with(SLICES))
            .map(|(_, slice)| slice.clone())
            .collect()
    }

    /// As the kubelet does it at its start.
    pub(crate) fn wipe(&self) {
        self.remove_all(|path| path.starts_with(SLICES));
    }

    /// As a person does it.
    pub(crate) fn edit(&self, mut slice: Value, change: impl FnOnce(&mut Value)) {
        change(&mut slice);
        self.put(&path_of(&slice), slice);
    }

    /// Forgets the changes so far: watches that go on from them end with 410.
    pub(crate) fn compact(&self) {
        let mut store = self.store();
        store.oldest = store.version + 1;
    }

    /// The next requests fail with these codes.
    pub(crate) fn fail_next(&self, codes: &[u16]) {
        self.store().failures.extend(codes);
    }

    pub(crate) fn drop_field(&self, name: &'static str) {
        self.store().dropped = Some(name);
    }

    /// How many requests were made: by their method, or `LIST` and `WATCH` of slices.
    pub(crate) fn count(&self, verb: &str) -> usize {
        self.store().requests.iter().filter(|found| *found == verb).count()
    }

    fn apply(&self, path: &str, mut object: Value) -> (StatusCode, Value) {
        let name = path.rsplit('/').next().unwrap_or_default().to_owned();
        let (found, dropped) = (self.get(path), self.store().dropped);
        let uid =
            found.as_ref().map_or(json!(format!("uid-of-{name}")), |found| found["metadata"]["uid"].clone());
        if object["metadata"]["uid"].as_str().is_some_and(|wanted| json!(wanted) != uid) {
            return failure(409, &format!("Operation cannot be fulfilled: uid mismatch for {name}"));
        }
        object["metadata"]["uid"] = uid;
        // Fields of others stay.
        for (key, value) in found.iter().filter_map(|found| found["spec"].as_object()).flatten() {
            if object["spec"].get(key).is_none() {
                object["spec"][key] = value.clone();
            }
        }
        for device in object["spec"]["devices"].as_array_mut().into_iter().flatten() {
            if let (Some(field), Some(device)) = (dropped, device.as_object_mut()) {
                device.remove(field);
            }
            // The form in which the server writes quantities.
            if let Some(value) =
                device.pointer_mut("/capacity/bytes/value").filter(|value| **value == "1024Mi")
            {
                *value = json!("1Gi");
            }
        }
        self.put(path, object);
        (StatusCode::OK, self.get(path).expect("it was put"))
    }
}

pub(crate) fn path_of(slice: &Value) -> String {
    format!("{SLICES}/{}", slice["metadata"]["name"].as_str().expect("a name"))
}

fn failure(code: u16, message: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": if code == 404 { "NotFound" } else { "" }});
    (StatusCode::from_u16(code).expect("a valid code"), status)
}

fn answer((code, value): (StatusCode, Value)) -> Response {
    let body = Body::from(value.to_string());
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(body)
        .expect("it is valid")
}

/// The value of a parameter. The client encodes only `=` and `,` in those of the tests.
fn parameter(query: &str, name: &str) -> Option<String> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.replace("%3D", "=").replace("%2C", ","))
}

async fn handle(
    State(server): State<ApiServer>,
    method: Method,
    uri: Uri,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Response {
    let (path, query) = (uri.path().to_owned(), query.unwrap_or_default());
    let failing = {
        let mut store = server.store();
        let verb = match (method.as_str(), path == SLICES) {
            ("GET", true) => {
                if query.contains("watch=") {
                    "WATCH"
                } else {
                    "LIST"
                }
            }
            (verb, _) => verb,
        };
        store.requests.push(verb.to_owned());
        store.failures.pop_front()
    };
    if let Some(code) = failing {
        return answer(failure(code, "the server is not well"));
    }
    let missing = || failure(404, &format!("\"{path}\" not found"));
    match method.as_str() {
        "GET" if path == SLICES => {
            let selector = parameter(&query, "fieldSelector").unwrap_or_default();
            let version = parameter(&query, "resourceVersion").and_then(|version| version.parse().ok());
            if query.contains("watch=") {
                return server.watch(selector, version.unwrap_or(0));
            }
            let items: Vec<_> =
                server.slices().into_iter().filter(|slice| matches(slice, &selector)).collect();
            let version = server.store().version.to_string();
            let list = json!({
                "kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1",
                "metadata": {"resourceVersion": version}, "items": items,
            });
            answer((StatusCode::OK, list))
        }
        "GET" => answer(server.get(&path).map_or_else(missing, |found| (StatusCode::OK, found))),
        "PATCH" => {
            let object: Value = serde_json::from_slice(&body).expect("JSON");
            let target = path.strip_suffix("/status").unwrap_or(&path);
            if target != path && server.get(target).is_none() {
                return answer(missing());
            }
            assert!(
                query.contains("fieldManager=gpu.example.com") && query.contains("force=true"),
                "{query}"
            );
            answer(server.apply(target, object))
        }
        "DELETE" => {
            let options: Value = serde_json::from_slice(&body).unwrap_or_default();
            let uid = options.pointer("/preconditions/uid").cloned();
            match server.get(&path) {
                Some(found) if uid.is_some_and(|uid| uid != found["metadata"]["uid"]) => {
                    answer(failure(409, "uid"))
                }
                _ => answer(server.remove(&path).map_or_else(missing, |found| (StatusCode::OK, found))),
            }
        }
        _ => answer(failure(405, "method")),
    }
}

fn matches(slice: &Value, selector: &str) -> bool {
    selector.split(',').all(|part| match part.split_once('=') {
        Some((path, value)) => slice.pointer(&format!("/{}", path.replace('.', "/"))) == Some(&json!(value)),
        None => false,
    })
}

impl ApiServer {
    fn watch(&self, selector: String, mut version: u64) -> Response {
        let (to, lines) = mpsc::channel::<Result<String, Infallible>>(16);
        let (server, mut changes) = (self.clone(), self.changes.subscribe());
        tokio::spawn(async move {
            loop {
                changes.borrow_and_update();
                let news: Vec<_> = {
                    let store = server.store();
                    if version < store.oldest {
                        let (_, status) = failure(410, "too old resource version");
                        vec![json!({"type": "ERROR", "object": status})]
                    } else {
                        let news = store.events.iter().filter(|(when, ..)| *when > version);
                        let news = news.filter(|(_, _, object)| matches(object, &selector));
                        let news =
                            news.map(|(_, kind, object)| json!({"type": kind, "object": object})).collect();
                        version = store.version;
                        news
                    }
                };
                for event in news {
                    let is_over = event["type"] == "ERROR";
                    if to.send(Ok(format!("{event}\n"))).await.is_err() || is_over {
                        return;
                    }
                }
                tokio::select! {
                    _ = changes.changed() => {}
                    () = to.closed() => return,
                }
            }
        });
        Response::new(Body::from_stream(ReceiverStream::new(lines)))
    }
}
