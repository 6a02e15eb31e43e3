//! Every limit of the service. What goes beyond one is refused and counted.

use std::time::Duration;

use shmesh_sys::socket::MAX_RECEIVED_FDS;

/// Connections at the same time.
pub(super) const MAX_CONNECTIONS: usize = 1024;

/// Connections of one pod, or of one process outside any pod: nobody can take all places.
pub(super) const MAX_CONNECTIONS_PER_CLIENT: usize = 64;

/// Closings of foreign descriptors under way: each may block for as long as its maker likes.
pub(super) const MAX_CLOSINGS: usize = 32;

/// The same for one client, so that one alone cannot stop the others.
pub(super) const MAX_CLOSINGS_PER_CLIENT: usize = 2;

/// Descriptors that the service needs besides its connections.
pub(super) const RESERVED_FDS: usize = 2 * MAX_RECEIVED_FDS + 64;

/// Connections that wait to be accepted.
pub(super) const BACKLOG: i32 = 128;

/// How long a client may take to make room for its answer.
pub(super) const SEND: Duration = Duration::from_millis(shmesh_proto::limits::ANSWER_MILLIS);

/// How long to wait when there is no descriptor left for the next connection.
pub(super) const EXHAUSTED: Duration = Duration::from_millis(50);

/// How long to drain at the end.
pub(super) const DRAIN: Duration = Duration::from_secs(5);

/// Between two lines of counters in the log.
pub(super) const REPORT: Duration = Duration::from_secs(60);

/// Bytes of a file of pods.
pub(super) const MAX_PODS_BYTES: u64 = 4 << 20;

/// Containers in a file of pods.
pub(super) const MAX_CONTAINERS: usize = 4096;
