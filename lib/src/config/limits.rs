//! Limits of a configuration.

/// Largest configuration text in bytes (1 MiB), above what a Kubernetes ConfigMap can hold.
pub const MAX_FILE_BYTES: usize = 1 << 20;

/// Maximum number of links in one configuration.
pub const MAX_LINKS: usize = 1024;

/// Minimum number of slots of a ring.
pub const MIN_RING_LEN: u32 = 1;

/// Maximum number of slots of a ring. It is a power of two, so rounding up does not exceed it.
pub const MAX_RING_LEN: u32 = 1 << 20;

/// Longest time in microseconds that a waiter may poll before it sleeps: one second. A larger value is most likely in another unit.
pub const MAX_SPIN_US: u32 = 1_000_000;

/// Maximum number of requests that one participant of the secondary side can have pending.
pub const MAX_REQUEST_WINDOW: u32 = 64;

/// Maximum of [`LinkConfig::latency_sample`](crate::config::LinkConfig::latency_sample): one message of this many is timed.
pub const MAX_LATENCY_SAMPLE: u32 = 1 << 16;

/// Maximum number of participants of the secondary side of a link with ring mode
/// [`Broadcast`](crate::config::RingMode::Broadcast): a seat stays for the writer, and one for a process that recovers what a dead participant held.
pub const MAX_READERS: usize = crate::MAX_SEATS - 2;

/// Longest time in milliseconds that a reader may hold the writer up before it is evicted: one hour.
pub const MAX_EVICT_AFTER_MS: u32 = 3_600_000;
