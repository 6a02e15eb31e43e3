//! Answers, watches, and connections.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use http::{Response, StatusCode};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use super::ApiServer;
use super::errors::ApiError;
use super::kinds::Kind;
use super::request::{Request, Verb};
use super::select::Selection;
use super::store::{Patch, Writer};

/// How often a watch that allows bookmarks gets one.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);
/// How long a watch lasts if the client sets no limit; the server adds up to as much again at random.
const WATCH_LIMIT: Duration = Duration::from_secs(1800);
/// The limit of etcd for one request.
const BODY_BYTES_MAX: usize = 3 << 19;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of an answer: all of it, or the lines of a watch as they come.
#[derive(Debug)]
pub(super) enum Answer {
    Whole(Option<Bytes>),
    Lines(mpsc::Receiver<Bytes>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = |bytes| Ok(Frame::data(bytes));
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(frame)),
            Self::Lines(lines) => lines.poll_recv(cx).map(|line| line.map(frame)),
        }
    }
}

fn answer(code: u16, value: &Value) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Some(value.to_string().into())));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl ApiServer {
    /// Serves one connection until it ends or the server is stopped.
    pub(super) fn serve(&self, socket: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let Some(outage) = self.outage().clone() else { return };
        let server = self.clone();
        tokio::spawn(async move {
            let ended = outage.clone();
            let service = service_fn(move |request| {
                let (server, ended) = (server.clone(), ended.clone());
                async move { Ok::<_, Infallible>(server.respond(request, ended).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new();
            let connection = connection.serve_connection(TokioIo::new(socket), service);
            let _ = outage.run_until_cancelled(connection).await;
        });
    }

    async fn respond(&self, request: http::Request<Incoming>, outage: CancellationToken) -> Response<Answer> {
        let result = self.handle(request, outage).await;
        result.unwrap_or_else(|error| answer(error.code, &error.status()))
    }

    async fn handle(
        &self,
        request: http::Request<Incoming>,
        outage: CancellationToken,
    ) -> Result<Response<Answer>, ApiError> {
        let (head, body) = request.into_parts();
        match head.uri.path() {
            "/version" => {
                let version = json!({
                    "major": "1", "minor": "36", "gitVersion": "v1.36.2", "gitCommit": "", "gitTreeState": "clean",
                    "buildDate": "2026-06-01T00:00:00Z", "goVersion": "go1.26", "compiler": "gc",
                    "platform": "linux/amd64",
                });
                return Ok(answer(200, &version));
            }
            "/livez" | "/readyz" => return Ok(answer(200, &json!("ok"))),
            _ => {}
        }
        let request = Request::parse(&head.method, &head.uri)?;
        let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let agent = header(USER_AGENT).split('/').next().unwrap_or_default().to_owned();
        let resource = match &request.subresource {
            None => request.kind.plural.to_owned(),
            Some(subresource) => format!("{}/{subresource}", request.kind.plural),
        };
        self.admit(&agent, request.verb, &resource)?;
        let body = collected(body).await?;
        let json = |body: &[u8]| {
            serde_json::from_slice(body).map_err(|error| {
                let message = format!("the object provided is unrecognized: {error}");
                ApiError::bad_request(message)
            })
        };
        let manager = request.param("fieldManager").unwrap_or(&agent).to_owned();
        let writer = Writer {
            manager,
            subresource: request.subresource.clone(),
            force: request.flag("force"),
            dry_run: request.param("dryRun").is_some(),
        };
        let kind = request.kind;
        let namespace = request.namespace.clone().unwrap_or_default();
        let name = request.name.clone().unwrap_or_default();
        let (fields, labels) = (request.param("fieldSelector"), request.param("labelSelector"));
        let selection = Selection::parse(kind, request.namespace.as_deref(), fields, labels)?;
        let value = match request.verb {
            Verb::Get => self.store().get(kind, &namespace, &name)?,
            Verb::List => self.collection(&request, &selection)?,
            Verb::Watch => return self.watch(&request, selection, outage),
            Verb::Create => {
                let value = json(&body)?;
                let created = self.change(|store| store.create(kind, &namespace, value, &writer))?;
                return Ok(answer(201, &created));
            }
            Verb::Update => {
                let value = json(&body)?;
                self.change(|store| store.update(kind, &namespace, &name, value, &writer))?
            }
            Verb::Patch => {
                let patch = match header(CONTENT_TYPE).split(';').next().unwrap_or_default() {
                    "application/apply-patch+yaml" => Patch::Apply,
                    "application/merge-patch+json" => Patch::Merge,
                    "application/json-patch+json" => Patch::Json,
                    other => {
                        let message = format!("the body of the request was in an unknown format: {other}");
                        return Err(ApiError::new(415, "UnsupportedMediaType", message));
                    }
                };
                let body: Value = json(&body)?;
                self.change(|store| store.patch(kind, &namespace, &name, (patch, &body), &writer))?
            }
            Verb::Delete => {
                let options: Value = if body.is_empty() { Value::Null } else { json(&body)? };
                self.change(|store| store.delete(kind, &namespace, &name, &options["preconditions"]))?
            }
            Verb::DeleteCollection => {
                let items = self.change(|store| store.delete_collection(kind, &selection));
                list_of(kind, self.store().version(), items, Value::Null)
            }
        };
        Ok(answer(200, &value))
    }

    fn collection(&self, request: &Request, selection: &Selection) -> Result<Value, ApiError> {
        let limit = request.number("limit")?.filter(|limit| *limit > 0);
        let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let after = request.param("continue").map(|token| {
            let (namespace, name) = token.split_once('/').unwrap_or(("", token));
            (namespace.to_owned(), name.to_owned())
        });
        let store = self.store();
        let mut found = store.list(request.kind, selection, after);
        let page: Vec<_> = found.by_ref().take(limit).collect();
        let more = found.next().is_some();
        let token =
            page.last().filter(|_| more).map(|((namespace, name), _)| json!(format!("{namespace}/{name}")));
        let items = page.into_iter().map(|(_, value)| value.clone()).collect();
        Ok(list_of(request.kind, store.version(), items, token.unwrap_or_default()))
    }

    fn watch(
        &self,
        request: &Request,
        selection: Selection,
        outage: CancellationToken,
    ) -> Result<Response<Answer>, ApiError> {
        let kind = request.kind;
        let from = request.number("resourceVersion")?.filter(|version| *version > 0);
        let bookmarks = request.flag("allowWatchBookmarks");
        let initial = request.flag("sendInitialEvents");
        let limit = request.number("timeoutSeconds")?.map_or(WATCH_LIMIT, Duration::from_secs);
        let (lines, receiver) = mpsc::channel(64);
        let server = self.clone();
        let mut changes = self.0.changes.subscribe();
        let follow = async move {
            let send = |kind: &str, object: &Value| {
                let line = format!("{}\n", json!({"type": kind, "object": object}));
                let lines = lines.clone();
                async move { lines.send(line.into()).await.is_ok() }
            };
            let mut version = match from.filter(|_| !initial) {
                Some(version) => version,
                None => {
                    let (version, objects) = {
                        let store = server.store();
                        let objects: Vec<Value> =
                            store.list(kind, &selection, None).map(|(_, value)| value.clone()).collect();
                        (store.version(), objects)
                    };
                    for object in &objects {
                        send("ADDED", object).await;
                    }
                    if initial && bookmarks {
                        let ended = json!({"k8s.io/initial-events-end": "true"});
                        send("BOOKMARK", &bookmark(kind, version, &ended)).await;
                    }
                    version
                }
            };
            let mut tick = Box::pin(server.0.clock.sleep(BOOKMARK_PERIOD));
            loop {
                changes.mark_unchanged();
                let (seen, events) = {
                    let store = server.store();
                    let events: Result<Vec<_>, _> = store.since(version).map(|changes| {
                        changes
                            .filter(|change| change.kind == kind)
                            .filter_map(|c| event(&selection, c))
                            .collect()
                    });
                    (store.version(), events)
                };
                match events {
                    Err(error) => {
                        send("ERROR", &error.status()).await;
                        return;
                    }
                    Ok(events) => {
                        for (kind, object) in events {
                            if !send(kind, &object).await {
                                return;
                            }
                        }
                    }
                }
                version = version.max(seen);
                tokio::select! {
                    changed = changes.changed() => if changed.is_err() { return },
                    () = lines.closed() => return,
                    () = &mut tick => {
                        tick = Box::pin(server.0.clock.sleep(BOOKMARK_PERIOD));
                        if bookmarks && !send("BOOKMARK", &bookmark(kind, version, &Value::Null)).await {
                            return;
                        }
                    }
                }
            }
        };
        let clock = self.0.clock.clone();
        tokio::spawn(async move {
            let _ = outage.run_until_cancelled(clock.timeout(limit, follow)).await;
        });
        let mut response = Response::new(Answer::Lines(receiver));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }
}

/// Returns what a change is for a client that sees the selected objects only.
fn event(selection: &Selection, change: &super::store::Change) -> Option<(&'static str, Value)> {
    let selected = |object: &&Value| selection.matches(object);
    let before = change.before.as_ref().filter(selected);
    match (before, change.after.as_ref().filter(selected)) {
        (None, Some(after)) => Some(("ADDED", after.clone())),
        (Some(_), Some(after)) => Some(("MODIFIED", after.clone())),
        (Some(before), None) => {
            let mut last = before.clone();
            last["metadata"]["resourceVersion"] = Value::String(change.version.to_string());
            Some(("DELETED", last))
        }
        (None, None) => None,
    }
}

fn bookmark(kind: &Kind, version: u64, annotations: &Value) -> Value {
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if annotations.is_object() {
        metadata["annotations"] = annotations.clone();
    }
    json!({"apiVersion": kind.api_version(), "kind": kind.kind, "metadata": metadata})
}

fn list_of(kind: &Kind, version: u64, items: Vec<Value>, token: Value) -> Value {
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if token.is_string() {
        metadata["continue"] = token;
    }
    let list_kind = format!("{}List", kind.kind);
    json!({"apiVersion": kind.api_version(), "kind": list_kind, "metadata": metadata, "items": items})
}

async fn collected(mut body: Incoming) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame = frame.map_err(|error| ApiError::bad_request(error.to_string()))?;
        if let Ok(data) = frame.into_data() {
            bytes.extend(data);
        }
        if bytes.len() > BODY_BYTES_MAX {
            let message = format!("limit of request body is {BODY_BYTES_MAX} bytes");
            return Err(ApiError::new(413, "RequestEntityTooLarge", message));
        }
    }
    Ok(bytes)
}

/// Connects to a server in memory: one connection for each request.
#[derive(Clone, Debug)]
pub(super) struct InMemory {
    server: ApiServer,
    agent: HeaderValue,
}

impl InMemory {
    pub(super) fn new(server: ApiServer, agent: &str) -> Self {
        let agent = HeaderValue::from_str(agent).unwrap_or(HeaderValue::from_static("unnamed"));
        Self { server, agent }
    }
}

impl Service<http::Request<kube::client::Body>> for InMemory {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<kube::client::Body>) -> Self::Future {
        let Self { server, agent } = self.clone();
        request.headers_mut().entry(USER_AGENT).or_insert(agent);
        request.headers_mut().insert(HOST, HeaderValue::from_static("kubernetes"));
        Box::pin(async move {
            if server.outage().is_none() {
                let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
                return Err(refused.into());
            }
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            server.serve(theirs);
            let (mut requests, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(ours)).await?;
            tokio::spawn(async move {
                let _ = connection.await;
            });
            Ok(requests.send_request(request).await?)
        })
    }
}
