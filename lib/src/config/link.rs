//! The configuration of one link, and the rules that it must satisfy.

use super::error::{ConfigError, Position};
use super::limits::{
    MAX_EVICT_AFTER_MS, MAX_LATENCY_SAMPLE, MAX_REQUEST_WINDOW, MAX_RING_LEN, MAX_SPIN_US, MIN_RING_LEN,
};
use super::name::LinkName;
use super::pool::{MAX_BUF_SIZE_BYTES, MAX_POOL_LEN, MAX_SEGMENT_BYTES, PoolConfig, PoolId};

/// The window of requests that `requests: {}` in a configuration means.
#[cfg(feature = "yaml")]
pub(super) const DEFAULT_REQUEST_WINDOW: u32 = 8;
/// The sample that `latency: {}` in a configuration means.
#[cfg(feature = "yaml")]
pub(super) const DEFAULT_LATENCY_SAMPLE: u32 = 64;

/// How many may push to a ring at once.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::{ErrorKind, config::RingMode};
/// config.ring_mode = RingMode::Spsc;
/// let link = options.create(&config)?;
/// link.send_inline(1, 0, b"the first to send is the producer")?;
/// let other = link.try_clone()?;
/// let refused = other.send_inline(1, 0, b"a second one").unwrap_err();
/// assert!(matches!(refused.kind(), ErrorKind::RoleTaken { role: "producer", .. }));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum RingMode {
    /// One producer and one consumer. It is faster, and the user must ensure that there is only one of each.
    Spsc,
    /// Many producers, many consumers.
    #[default]
    Mpmc,
    /// The primary side has one writer, and each participant of the secondary side gets every message of it
    /// ([`BroadcastConfig`]). Messages of the secondary side go through a ring of many producers and consumers.
    Broadcast,
}

/// The treatment of a reader of a broadcast ring that is slower than the writer.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("weights".parse()?);
/// use shmesh::{Side, config::{RingMode, SlowReaders}};
/// config.ring_mode = RingMode::Broadcast;
/// config.ring_len = 2;
/// config.broadcast.slow = SlowReaders::Skip;
/// let writer = options.create(&config)?;
/// let reader = options.attach("weights", Side::Secondary)?;
/// for value in 0..100_u8 {
///     writer.send_inline(1, 0, &[value])?; // never waits
/// }
/// assert_eq!(reader.receive()?.expect("the latest").msg(), [99]);
/// assert_eq!(reader.lost(), 99);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum SlowReaders {
    /// The slowest reader sets the pace: the writer gets [`Full`](crate::ErrorKind::Full) or
    /// [`Exhausted`](crate::ErrorKind::Exhausted) until it has read. Each reader gets everything.
    #[default]
    Wait,
    /// The writer never waits. A reader that was overtaken goes on with the newest message, and
    /// [`lost`](crate::Link::lost) counts the messages that it missed.
    Skip,
    /// As `Wait`; but a reader that holds the writer up for longer than
    /// [`evict_after_ms`](BroadcastConfig::evict_after_ms) is evicted: its calls return [`Evicted`](crate::ErrorKind::Evicted).
    Evict,
}

/// Settings of a link with ring mode [`Broadcast`](RingMode::Broadcast).
///
/// ```
/// use shmesh::config::{BroadcastConfig, SlowReaders, from_yaml};
/// let text = "links:\n- name: weights\n  ring: {mode: broadcast, slow: evict, history: 4, evict_after_ms: 50}\n";
/// let expected = BroadcastConfig { slow: SlowReaders::Evict, history: 4, evict_after_ms: 50 };
/// assert_eq!(from_yaml(text)?.links[0].broadcast, expected);
/// # Ok::<(), shmesh::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BroadcastConfig {
    /// The treatment of a reader that is slower than the writer.
    pub slow: SlowReaders,
    /// Number of the latest messages before its attachment that a new reader receives. Less than
    /// [`ring_len`](LinkConfig::ring_len) and than the buffers of each pool; with [`Evict`](SlowReaders::Evict), half of `ring_len` at most.
    pub history: u32,
    /// Milliseconds that a reader may hold the writer up, 1 to [`MAX_EVICT_AFTER_MS`]; for [`Evict`](SlowReaders::Evict).
    pub evict_after_ms: u32,
}

impl Default for BroadcastConfig {
    fn default() -> Self {
        Self { slow: SlowReaders::default(), history: 0, evict_after_ms: 1000 }
    }
}

/// How many processes may receive on one side of a link.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::{Side, config::Receivers};
/// config.receivers = Receivers::One;
/// let phy = options.create(&config)?;
/// let mac = options.attach("fronthaul", Side::Secondary)?;
/// let second = mac.try_clone()?; // another process would be refused
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Receivers {
    /// Any number. They share one queue: each message goes to one of them.
    #[default]
    Many,
    /// One process on each side, with any number of handles. A second process is refused when it attaches.
    One,
}

/// The kind of memory that the segments consist of.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::{Side, config::Backing};
/// config.backing = Backing::Memfd;
/// let phy = options.create(&config)?;
/// assert!(!dir.path().join("fronthaul_shm").exists(), "no file, only a socket to ask at");
/// let mac = options.attach("fronthaul", Side::Secondary)?; // asks there
/// assert_eq!(mac.ring_len(), phy.ring_len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Backing {
    /// Files in the IPC directory (`/dev/shm`); a process that may open the files may attach.
    #[default]
    Named,
    /// Sealed memfds without a name, which only the broker hands out.
    Memfd,
}

/// Whether segments use huge pages.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::{Backing, HugePages};
/// link.huge_pages = HugePages::Hugetlb;
/// assert!(link.validate().is_err(), "files of a tmpfs cannot have them");
/// link.backing = Backing::Memfd;
/// assert!(link.validate().is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// Pages of the base size.
    #[default]
    Off,
    /// Transparent huge pages, which the creator of the link requests regardless of the node's `shmem_enabled` (Linux 6.1 or
    /// later); base pages if the kernel has no free huge page.
    Transparent,
    /// Reserved huge pages; needs [`Backing::Memfd`].
    Hugetlb,
}

/// All settings of one link, which are fixed when the link is created.
///
/// ```
/// use shmesh::config::{LinkConfig, PoolConfig, PoolId};
///
/// let mut link = LinkConfig::new("fronthaul".parse()?);
/// link.pools[PoolId::CpuLarge.index()] = PoolConfig { buf_size_bytes: 4 << 20, pool_len: 16 };
/// link.validate()?;
///
/// link.file_mode = 0o666;
/// assert!(link.validate().unwrap_err().to_string().contains("0600"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkConfig {
    /// The link's name, NVIPC's `prefix`.
    pub name: LinkName,
    /// Slots in each ring, [`MIN_RING_LEN`] to [`MAX_RING_LEN`]; the transport rounds up to a power of two.
    pub ring_len: u32,
    /// How many producers may send at the same time.
    pub ring_mode: RingMode,
    /// Settings of ring mode [`Broadcast`](RingMode::Broadcast); ignored in other modes.
    pub broadcast: BroadcastConfig,
    /// How many processes may receive on each side.
    pub receivers: Receivers,
    /// The pools, each at [`PoolId::index`].
    pub pools: [PoolConfig; PoolId::COUNT],
    /// Requests that each participant of the secondary side can have pending, at most [`MAX_REQUEST_WINDOW`]; 0: the link has
    /// no requests. Only with [`RingMode::Mpmc`].
    pub request_window: u32,
    /// Sampling interval of latencies: one of this many messages is timed from sending to receiving, and from there to releasing. A
    /// power of two, at most [`MAX_LATENCY_SAMPLE`]; 0 times none. [`View::times`](crate::inspect::View::times) returns the times.
    pub latency_sample: u32,
    /// The kind of memory that the segments consist of.
    pub backing: Backing,
    /// Whether segments use huge pages.
    pub huge_pages: HugePages,
    /// Whether the creator touches every page at once, so that neither it nor others cause page faults later. A process that
    /// attaches decides by [`LinkOptions::prefault`](crate::LinkOptions::prefault).
    pub prefault: bool,
    /// Whether the pages are locked in memory (`mlock`).
    pub lock_memory: bool,
    /// Whether receivers may sleep and senders wake them; without it, `wait` spins.
    pub notify: bool,
    /// How long `wait` polls before it sleeps, in microseconds, at most [`MAX_SPIN_US`].
    pub spin_us: u32,
    /// Mode of named segments: `0o600`, or `0o660` to share with a group.
    pub file_mode: u32,
}

impl LinkConfig {
    /// The built-in defaults: `cpu_msg` 1024 buffers of 8 KiB, `cpu_data` 256 of 64 KiB, no other pool.
    ///
    /// Rings of 1024 slots, `mpmc`; named segments of base pages, prefaulted and not locked, with mode `0o600`;
    /// notification, and 50 microseconds of polling before a waiter sleeps.
    ///
    /// ```
    /// use shmesh::config::{LinkConfig, PoolId, RingMode};
    /// let link = LinkConfig::new("fronthaul".parse()?);
    /// assert_eq!((link.ring_len, link.ring_mode), (1024, RingMode::Mpmc));
    /// assert_eq!(link.pool(PoolId::CpuMsg).buf_size_bytes, 8192);
    /// assert!(link.notify && link.prefault);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(name: LinkName) -> Self {
        let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
        pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 8192, pool_len: 1024 };
        pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 65_536, pool_len: 256 };
        Self {
            name,
            ring_len: 1024,
            ring_mode: RingMode::default(),
            broadcast: BroadcastConfig::default(),
            receivers: Receivers::default(),
            pools,
            request_window: 0,
            latency_sample: 0,
            backing: Backing::default(),
            huge_pages: HugePages::default(),
            prefault: true,
            lock_memory: false,
            notify: true,
            spin_us: 50,
            file_mode: 0o600,
        }
    }

    /// The defaults of NVIPC for keys that its file does not set (Aerial 26-1, `set_nv_ipc_default_config`).
    ///
    /// ```
    /// use shmesh::config::{LinkConfig, PoolId};
    ///
    /// let link = LinkConfig::nvipc_defaults("nvipc".parse()?);
    /// assert_eq!(link.pool(PoolId::CpuMsg).pool_len, 4096);
    /// assert!(!link.pool(PoolId::GpuData).is_enabled());
    /// # Ok::<(), shmesh::config::NameError>(())
    /// ```
    pub fn nvipc_defaults(name: LinkName) -> Self {
        let pool = |buf_size_bytes, pool_len| PoolConfig { buf_size_bytes, pool_len };
        let pools =
            [pool(8192, 4096), pool(576_000, 1024), pool(4_096_000, 64), pool(576_000, 0), pool(576_000, 0)];
        Self { ring_len: 8192, pools, ..Self::new(name) }
    }

    /// The size of one pool.
    ///
    /// ```
    /// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// use shmesh::config::{PoolConfig, PoolId};
    /// link.pools[PoolId::CpuLarge.index()] = PoolConfig { buf_size_bytes: 1 << 20, pool_len: 4 };
    /// assert_eq!(link.pool(PoolId::CpuLarge).pool_len, 4);
    /// assert_eq!(link.pool(PoolId::CudaData), PoolConfig::DISABLED);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pool(&self, pool: PoolId) -> PoolConfig {
        self.pools[pool.index()]
    }

    /// The first pool in device memory that is enabled.
    pub fn device_pool(&self) -> Option<PoolId> {
        PoolId::ALL.into_iter().find(|pool| pool.is_device() && self.pool(*pool).is_enabled())
    }

    /// Bytes in all enabled pools together, without rings, headers and alignment. Saturates.
    pub fn payload_bytes(&self) -> u64 {
        self.pools.iter().fold(0, |sum: u64, pool| sum.saturating_add(pool.payload_bytes()))
    }

    /// Checks every limit, and every rule that concerns several fields.
    ///
    /// The loaders check the same rules with the places of the values; an error from here has no
    /// [`location`](ConfigError::location).
    ///
    /// # Errors
    /// The first rule that is not satisfied: a [`ConfigError`] with the link, the value and the limit.
    ///
    /// ```
    /// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// use shmesh::config::ConfigError;
    /// assert!(link.validate().is_ok());
    /// link.spin_us = 2_000_000;
    /// assert!(matches!(link.validate(), Err(ConfigError::SpinTooLong { value: 2_000_000, .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check(&LinkPlaces::default())
    }

    /// [`validate`](Self::validate), with the places where the values were read.
    pub(super) fn check(&self, places: &LinkPlaces) -> Result<(), ConfigError> {
        let link = || self.name.clone();
        if !(MIN_RING_LEN..=MAX_RING_LEN).contains(&self.ring_len) {
            let (value, place) = (self.ring_len.into(), places.ring_len);
            return Err(ConfigError::RingLenOutOfRange { link: link(), value, place });
        }
        if self.spin_us > MAX_SPIN_US {
            let (value, place) = (self.spin_us.into(), places.spin_us);
            return Err(ConfigError::SpinTooLong { link: link(), value, place });
        }
        if self.request_window > MAX_REQUEST_WINDOW {
            let (value, place) = (self.request_window.into(), places.request_window);
            return Err(ConfigError::RequestWindowTooLarge { link: link(), value, place });
        }
        if self.request_window > 0 && self.ring_mode != RingMode::Mpmc {
            return Err(ConfigError::RequestsNeedMpmc { link: link(), place: places.request_window });
        }
        let sample = self.latency_sample;
        if sample > MAX_LATENCY_SAMPLE || sample > 0 && !sample.is_power_of_two() {
            let (value, place) = (sample.into(), places.latency_sample);
            return Err(ConfigError::BadLatencySample { link: link(), value, place });
        }
        if !matches!(self.file_mode, 0o600 | 0o660) {
            let (found, place) = (format!("{:04o}", self.file_mode), places.file_mode);
            return Err(ConfigError::FileModeRefused { link: link(), found, place });
        }
        if self.huge_pages == HugePages::Hugetlb && self.backing != Backing::Memfd {
            return Err(ConfigError::HugetlbNeedsMemfd { link: link(), place: places.huge_pages });
        }
        for pool in PoolId::ALL {
            self.check_pool(pool, &places.pools[pool.index()])?;
        }
        if !self.pool(PoolId::CpuMsg).is_enabled() {
            let at = &places.pools[PoolId::CpuMsg.index()];
            let place = if self.pool(PoolId::CpuMsg).pool_len == 0 { at.pool_len } else { at.buf_size };
            return Err(ConfigError::CpuMsgMissing { link: link(), place });
        }
        if self.ring_mode == RingMode::Broadcast {
            self.check_broadcast(places)?;
        }
        let bytes = self.payload_bytes();
        if bytes > MAX_SEGMENT_BYTES {
            return Err(ConfigError::LinkTooLarge { link: link(), bytes, place: places.link });
        }
        Ok(())
    }

    fn check_broadcast(&self, places: &LinkPlaces) -> Result<(), ConfigError> {
        let link = || self.name.clone();
        let BroadcastConfig { slow, history, evict_after_ms } = self.broadcast;
        if self.receivers == Receivers::One {
            return Err(ConfigError::BroadcastReceivers { link: link(), place: places.link });
        }
        if slow == SlowReaders::Skip && self.ring_len < 2 {
            return Err(ConfigError::SkipNeedsSlots { link: link(), place: places.ring_len });
        }
        let pools = PoolId::ALL.into_iter().filter(|&pool| self.pool(pool).is_enabled());
        let pools = pools.map(|pool| (format!("pools.{pool}.pool_len"), self.pool(pool).pool_len - 1));
        let ring = match slow {
            SlowReaders::Evict => ("half of ring.len".to_owned(), self.ring_len / 2),
            _ => ("ring.len".to_owned(), self.ring_len - 1),
        };
        for (what, limit) in std::iter::once(ring).chain(pools) {
            if history > limit {
                let place = places.history;
                return Err(ConfigError::HistoryTooLong {
                    link: link(),
                    value: history.into(),
                    what,
                    limit,
                    place,
                });
            }
        }
        if slow == SlowReaders::Evict && !(1..=MAX_EVICT_AFTER_MS).contains(&evict_after_ms) {
            let (value, place) = (evict_after_ms.into(), places.evict_after_ms);
            return Err(ConfigError::EvictAfterOutOfRange { link: link(), value, place });
        }
        Ok(())
    }

    fn check_pool(&self, pool: PoolId, places: &PoolPlaces) -> Result<(), ConfigError> {
        let link = || self.name.clone();
        let size = self.pool(pool);
        if u64::from(size.buf_size_bytes) > MAX_BUF_SIZE_BYTES {
            let (value, place) = (size.buf_size_bytes.into(), places.buf_size);
            return Err(ConfigError::BufSizeTooLarge { link: link(), pool, value, place });
        }
        if size.pool_len > MAX_POOL_LEN {
            let (value, place) = (size.pool_len.into(), places.pool_len);
            return Err(ConfigError::PoolLenTooLarge { link: link(), pool, value, place });
        }
        let bytes = size.payload_bytes();
        if bytes > MAX_SEGMENT_BYTES {
            return Err(ConfigError::SegmentTooLarge { link: link(), pool, bytes, place: places.pool_len });
        }
        Ok(())
    }
}

/// Positions of a link's values in the text; the position of the link for values that the text does not have.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LinkPlaces {
    pub(super) link: Position,
    pub(super) ring_len: Position,
    pub(super) history: Position,
    pub(super) evict_after_ms: Position,
    pub(super) huge_pages: Position,
    pub(super) spin_us: Position,
    pub(super) request_window: Position,
    pub(super) latency_sample: Position,
    pub(super) file_mode: Position,
    pub(super) pools: [PoolPlaces; PoolId::COUNT],
}

/// Positions of a pool's two numbers in the text.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PoolPlaces {
    pub(super) buf_size: Position,
    pub(super) pool_len: Position,
}

impl LinkPlaces {
    /// Sets all positions to the link's; the caller sets each field's own position afterwards.
    #[cfg(feature = "yaml")]
    pub(super) fn all_at(link: Position) -> Self {
        let pools = [PoolPlaces { buf_size: link, pool_len: link }; PoolId::COUNT];
        Self {
            link,
            ring_len: link,
            history: link,
            evict_after_ms: link,
            huge_pages: link,
            spin_us: link,
            request_window: link,
            latency_sample: link,
            file_mode: link,
            pools,
        }
    }
}
