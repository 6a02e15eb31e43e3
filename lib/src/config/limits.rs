//! Limits of a configuration.

/// Largest configuration text in bytes (1 MiB), above what a Kubernetes ConfigMap can hold.
pub const MAX_FILE_BYTES: usize = 1 << 20;

/// Maximum number of links in one configuration.
///
/// ```
/// use shmesh::config::{ConfigError, MAX_LINKS, from_yaml};
/// let links: String = (0..=MAX_LINKS).map(|i| format!("  - name: link-{i}\n")).collect();
/// let refused = from_yaml(&format!("links:\n{links}")).unwrap_err();
/// assert!(matches!(refused, ConfigError::TooManyLinks { count: 1025, .. }));
/// ```
pub const MAX_LINKS: usize = 1024;

/// Minimum number of slots of a ring.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::MIN_RING_LEN;
/// link.ring_len = MIN_RING_LEN;
/// assert!(link.validate().is_ok());
/// link.ring_len = MIN_RING_LEN - 1;
/// assert!(link.validate().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MIN_RING_LEN: u32 = 1;

/// Maximum number of slots of a ring. It is a power of two, so rounding up does not exceed it.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::MAX_RING_LEN;
/// link.ring_len = MAX_RING_LEN;
/// assert!(link.validate().is_ok());
/// link.ring_len = MAX_RING_LEN + 1;
/// assert!(link.validate().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_RING_LEN: u32 = 1 << 20;

/// Longest time in microseconds that a waiter may poll before it sleeps: one second. A larger value is most likely in another unit.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::MAX_SPIN_US;
/// link.spin_us = MAX_SPIN_US;
/// assert!(link.validate().is_ok());
/// link.spin_us = MAX_SPIN_US + 1;
/// assert!(link.validate().unwrap_err().to_string().contains("the limit is 1000000"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_SPIN_US: u32 = 1_000_000;

/// Maximum number of requests that one participant of the secondary side can have pending.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::MAX_REQUEST_WINDOW;
/// link.request_window = MAX_REQUEST_WINDOW;
/// assert!(link.validate().is_ok());
/// link.request_window = MAX_REQUEST_WINDOW + 1;
/// assert!(link.validate().unwrap_err().to_string().contains("the limit is 64"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_REQUEST_WINDOW: u32 = 64;
/// Maximum of [`LinkConfig::latency_sample`](crate::config::LinkConfig::latency_sample): one message of this many is timed.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::MAX_LATENCY_SAMPLE;
/// link.latency_sample = MAX_LATENCY_SAMPLE;
/// assert!(link.validate().is_ok());
/// link.latency_sample = MAX_LATENCY_SAMPLE - 1;
/// assert!(link.validate().unwrap_err().to_string().contains("a power of two up to 65536"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_LATENCY_SAMPLE: u32 = 1 << 16;

/// Maximum number of participants of the secondary side of a link with ring mode
/// [`Broadcast`](crate::config::RingMode::Broadcast): a seat stays for the writer, and one for a process that recovers what a dead participant held.
pub const MAX_READERS: usize = crate::MAX_SEATS - 2;

/// Longest time in milliseconds that a reader may hold the writer up before it is evicted: one hour.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("weights".parse()?);
/// use shmesh::config::{MAX_EVICT_AFTER_MS, RingMode, SlowReaders};
/// link.ring_mode = RingMode::Broadcast;
/// link.broadcast.slow = SlowReaders::Evict;
/// link.broadcast.evict_after_ms = MAX_EVICT_AFTER_MS;
/// assert!(link.validate().is_ok());
/// link.broadcast.evict_after_ms = MAX_EVICT_AFTER_MS + 1;
/// assert!(link.validate().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_EVICT_AFTER_MS: u32 = 3_600_000;
