//! Watches the slices of the node and writes what a plan says.

use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions, WatchEvent, WatchParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::plan::{
    Adoption, Adoptions, PoolIdentity, Slices, canonical_devices, is_same_beside_devices, plan,
};
use super::turn::PublisherTurn;
use crate::api_error::{code_of, text_of};
use crate::backoff::{Backoff, up_to};
use crate::settings::DriverSettings;

/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Seconds after which the API server ends a watch: up to a quarter more, so that the watches of a cluster do not end together. It is
/// then opened again, which is one request.
const WATCH_SECONDS: u32 = 220;
/// Time after which a watch is given up that the API server should have ended.
const WATCH_GRACE: Duration = Duration::from_secs(30);
/// Age from which a watch counts as one that worked. What ends earlier is opened again more and more seldomly.
const WATCH_WORKS: Duration = Duration::from_secs(5);
/// Upper limits of the delays after a request that failed, and of those after a watch that could not be opened or broke. The delays
/// are random below them: all nodes of a cluster lose their watches at the same time when an API server restarts.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Delays before slices that were deleted are made again: a collection is deleted one by one.
const AFTER_DELETION: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));
/// Delays before slices that were edited are written again.
const AFTER_EDIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The publisher's progress so far.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PublisherState {
    /// Whether this instance has made the slices as they should be, as far as the API server has said.
    pub published: bool,
    /// Number of writes to the API server so far, also of those that failed.
    pub writes: u64,
    /// Why the slices are not as they should be, if an attempt has failed.
    pub error: Option<String>,
}

/// Keeps the ResourceSlices of a driver on a node as they should be.
///
/// There is one pool, with the name of the node. Slices are written only when they differ: an idle node makes one
/// request in about four minutes, to watch. They come back when they are deleted (a kubelet does that at its
/// start, and when it has lost the driver) or edited. They belong to the Node object, and go with it.
///
/// Of two instances on the node, the newer one publishes, and the older one again if that ends first.
///
/// The driver's account needs `get`, `list`, `watch`, `create`, `patch` and `delete` on `resourceslices` and `get` on `nodes`.
#[derive(Debug)]
pub struct SlicePublisher {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    driver: String,
    node: String,
    directory: PathBuf,
    state: watch::Sender<PublisherState>,
    /// Uid of the Node object, until a slice that is gone or has another owner makes it doubtful.
    node_uid: Option<String>,
    known: Slices,
    adoptions: Adoptions,
    generation: i64,
    /// After lists and writes. It begins again when the slices are as they should be.
    retry: Backoff,
    /// After watches, also before the list that replaces one. It begins again when a watch has worked.
    reopen: Backoff,
    after_deletion: Backoff,
    after_edit: Backoff,
}

/// The slices must be listed again, after this delay.
struct ListAgain(Duration);

struct OpenWatch {
    events: Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<ResourceSlice>>> + Send>>,
    opened: Instant,
    /// When the API server ends it.
    end: Instant,
}

impl OpenWatch {
    fn works(&self) -> bool {
        self.opened.elapsed() >= WATCH_WORKS
    }

    /// The next event, or `None` at the end, also when that should have come: a connection can die without a word.
    async fn next(&mut self) -> Option<kube::Result<WatchEvent<ResourceSlice>>> {
        timeout_at(self.end + WATCH_GRACE, self.events.next()).await.unwrap_or(None)
    }
}

impl SlicePublisher {
    /// Publishes nothing before [`run`](Self::run).
    pub fn new(client: Client, settings: &DriverSettings) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client),
            driver: settings.driver.clone(),
            node: settings.node.clone(),
            directory: settings.driver_dir(),
            state: watch::Sender::new(PublisherState::default()),
            node_uid: None,
            known: Slices::new(),
            adoptions: Adoptions::new(),
            generation: 0,
            retry: Backoff::new(RETRY.0, RETRY.1),
            reopen: Backoff::new(RETRY.0, RETRY.1),
            after_deletion: Backoff::new(AFTER_DELETION.0, AFTER_DELETION.1),
            after_edit: Backoff::new(AFTER_EDIT.0, AFTER_EDIT.1),
        }
    }

    /// How publishing goes, from now on.
    pub fn state(&self) -> watch::Receiver<PublisherState> {
        self.state.subscribe()
    }

    /// Publishes `devices` until `stop`. The order of devices is the order in which the scheduler tries them.
    ///
    /// Failures are logged, shown in [`state`](Self::state) and retried. The slices stay when it stops; the kubelet
    /// deletes them if no other instance of the driver registers within 30 seconds.
    pub async fn run(mut self, mut devices: watch::Receiver<Vec<Device>>, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.publish(&mut devices) => {}
        }
    }

    async fn publish(&mut self, devices: &mut watch::Receiver<Vec<Device>>) {
        let mut turn = PublisherTurn::new(self.directory.clone());
        loop {
            let _turn = turn.take().await;
            tokio::select! {
                () = turn.until_wanted() => {}
                () = self.keep_published(devices) => {}
            }
            info!(
                "a newer instance of driver {} publishes the slices of this node; this one waits",
                self.driver
            );
            self.state.send_modify(|state| state.published = false);
            // It may be another node by the time that this instance goes on.
            self.node_uid = None;
        }
    }

    async fn keep_published(&mut self, devices: &mut watch::Receiver<Vec<Device>>) {
        loop {
            let ListAgain(delay) = self.list_and_watch(devices).await;
            sleep(delay).await;
        }
    }

    fn selector(&self) -> String {
        format!("spec.nodeName={},spec.driver={}", self.node, self.driver)
    }

    async fn list_and_watch(&mut self, devices: &mut watch::Receiver<Vec<Device>>) -> ListAgain {
        let params = ListParams::default().fields(&self.selector());
        let list = match limited("list resourceslices", self.slices.list(&params)).await {
            Ok(list) => list,
            Err(error) => {
                self.failed(&error);
                return ListAgain(up_to(self.retry.delay()));
            }
        };
        let mut version = list.metadata.resource_version.unwrap_or_default();
        let before = std::mem::take(&mut self.known);
        list.items.into_iter().for_each(|slice| self.remember(slice));
        if before.keys().any(|name| !self.known.contains_key(name)) {
            // Perhaps the Node object was deleted, and made again.
            self.node_uid = None;
        }
        let mut due = Some(Instant::now());
        let mut watch: Option<OpenWatch> = None;
        let mut open_at = Instant::now();
        loop {
            let now = Instant::now();
            if watch.is_none() && open_at <= now && due.is_none_or(|due| due > now) {
                match self.open_watch(&version).await {
                    Ok(opened) => {
                        watch = Some(opened);
                        if due.is_none() && self.state.borrow().error.is_some() {
                            due = Some(Instant::now());
                        }
                    }
                    Err(error) if error.is_expired => return ListAgain(up_to(self.reopen.delay())),
                    Err(error) => {
                        self.failed(&error);
                        open_at = Instant::now() + up_to(self.reopen.delay());
                    }
                }
            }
            let is_closed = watch.is_none();
            let next_event = async {
                match &mut watch {
                    Some(watch) => watch.next().await,
                    None => std::future::pending().await,
                }
            };
            let changed = async {
                if devices.changed().await.is_err() {
                    // The list does not change any more.
                    std::future::pending::<()>().await;
                }
            };
            let sync_time = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = next_event => match event {
                    Some(Ok(event)) => match self.note(event, &mut version) {
                        Ok(None) => {}
                        Ok(Some(delay)) => due = Some(earlier(due, Instant::now() + delay)),
                        Err(again) => return again,
                    },
                    ended => {
                        let Some(ended_watch) = watch.take() else { continue };
                        let works = ended_watch.works();
                        if works {
                            self.reopen.reset();
                        }
                        if let Some(Err(error)) = ended {
                            debug!("the watch of slices failed: {}", text_of(&error));
                            if !works {
                                // It may be what comes after this version that cannot be read.
                                return ListAgain(up_to(self.reopen.delay()));
                            }
                        }
                        open_at = Instant::now();
                        if open_at < ended_watch.end {
                            open_at += up_to(self.reopen.delay());
                        }
                    }
                },
                () = sleep_until(open_at), if is_closed => {}
                () = changed => due = Some(Instant::now()),
                () = sync_time => {
                    due = None;
                    self.after_deletion.begin();
                    self.after_edit.begin();
                    let wanted = devices.borrow_and_update().clone();
                    match self.sync(&wanted).await {
                        Ok(()) => self.retry.reset(),
                        Err(error) => {
                            self.failed(&error);
                            let delay = up_to(self.retry.delay());
                            if error.is_expired {
                                return ListAgain(delay);
                            }
                            due = Some(Instant::now() + delay);
                        }
                    }
                }
            }
        }
    }

    async fn open_watch(&self, version: &str) -> Result<OpenWatch, RequestError> {
        let shortest = Duration::from_secs(WATCH_SECONDS.into());
        let seconds = (shortest + up_to(shortest / 4)).as_secs();
        let params = WatchParams::default()
            .fields(&self.selector())
            .timeout(u32::try_from(seconds).unwrap_or(WATCH_SECONDS));
        let asked = Instant::now();
        let events = limited("watch resourceslices", self.slices.watch(&params, version)).await?;
        let end = asked + Duration::from_secs(seconds);
        Ok(OpenWatch { events: Box::pin(events), opened: Instant::now(), end })
    }

    /// Takes over an event. Returns the delay until the slices must be compared, if they must.
    fn note(
        &mut self,
        event: WatchEvent<ResourceSlice>,
        version: &mut String,
    ) -> Result<Option<Duration>, ListAgain> {
        match event {
            WatchEvent::Bookmark(bookmark) => {
                *version = bookmark.metadata.resource_version;
                Ok(None)
            }
            WatchEvent::Error(status) => {
                debug!("the watch of slices failed: {}", status.message);
                Err(ListAgain(up_to(self.reopen.delay())))
            }
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                set_version(version, &slice);
                if self.is_news(&slice) {
                    self.remember(slice);
                    return Ok(self.after_edit.schedule());
                }
                Ok(None)
            }
            WatchEvent::Deleted(slice) => {
                set_version(version, &slice);
                if self.is_news(&slice) && self.known.remove(name_of(&slice)).is_some() {
                    // Perhaps the Node object was deleted, and made again.
                    self.node_uid = None;
                    self.state.send_modify(|state| state.published = false);
                    return Ok(self.after_deletion.schedule());
                }
                Ok(None)
            }
        }
    }

    /// Whether the slice is newer than the one that is known: events of own writes come later than their answers.
    fn is_news(&self, slice: &ResourceSlice) -> bool {
        let number = |slice: &ResourceSlice| slice.metadata.resource_version.as_ref()?.parse::<u64>().ok();
        match self.known.get(name_of(slice)).map(number) {
            Some(Some(known)) => number(slice).is_none_or(|version| version > known),
            _ => true,
        }
    }

    fn remember(&mut self, slice: ResourceSlice) {
        let owners = slice.metadata.owner_references.as_deref().unwrap_or_default();
        if !owners.iter().any(|owner| self.node_uid.as_ref() == Some(&owner.uid)) {
            self.node_uid = None;
        }
        self.generation = self.generation.max(slice.spec.pool.generation);
        self.known.insert(name_of(&slice).to_owned(), slice);
    }

    /// Makes the slices as they should be.
    async fn sync(&mut self, devices: &[Device]) -> Result<(), RequestError> {
        let identity = PoolIdentity {
            driver: self.driver.clone(),
            node: self.node.clone(),
            owner: OwnerReference {
                api_version: "v1".into(),
                kind: "Node".into(),
                name: self.node.clone(),
                uid: self.node_uid().await?,
                controller: Some(true),
                block_owner_deletion: None,
            },
        };
        let plan = plan(&identity, devices, &self.known, &self.adoptions, self.generation);
        if !plan.is_empty() {
            debug!("slices: {} to delete, {} to write", plan.delete.len(), plan.apply.len());
            self.state.send_modify(|state| state.published = false);
        }
        for slice in &plan.delete {
            self.delete(slice).await?;
        }
        for slice in &plan.apply {
            self.apply(slice).await?;
        }
        let is_news = |state: &PublisherState| !state.published || state.error.is_some();
        self.state.send_if_modified(|state| {
            let news = is_news(state);
            state.published = true;
            state.error = None;
            news
        });
        Ok(())
    }

    async fn node_uid(&mut self) -> Result<String, RequestError> {
        if let Some(uid) = &self.node_uid {
            return Ok(uid.clone());
        }
        let what = format!("get node {}", self.node);
        let node = limited(&what, self.nodes.get_metadata(&self.node)).await?;
        let uid =
            node.metadata.uid.ok_or_else(|| RequestError::new(&what, "the answer has no uid".into()))?;
        self.node_uid = Some(uid.clone());
        Ok(uid)
    }

    fn count_write(&self) {
        self.state.send_modify(|state| state.writes += 1);
    }

    async fn delete(&mut self, slice: &ResourceSlice) -> Result<(), RequestError> {
        self.count_write();
        let name = name_of(slice);
        let preconditions = Preconditions { uid: slice.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match limited(&format!("delete resourceslice {name}"), self.slices.delete(name, &params)).await {
            Err(error) if error.code != Some(404) => Err(error),
            _ => {
                self.known.remove(name);
                Ok(())
            }
        }
    }

    async fn apply(&mut self, slice: &ResourceSlice) -> Result<(), RequestError> {
        self.count_write();
        let name = name_of(slice);
        let what = format!("apply resourceslice {name}");
        let params = PatchParams::apply(&self.driver).force();
        let stored = limited(&what, self.slices.patch(name, &params, &Patch::Apply(slice))).await?;
        let (wanted, found) = (canonical_devices(slice), canonical_devices(&stored));
        let is_clean = is_same_beside_devices(slice, &stored);
        if wanted == found {
            self.adoptions.remove(name);
        } else {
            warn!(
                "the API server has changed devices of slice {name}, probably because a feature that they need is off: {}",
                difference(&wanted, &found)
            );
            self.adoptions.insert(name.to_owned(), Adoption { wanted, stored: found });
        }
        self.remember(stored.clone());
        if is_clean {
            return Ok(());
        }
        // Fields that another writer owns are not removed by an apply.
        warn!("slice {name} has fields that this driver did not write: creating it again");
        self.delete(&stored).await?;
        Err(RequestError::new(&what, "the slice had fields of another writer".into()))
    }

    fn failed(&self, error: &RequestError) {
        warn!("slices of driver {} cannot be published: {}; retrying", self.driver, error.text);
        self.state.send_modify(|state| {
            state.published = false;
            state.error = Some(error.text.clone());
        });
    }
}

fn name_of(slice: &ResourceSlice) -> &str {
    slice.metadata.name.as_deref().unwrap_or_default()
}

fn set_version(version: &mut String, slice: &ResourceSlice) {
    if let Some(found) = &slice.metadata.resource_version {
        found.clone_into(version);
    }
}

fn earlier(one: Option<Instant>, other: Instant) -> Instant {
    one.map_or(other, |one| one.min(other))
}

/// The first device that differs, as it was written and as it is stored.
fn difference(wanted: &[Device], found: &[Device]) -> String {
    let pair = wanted.iter().zip(found).find(|(wanted, found)| wanted != found);
    match pair {
        Some((wanted, found)) => format!("{wanted:?} is stored as {found:?}"),
        None => format!("{} devices are stored as {}", wanted.len(), found.len()),
    }
}

/// A request that failed.
#[derive(Debug)]
struct RequestError {
    text: String,
    code: Option<u16>,
    /// Whether what is known about the slices is too old.
    is_expired: bool,
}

impl RequestError {
    fn new(what: &str, text: String) -> Self {
        Self { text: format!("{what}: {text}"), code: None, is_expired: false }
    }
}

async fn limited<T>(what: &str, request: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
    match timeout(TIMEOUT, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            let code = code_of(&error);
            let is_expired = matches!(code, Some(409 | 410));
            Err(RequestError { code, is_expired, ..RequestError::new(what, text_of(&error)) })
        }
        Err(_) => Err(RequestError::new(what, format!("no answer within {} seconds", TIMEOUT.as_secs()))),
    }
}
