//! The events of a node, in order.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::Clock;

/// An event and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// By the node's clock.
    pub at: Duration,
    /// The event itself, without its time.
    pub event: Event,
}

/// An event of a node. Errors have the wording of the real kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named after what they are")]
pub enum Event {
    /// The kubelet listens on its sockets.
    KubeletStarted,
    /// The kubelet was killed.
    KubeletKilled,
    /// The checkpoint could not be read and was ignored.
    CheckpointIgnored { error: String },
    /// The kubelet connected to a plugin.
    Registered { resource: String, socket: String },
    /// A plugin registered, but the kubelet could not connect to it.
    RegisterRefused { resource: String, error: String },
    /// A plugin that was found by its socket was notified.
    Notified { socket: String, registered: bool, error: String },
    /// A plugin found by its socket could not be registered; it will be tried again.
    RegistrationFailed { socket: String, error: String },
    /// ListAndWatch sent a list.
    Listed { resource: String, total: usize, healthy: usize },
    /// ListAndWatch ended; it will not be called again.
    StreamEnded { resource: String, error: String },
    /// The plugin has been given up: its devices are unhealthy.
    Disconnected { resource: String },
    /// No plugin has registered for five minutes: the resource was removed.
    ResourceRemoved { resource: String },
    /// The kubelet called GetPreferredAllocation.
    PreferenceAsked { resource: String, available: Vec<String>, must_include: Vec<String>, size: i32 },
    /// The kubelet called Allocate.
    AllocateCalled { resource: String, pod: String, container: String, devices: Vec<String> },
    /// Allocate answered, and the devices belong to the container.
    Allocated { resource: String, pod: String, container: String, devices: Vec<String> },
    /// The pod was admitted.
    Admitted { pod: String },
    /// The pod was not admitted.
    Rejected { pod: String, reason: String, message: String },
    /// The container was started.
    ContainerStarted { pod: String, container: String },
    /// The container could not be started; it will be tried again.
    ContainerFailed { pod: String, container: String, error: String },
    /// A driver of dynamic resource allocation registered an instance, with this gRPC service.
    DriverRegistered { driver: String, socket: String, service: String },
    /// The registration socket of an instance was removed.
    DriverDeregistered { driver: String, socket: String },
    /// The connection to an instance was made or has ended.
    DriverConnection { driver: String, socket: String, connected: bool },
    /// The slices of the node were deleted; without a name, the slices of all drivers.
    SlicesWiped { driver: String, deleted: usize },
    /// The kubelet called NodePrepareResources for claims, by their uids.
    PrepareCalled { driver: String, claims: Vec<String> },
    /// The kubelet called NodeUnprepareResources for claims, by their uids.
    UnprepareCalled { driver: String, claims: Vec<String> },
    /// The pod's event `FailedPrepareDynamicResources`; the pod waits, and it will be tried again.
    PrepareFailed { pod: String, error: String },
    /// The claims of a pod that has ended could not be unprepared; it will be tried again.
    UnprepareFailed { pod: String, error: String },
    /// The claims of a pod that has ended are unprepared, so its status can change.
    Unprepared { pod: String },
    /// Health of devices changed, so the status of these pods is sent to the API server.
    HealthChanged { pods: Vec<String> },
}

#[derive(Debug)]
pub(crate) struct Journal {
    clock: Clock,
    records: Mutex<Vec<Record>>,
    changes: watch::Sender<u64>,
}

impl Journal {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { clock, records: Mutex::default(), changes: watch::Sender::new(0) }
    }

    pub(crate) fn add(&self, event: Event) {
        let record = Record { at: self.clock.now(), event };
        self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        self.changed();
    }

    /// Wakes the tasks that wait for a state of the node.
    pub(crate) fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(crate) fn records(&self) -> Vec<Record> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn clear(&self) {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
