//! Limits of the identity service. Requests beyond a limit are refused and counted.

use std::time::Duration;

use shmesh_sys::socket::MAX_RECEIVED_FDS;

/// Maximum number of open connections.
pub(super) const MAX_CONNECTIONS: usize = 1024;

/// Maximum connections per pod, or per process outside pods, so that no client can take all connections.
pub(super) const MAX_CONNECTIONS_PER_CLIENT: usize = 64;

/// Maximum concurrent closes of received descriptors; each can block for as long as the client wants.
pub(super) const MAX_CLOSINGS: usize = 32;

/// The same per client, so that one client cannot block the others.
pub(super) const MAX_CLOSINGS_PER_CLIENT: usize = 2;

/// Descriptors reserved for other purposes than connections.
pub(super) const RESERVED_FDS: usize = 2 * MAX_RECEIVED_FDS + 64;

/// Length of the listen backlog.
pub(super) const BACKLOG: i32 = 128;

/// Timeout for sending an answer.
pub(super) const SEND: Duration = Duration::from_millis(shmesh_proto::limits::ANSWER_MILLIS);

/// Pause before the next accept when no descriptor is free.
pub(super) const EXHAUSTED: Duration = Duration::from_millis(50);

/// Time limit for draining at shutdown.
pub(super) const DRAIN: Duration = Duration::from_secs(5);

/// Interval between log lines with counters.
pub(super) const REPORT: Duration = Duration::from_secs(60);

/// Maximum size of a file of pods.
pub(super) const MAX_PODS_BYTES: u64 = 4 << 20;

/// Maximum size of an event of the node's pods, each of which has one pod. The API server stores 1.5 MiB of a pod, which JSON can
/// lengthen, and the chart limits the service to 32 MiB.
pub(super) const MAX_EVENT_BYTES: usize = 4 << 20;

/// Maximum number of pods of the node that are kept from the API server. A kubelet runs 110 by default.
pub(super) const MAX_PODS: usize = 1024;

/// Maximum number of containers of such a pod whose names are kept.
pub(super) const MAX_CONTAINERS_PER_POD: usize = 64;

/// Time after the start in which answers wait for the first list of pods.
pub(super) const FIRST_LIST: Duration = Duration::from_millis(500);

/// Maximum number of containers in a file of pods.
pub(super) const MAX_CONTAINERS: usize = 4096;
