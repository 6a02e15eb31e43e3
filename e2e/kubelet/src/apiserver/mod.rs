//! A double of the API server: pods, nodes, events and the objects of dynamic resource allocation, over HTTP/1.1.
//!
//! | file | contents |
//! |---|---|
//! | `kinds.rs` | the kinds of objects |
//! | `request.rs` | paths and queries become verbs on resources |
//! | `store.rs` | objects, versions, and the log of changes |
//! | `validate.rs`, `errors.rs`, `select.rs` | checks, errors and selectors with the texts of Kubernetes |
//! | `apply.rs` | server-side apply: the manager of each field |
//! | `http.rs` | answers, watches, and connections |
//! | `allocate.rs`, `capacity.rs`, `classes.rs` | a small scheduler that allocates claims, and the controller that releases them |

mod allocate;
mod apply;
mod capacity;
mod classes;
mod errors;
mod http;
mod kinds;
mod request;
mod select;
mod store;
mod validate;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::Resource;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use kinds::Kind;
use select::Selection;
use store::{Store, Writer};

pub use errors::ApiError;
pub use request::Verb;

/// The date at which every clock starts: 1 January 2026.
const EPOCH_S: i64 = 1_767_225_600;

/// A request as it is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestKind {
    /// The product in the client's `User-Agent`; `kubelet` for the fake kubelet itself.
    pub agent: String,
    /// The verb of the request.
    pub verb: Verb,
    /// The resource in plural, with its subresource after a slash, such as `resourceclaims/status`.
    pub resource: String,
}

/// An error that the server gives to the next requests of a kind.
#[derive(Clone, Debug)]
struct Fault {
    verb: Verb,
    resource: String,
    error: ApiError,
    times: u32,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    store: Mutex<Store>,
    /// The version of the last change, for watches.
    changes: watch::Sender<u64>,
    counts: Mutex<BTreeMap<RequestKind, u64>>,
    faults: Mutex<Vec<Fault>>,
    /// Ends all connections; replaced when the server is up again.
    outage: Mutex<Option<CancellationToken>>,
}

/// A double of the API server. Clones are the same server.
#[derive(Clone, Debug)]
pub struct ApiServer(Arc<Shared>);

impl ApiServer {
    /// Creates a server without objects, which sends bookmarks and ends watches by `clock`.
    pub fn new(clock: Clock) -> Self {
        Self(Arc::new(Shared {
            store: Mutex::new(Store::new(date(clock.now()))),
            clock,
            changes: watch::Sender::new(1),
            counts: Mutex::default(),
            faults: Mutex::default(),
            outage: Mutex::new(Some(CancellationToken::new())),
        }))
    }

    /// Returns a client whose connections are in memory, so that they take no time of a paused clock. It names itself `agent`.
    pub fn client(&self, agent: &str) -> kube::Client {
        kube::Client::new(http::InMemory::new(self.clone(), agent), "default")
    }

    /// Serves on a free port of the loopback interface, for clients in other processes, as long as the runtime lives.
    pub async fn listen(&self) -> io::Result<SocketAddr> {
        let listener = tokio::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let server = self.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                server.serve(socket);
            }
        });
        Ok(address)
    }

    /// Returns the text of a kubeconfig for clients of the address that [`ApiServer::listen`] returned.
    pub fn kubeconfig(address: SocketAddr) -> String {
        format!(
            "{{apiVersion: v1, kind: Config, current-context: double, \
             clusters: [{{name: double, cluster: {{server: 'http://{address}'}}}}], \
             users: [{{name: double, user: {{}}}}], \
             contexts: [{{name: double, context: {{cluster: double, user: double, namespace: default}}}}]}}"
        )
    }

    /// Ends all connections and refuses new ones.
    pub fn stop(&self) {
        if let Some(up) = self.outage().take() {
            up.cancel();
        }
    }

    /// Accepts connections again after [`ApiServer::stop`].
    pub fn resume(&self) {
        self.outage().get_or_insert_default();
    }

    /// Forgets the log of changes: a watch that resumes from a version before now fails with 410 Gone.
    pub fn compact(&self) {
        self.store().compact();
    }

    /// Gives `times` requests with this verb and resource an error. The resource is written as in [`RequestKind`].
    pub fn fail(&self, verb: Verb, resource: &str, times: u32, error: ApiError) {
        let fault = Fault { verb, resource: resource.to_owned(), error, times };
        self.0.faults.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }

    /// Returns how many requests were made, by kind.
    pub fn requests(&self) -> BTreeMap<RequestKind, u64> {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how many of these requests were made.
    pub fn count(&self, which: impl Fn(&RequestKind) -> bool) -> u64 {
        self.requests().into_iter().filter(|(kind, _)| which(kind)).map(|(_, count)| count).sum()
    }

    /// Counts from zero again.
    pub fn clear_requests(&self) {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Creates an object, with its status if it has one. This is not counted, as all that the test itself does.
    pub fn create<K: Resource + Serialize + DeserializeOwned>(&self, object: &K) -> Result<K, ApiError> {
        let value = to_value(object)?;
        let namespace = value["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
        self.change(|store| {
            let kind = kind_of::<K>()?;
            let namespace = if kind.namespaced { namespace.as_str() } else { "" };
            let writer = Writer { manager: "test".to_owned(), ..Writer::default() };
            let created = store.create(kind, namespace, value.clone(), &writer)?;
            if !kind.status || value.get("status").is_none() {
                return Ok(created);
            }
            let name = created["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let writer = Writer { subresource: Some("status".to_owned()), ..writer };
            let status = serde_json::json!({"metadata": {}, "status": value["status"]});
            store.update(kind, namespace, &name, status, &writer)
        })
        .and_then(from_value)
    }

    /// Returns an object. `namespace` is empty for objects without one.
    pub fn get<K: Resource + DeserializeOwned>(&self, namespace: &str, name: &str) -> Option<K> {
        let value = self.store().get(kind_of::<K>().ok()?, namespace, name).ok()?;
        from_value(value).ok()
    }

    /// Returns all objects of a kind, ordered by namespace and name.
    pub fn list<K: Resource + DeserializeOwned>(&self) -> Vec<K> {
        let Ok(kind) = kind_of::<K>() else { return Vec::new() };
        let values: Vec<Value> =
            self.store().list(kind, &Selection::default(), None).map(|(_, value)| value.clone()).collect();
        values.into_iter().filter_map(|value| from_value(value).ok()).collect()
    }

    /// Changes an object and its status.
    pub fn update<K: Resource + Serialize + DeserializeOwned>(
        &self,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut K),
    ) -> Result<K, ApiError> {
        self.change(|store| {
            let kind = kind_of::<K>()?;
            let mut object: K = from_value(store.get(kind, namespace, name)?)?;
            change(&mut object);
            let mut value = to_value(&object)?;
            let writer = Writer { manager: "test".to_owned(), ..Writer::default() };
            let mut after = store.update(kind, namespace, name, value.clone(), &writer)?;
            // Without its last finalizer, an object that is being deleted is gone now.
            if kind.status && store.get(kind, namespace, name).is_ok() {
                value["metadata"] = serde_json::json!({});
                let writer = Writer { subresource: Some("status".to_owned()), ..writer };
                after = store.update(kind, namespace, name, value, &writer)?;
            }
            Ok(after)
        })
        .and_then(from_value)
    }

    /// Deletes an object as a client does: if it has finalizers, it stays until they are removed.
    pub fn delete<K: Resource>(&self, namespace: &str, name: &str) -> Result<(), ApiError> {
        self.change(|store| store.delete(kind_of::<K>()?, namespace, name, &Value::Null)).map(drop)
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outage(&self) -> MutexGuard<'_, Option<CancellationToken>> {
        self.0.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes objects and wakes the watches.
    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store();
        store.set_now(date(self.0.clock.now()));
        let changed = change(&mut store);
        let version = store.version();
        drop(store);
        self.0.changes.send_if_modified(|last| std::mem::replace(last, version) != version);
        changed
    }

    /// Counts a request, and returns the error that the test wants it to have.
    fn admit(&self, agent: &str, verb: Verb, resource: &str) -> Result<(), ApiError> {
        let kind = RequestKind { agent: agent.to_owned(), verb, resource: resource.to_owned() };
        *self.0.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
        let mut faults = self.0.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = faults
            .iter_mut()
            .find(|fault| fault.times > 0 && fault.verb == verb && fault.resource == resource);
        match fault {
            None => Ok(()),
            Some(fault) => {
                fault.times -= 1;
                Err(fault.error.clone())
            }
        }
    }

    /// A request of the fake kubelet, which has no connection.
    fn kubelet_request(&self, verb: Verb, resource: &str) -> Result<(), ApiError> {
        if self.outage().is_none() {
            return Err(ApiError::new(503, "ServiceUnavailable", "connect: connection refused"));
        }
        self.admit("kubelet", verb, resource)
    }

    /// Gets an object for the fake kubelet.
    pub(crate) fn kubelet_get<K: Resource + DeserializeOwned>(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<K, ApiError> {
        let kind = kind_of::<K>()?;
        self.kubelet_request(Verb::Get, kind.plural)?;
        from_value(self.store().get(kind, namespace, name)?)
    }

    /// Registers the node of the fake kubelet, if it is not registered.
    pub(crate) fn kubelet_register(&self, node: &str) -> Result<(), ApiError> {
        let kind = kind_of::<k8s_openapi::api::core::v1::Node>()?;
        self.kubelet_request(Verb::Get, kind.plural)?;
        if self.store().get(kind, "", node).is_err() {
            self.kubelet_request(Verb::Create, kind.plural)?;
            let labels = serde_json::json!({"kubernetes.io/hostname": node});
            let value = serde_json::json!({"metadata": {"name": node, "labels": labels}});
            self.change(|store| store.create(kind, "", value, &Writer::default()))?;
        }
        Ok(())
    }

    /// Deletes the slices of a node, or of one driver on it, and returns their number.
    pub(crate) fn kubelet_wipe(&self, node: &str, driver: Option<&str>) -> Result<usize, ApiError> {
        let kind = kind_of::<k8s_openapi::api::resource::v1::ResourceSlice>()?;
        self.kubelet_request(Verb::DeleteCollection, kind.plural)?;
        let mut fields = format!("spec.nodeName={node}");
        if let Some(driver) = driver {
            fields.push_str(&format!(",spec.driver={driver}"));
        }
        let selection = Selection::parse(kind, None, Some(&fields), None)?;
        Ok(self.change(|store| store.delete_collection(kind, &selection)).len())
    }
}

fn date(now: Duration) -> Timestamp {
    let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX / 2);
    Timestamp::from_second(EPOCH_S.saturating_add(seconds)).unwrap_or(Timestamp::MAX)
}

fn kind_of<K: Resource>() -> Result<&'static Kind, ApiError> {
    Kind::find(K::GROUP, K::VERSION, K::URL_PATH_SEGMENT).ok_or_else(ApiError::unknown_path)
}

fn to_value<K: Serialize>(object: &K) -> Result<Value, ApiError> {
    serde_json::to_value(object).map_err(|error| ApiError::bad_request(error.to_string()))
}

fn from_value<K: DeserializeOwned>(value: Value) -> Result<K, ApiError> {
    serde_json::from_value(value).map_err(|error| ApiError::bad_request(error.to_string()))
}
