//! Creating a link, attaching to it, and adopting one that a crash left behind.

use std::io::ErrorKind::{AlreadyExists, NotFound};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use shmesh_sys::process::ProcessIdentity;
use shmesh_sys::{cgroup, file};

use super::attachment::Attachment;
use super::bell::Bells;
use super::host::{
    GatherOutcome, HostAnswer, HostListener, NO_HOST, OTHER_SIDECAR, SILENT, WANTING, ask, gather, listen,
    lock_file, locking, refused, serve_memory,
};
use super::monitor::Start;
use super::removal::{complete, retire};
use super::{Link, Shared, core_of, device};
use crate::config::{Backing, BroadcastConfig, LinkConfig, LinkName, PoolId, Receivers, SlowReaders};
use crate::error::{Error, ErrorKind, Result};
use crate::participant::{Admission, Participant, Side};
use crate::segment::header::{Conduct, Header};
use crate::segment::layout::LinkShape;
use crate::segment::lock::{Host, Lock};
use crate::segment::store::{Segment, Store};

/// Environment variable with the IPC directory.
///
/// Read by [`LinkOptions::new`]. An empty value counts as unset.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use shmesh::{LinkOptions, config::LinkConfig};
/// // SAFETY: there is no other thread yet.
/// unsafe { std::env::set_var(shmesh::DIR_VARIABLE, dir.path()) };
/// let link = LinkOptions::new().create(&LinkConfig::new("fronthaul".parse()?))?;
/// assert!(dir.path().join("fronthaul_shm").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const DIR_VARIABLE: &str = "SHMESH_DIR";
/// The IPC directory if none is set.
///
/// ```
/// # // SAFETY: there is no other thread yet.
/// # unsafe { std::env::remove_var(shmesh::DIR_VARIABLE) };
/// let missing = shmesh::Link::attach("does-not-exist").unwrap_err();
/// let there = std::path::Path::new(shmesh::DEFAULT_DIR);
/// assert!(matches!(missing.kind(), shmesh::ErrorKind::NotFound { dir, .. } if dir == there));
/// ```
pub const DEFAULT_DIR: &str = "/dev/shm";
/// How long processes that start or end at the same moment may take to settle which of them creates, hosts or removes the
/// link.
const SETTLE: Duration = Duration::from_secs(2);
/// Interval of attempts to open a link that does not exist yet.
pub(super) const RETRY: Duration = Duration::from_millis(2);
/// How long a seat may stay taken for a moment: each recovery of a dead participant takes one.
pub(super) const RECOVERY: Duration = Duration::from_millis(500);
/// How long a participant may take to be admitted before another newcomer is refused: it may have to empty the link first.
const ADMISSION_MAX: Duration = Duration::from_secs(2);

/// Options for creating a link or attaching to one.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use shmesh::{LinkOptions, Side, config::LinkConfig};
/// let options = LinkOptions::new().dir(dir.path());
/// let missing = options.attach("fronthaul", Side::Secondary);
/// assert!(missing.is_err());
///
/// let phy = options.create(&LinkConfig::new("fronthaul".parse()?))?;
/// let mac = options.attach("fronthaul", Side::Secondary)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinkOptions {
    dir: PathBuf,
    timeout: Duration,
    prefault: bool,
    second_primary: bool,
    monitor: bool,
    fresh: bool,
    guard_truncation: bool,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LinkOptions {
    /// The default options. The IPC directory is the value of the environment variable `SHMESH_DIR`, or `/dev/shm`.
    ///
    /// [`attach`](Self::attach) does not wait, and maps all pages at once.
    #[must_use]
    pub fn new() -> Self {
        let dir = std::env::var_os(DIR_VARIABLE).filter(|dir| !dir.is_empty());
        Self {
            dir: dir.map_or_else(|| DEFAULT_DIR.into(), PathBuf::from),
            timeout: Duration::ZERO,
            prefault: true,
            second_primary: false,
            monitor: true,
            fresh: false,
            guard_truncation: false,
        }
    }

    /// Sets another IPC directory.
    ///
    /// It must exist, and all processes of the link must use the same one.
    ///
    /// ```
    /// use shmesh::{LinkOptions, Side, config::LinkConfig};
    /// # let (here, there) = (tempfile::tempdir()?, tempfile::tempdir()?);
    /// let phy = LinkOptions::new().dir(here.path()).create(&LinkConfig::new("fronthaul".parse()?))?;
    /// assert!(LinkOptions::new().dir(here.path()).attach("fronthaul", Side::Secondary).is_ok());
    /// assert!(LinkOptions::new().dir(there.path()).attach("fronthaul", Side::Secondary).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = dir.into();
        self
    }

    /// Sets how long [`attach`](Self::attach) waits for the link to exist. By default it does not wait.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use std::time::Duration;
    /// use shmesh::{Side, config::LinkConfig};
    /// let patient = options.clone().timeout(Duration::from_secs(30));
    /// let mac = std::thread::spawn(move || patient.attach("fronthaul", Side::Secondary));
    /// let phy = options.create(&LinkConfig::new("fronthaul".parse()?))?; // before or after `attach`
    /// assert_eq!(mac.join().expect("it does not panic")?.name(), phy.name());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets whether attaching maps all pages at once, so that none is faulted in later. On by default.
    ///
    /// [`create`](Self::create) uses [`LinkConfig::prefault`] instead.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::Side;
    /// use shmesh::config::{LinkConfig, PoolId};
    /// let phy = options.create(&LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.prefault(false).attach("fronthaul", Side::Secondary)?; // for a process that rarely uses the link
    /// assert_eq!(mac.pool(PoolId::CpuData), phy.pool(PoolId::CpuData));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn prefault(mut self, prefault: bool) -> Self {
        self.prefault = prefault;
        self
    }

    /// Allows this process on the primary side while another process is the primary, for processes that share the work of
    /// that side. Only with ring mode mpmc. Off by default, so that a second primary by mistake is an error.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::{Side, config::LinkConfig};
    /// let trainer = options.create(&LinkConfig::new("batches".parse()?))?;
    /// let second = options.allow_second_primary(true).attach("batches", Side::Primary)?; // in another process, too
    /// assert_eq!(second.side(), trainer.side());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn allow_second_primary(mut self, allow: bool) -> Self {
        self.second_primary = allow;
        self
    }

    /// Sets whether a thread of this process watches the link and recovers dead participants. On by default: one thread
    /// watches all links of a process.
    ///
    /// Without it, this process detects a death, and gets its event, only when another process with a monitor recovers it,
    /// or when this process calls [`recover`](Link::recover). A sidecar recovers when it starts, and when a process that is
    /// connected to it dies; a process without a monitor is not connected. Events of attaching and detaching do not depend
    /// on the monitor.
    ///
    /// A link without names (`backing: memfd`), or with a pool in device memory, is always watched.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::config::LinkConfig;
    /// let link = options.monitor(false).create(&LinkConfig::new("fronthaul".parse()?))?;
    /// assert_eq!(link.recover()?.participants, 0); // now and then, or when a pool is empty
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn monitor(mut self, monitor: bool) -> Self {
        self.monitor = monitor;
        self
    }

    /// Sets whether [`create`](Self::create) empties an existing link: messages and posts of an earlier run are dropped,
    /// buffers of dead participants are recovered, and the type of typed messages is forgotten. Off by default.
    ///
    /// Fails while another participant is attached, including a handle of this process. A sidecar that keeps the link does
    /// not count. Participants that attach meanwhile wait until the link is empty, for at most a second.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::{ErrorKind, Side, config::LinkConfig};
    /// let config = LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// let mac = options.attach("fronthaul", Side::Secondary)?;
    /// mac.send_inline(7, 0, b"of the last run")?;
    /// drop(phy);
    ///
    /// let fresh = options.fresh(true);
    /// assert!(matches!(fresh.create(&config).unwrap_err().kind(), ErrorKind::InUse { .. }));
    /// mac.send_inline(7, 0, b"the link is unchanged")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn fresh(mut self, fresh: bool) -> Self {
        self.fresh = fresh;
        self
    }

    /// Sets whether this process survives if a peer truncates a named segment. Off by default.
    ///
    /// Without it, access to the truncated part raises SIGBUS, which kills the process. With it, a SIGBUS handler maps
    /// zeros there, and calls on the link fail with [`Damaged`](crate::ErrorKind::Damaged) from then on. SIGBUS at other
    /// addresses is passed to the handler that was installed before; a handler that is installed later must call this one.
    ///
    /// Links without names (`backing: memfd`) need no guard: their segments cannot be truncated.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::ErrorKind;
    /// let link = options.guard_truncation(true).create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// std::fs::File::options().write(true).open(dir.path().join("fronthaul_shm"))?.set_len(0)?;
    /// assert!(matches!(link.loan().unwrap_err().kind(), ErrorKind::Damaged { .. }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn guard_truncation(mut self, guard_truncation: bool) -> Self {
        self.guard_truncation = guard_truncation;
        self
    }

    /// Creates the link as its primary, or adopts the link of a primary that has ended. An adopted link keeps its queued
    /// messages, unless [`fresh`](Self::fresh) is on. [`Link::was_created`] tells which of the two happened.
    ///
    /// # Errors
    /// [`Config`](crate::ErrorKind::Config) when the configuration breaks a rule;
    /// [`NoDirectory`](crate::ErrorKind::NoDirectory) when there is no IPC directory;
    /// [`AlreadyOwned`](crate::ErrorKind::AlreadyOwned) while another process is its primary; [`Differs`](crate::ErrorKind::Differs) when it exists with another shape, backing or notification;
    /// [`InUse`](crate::ErrorKind::InUse) when it shall be emptied, and another participant is attached;
    /// [`NoSpace`](crate::ErrorKind::NoSpace), [`MemoryLimit`](crate::ErrorKind::MemoryLimit), [`Permission`](crate::ErrorKind::Permission) and what opening a segment can find.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::{ErrorKind, Side, config::LinkConfig};
    /// let mut config = LinkConfig::new("fronthaul".parse()?);
    /// let phy = options.create(&config)?;
    /// assert_eq!(phy.side(), Side::Primary);
    /// config.ring_len = 64;
    /// assert!(matches!(options.create(&config).unwrap_err().kind(), ErrorKind::Differs { .. }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create(&self, config: &LinkConfig) -> Result<Link> {
        config.validate()?;
        let store = self.store(config);
        self.settle(&store, |limit| self.try_open(&store, Some(config), Side::Primary, limit))
    }

    /// Attaches to an existing link.
    ///
    /// # Errors
    /// [`Name`](crate::ErrorKind::Name) when `link` is no link name; [`NoDirectory`](crate::ErrorKind::NoDirectory) when there is
    /// no IPC directory;
    /// [`NotFound`](crate::ErrorKind::NotFound) when it does not, after the timeout; [`AlreadyOwned`](crate::ErrorKind::AlreadyOwned) when this side has its one process
    /// (the primary side always, both with ring mode `spsc`); [`ReceiverTaken`](crate::ErrorKind::ReceiverTaken) when it has its
    /// one receiver; and what opening a segment can find.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// use shmesh::{ErrorKind, Side, config::LinkConfig};
    /// let missing = options.attach("fronthaul", Side::Secondary).unwrap_err();
    /// assert!(matches!(missing.kind(), ErrorKind::NotFound { .. }));
    /// let phy = options.create(&LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = options.attach("fronthaul", Side::Secondary)?;
    /// assert_eq!(mac.ring_len(), phy.ring_len(), "the link itself says how it is made");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn attach(&self, link: &str, side: Side) -> Result<Link> {
        let name: LinkName = link.parse()?;
        let mut config = LinkConfig::new(name);
        config.prefault = self.prefault;
        let store = self.store(&config);
        self.settle(&store, |limit| self.try_open(&store, None, side, limit))
    }

    pub(super) fn store(&self, config: &LinkConfig) -> Store {
        Store { guard_truncation: self.guard_truncation, ..Store::new(config, &self.dir) }
    }

    /// Retries until the link is open, or the time limit of what it waits for has passed.
    pub(super) fn settle<T>(
        &self,
        store: &Store,
        attempt: impl Fn(Duration) -> Result<Attempt<T>>,
    ) -> Result<T> {
        let start = Instant::now();
        let patience = SETTLE.max(self.timeout);
        loop {
            let attempt = match attempt(patience.saturating_sub(start.elapsed())) {
                Err(error) if matches!(error.kind(), ErrorKind::Host { what: SILENT, .. }) => {
                    Attempt::Unsettled(SILENT)
                }
                attempt => attempt?,
            };
            let (limit, error) = match attempt {
                Attempt::Done(done) => return Ok(done),
                Attempt::Absent => {
                    let (link, dir) = (Arc::clone(&store.link), self.dir.clone());
                    let absent = if dir.is_dir() {
                        ErrorKind::NotFound { link, dir }
                    } else {
                        ErrorKind::NoDirectory { link, dir }
                    };
                    (self.timeout, absent)
                }
                Attempt::Unsettled(what) => (patience, refused(store, what)),
            };
            if start.elapsed() >= limit {
                return Err(error.into());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Makes one attempt, which may take up to `limit`.
    fn try_open(
        &self,
        store: &Store,
        create: Option<&LinkConfig>,
        side: Side,
        limit: Duration,
    ) -> Result<Attempt<Link>> {
        let host = create.map(|_| Host::Participant);
        self.try_enter(store, create, host, limit)?.and_then(|entered| {
            let EnteredLink { shared, session, listening } = entered;
            let attachment = Arc::new(Attachment::new(&shared, listening.as_ref()));
            let link = self.admit(&shared, &attachment, side)?;
            if self.fresh && create.is_some() {
                link.empty()?;
            }
            // Before others can get the link from this process, so that they find its primary.
            if self.monitor || link.shared.has_descriptors() {
                link.attachment.watch(Start { session, listening })?;
            }
            link.announce_attached();
            // From now on the side's history shows which process has it.
            link.core().admission_role(side).release(&link.endpoint.me);
            Ok(link)
        })
    }

    /// Makes one attempt to map the link's memory and to be present, and to become the host, if that is requested and
    /// needed. An attempt that is not successful leaves nothing.
    pub(super) fn try_enter(
        &self,
        store: &Store,
        create: Option<&LinkConfig>,
        host: Option<Host>,
        limit: Duration,
    ) -> Result<Attempt<EnteredLink>> {
        let Some(lock) = lock_file(store, create.is_some())?.map(Arc::new) else {
            return Ok(Attempt::Absent);
        };
        let entered = self.enter(store, create, host, limit, &lock);
        if !matches!(entered, Ok(Attempt::Done(_))) {
            retire(store, &lock, None);
        }
        entered
    }

    fn enter(
        &self,
        store: &Store,
        create: Option<&LinkConfig>,
        host: Option<Host>,
        limit: Duration,
        lock: &Arc<Lock>,
    ) -> Result<Attempt<EnteredLink>> {
        if create.is_some()
            && self.is_late(limit)
            && lock.is_closed().map_err(|error| locking(store, error))?
        {
            complete(store, lock);
            return Ok(Attempt::Unsettled(GOING));
        }
        // 1. A link with names consists of its files.
        if let Some(attempt) = self.by_name(store, create, lock, limit)? {
            let segments = match attempt {
                Attempt::Done(segments) => segments,
                unsettled => return unsettled.and_then(|_| unreachable!("it is not done")),
            };
            if let Some(config) = create {
                same_shape(store, config, &segments)?;
            }
            let shared = assemble(store, segments, Arc::clone(lock))?;
            let listening = serve_memory(&shared, host)?;
            if host == Some(Host::Sidecar) && listening.is_none() {
                return Ok(Attempt::Unsettled(OTHER_SIDECAR));
            }
            let is_served = listening.is_some() || !shared.has_descriptors();
            let session = if is_served { None } else { session_with_host(&shared) };
            return Ok(Attempt::Done(EnteredLink { shared, session, listening }));
        }
        // 2. Memory without names comes from the host.
        let is_host = |asked: (Host, u64)| lock.host().is_ok_and(|now| now == Some(asked));
        if host != Some(Host::Sidecar) {
            match ask(store, lock)? {
                HostAnswer::Offer(offer, connection, at) => {
                    // Present from now on. If it still is the host, the link still exists.
                    if !join(store, lock)? || !is_host(at) {
                        return Ok(Attempt::Unsettled(GOING));
                    }
                    let Some(segments) = store.existing(offer.segments)? else {
                        return Ok(Attempt::Unsettled(REMOVED));
                    };
                    if let Some(config) = create {
                        same_shape(store, config, &segments)?;
                    }
                    let shared = assemble(store, segments, Arc::clone(lock))?;
                    let session = Some(session(&shared, connection, at));
                    return Ok(Attempt::Done(EnteredLink { shared, session, listening: None }));
                }
                HostAnswer::NeedsMemory => return Ok(Attempt::Unsettled(WANTING)),
                HostAnswer::NoHost => {}
            }
        }
        let (Some(config), Some(host)) = (create, host) else {
            if lock.host().map_err(|error| locking(store, error))?.is_some() {
                return Ok(Attempt::Unsettled(SILENT));
            }
            let is_anybody = lock.others_joined().map_err(|error| locking(store, error))?;
            return Ok(if is_anybody { Attempt::Unsettled(NO_HOST) } else { Attempt::Absent });
        };
        // 3. There is no host, so this process becomes it.
        let Some(listening) = listen(store, lock, host)? else {
            let is_open = lock.is_open().map_err(|error| locking(store, error))?;
            return Ok(Attempt::Unsettled(if is_open { SECOND } else { GOING }));
        };
        let entered = self.by_offer(store, config, host, lock, &listening, limit).and_then(|attempt| {
            attempt.and_then(|segments| {
                let shared = assemble(store, segments, Arc::clone(lock))?;
                if lock.others_joined().map_err(|error| locking(store, error))? {
                    shared.begin_to_gather();
                }
                Ok(shared)
            })
        });
        match entered {
            Ok(Attempt::Done(shared)) => {
                Ok(Attempt::Done(EnteredLink { shared, session: None, listening: Some(listening) }))
            }
            other => {
                listening.place.end(lock);
                other?.and_then(|_| unreachable!("it is not done"))
            }
        }
    }

    /// The segments without names of a link, for its new host: from processes on the link, or new ones if there are none.
    fn by_offer(
        &self,
        store: &Store,
        config: &LinkConfig,
        host: Host,
        lock: &Lock,
        listening: &HostListener,
        limit: Duration,
    ) -> Result<Attempt<Vec<Segment>>> {
        let failed = |error| locking(store, error);
        if host == Host::Participant && lock.published(Host::Sidecar).map_err(failed)?.is_some() {
            return Ok(Attempt::Unsettled(WANTING));
        }
        let is_anybody = || {
            // A participant that is the host becomes present a moment later.
            let other = host == Host::Sidecar && lock.published(Host::Participant).map_err(failed)?.is_some();
            // The process that removes the link has no memory to offer.
            Ok(other || lock.others_joined().map_err(failed)? && !lock.is_closed().map_err(failed)?)
        };
        let accept = |offered| {
            let Some(segments) = store.existing(offered)? else { return Ok(None) };
            same_shape(store, config, &segments)?;
            Ok(Some(segments))
        };
        let segments = match gather(listening, limit, is_anybody, accept)? {
            GatherOutcome::Memory(segments) => segments,
            GatherOutcome::NoOffer => return Ok(Attempt::Unsettled(WANTING)),
            GatherOutcome::NoProcess
                if config.backing == Backing::Named || lock.is_closed().map_err(failed)? =>
            {
                return Ok(Attempt::Unsettled(GOING));
            }
            GatherOutcome::NoProcess => self.make_segments(store, config, true)?.unwrap_or_default(),
        };
        if !join(store, lock)? {
            return Ok(Attempt::Unsettled(GOING));
        }
        Ok(Attempt::Done(segments))
    }

    /// The segments of a link whose memory has names, which needs no other process. They are created if `create` says so.
    /// Returns `None` if it is not such a link.
    fn by_name(
        &self,
        store: &Store,
        create: Option<&LinkConfig>,
        lock: &Lock,
        limit: Duration,
    ) -> Result<Option<Attempt<Vec<Segment>>>> {
        let failed = |error| locking(store, error);
        // Present only if there is something to attach to: processes with memory to offer check which processes are
        // present.
        if !std::fs::symlink_metadata(store.path(None)).is_err_and(|error| error.kind() == NotFound) {
            // Before the check: a process that detaches meanwhile must see that we are present.
            if !join(store, lock)? {
                return Ok(Some(Attempt::Unsettled(GOING)));
            }
            if let Some(segments) = store.existing(Vec::new())? {
                return Ok(Some(Attempt::Done(segments)));
            }
            lock.leave();
        }
        let Some(config) = create.filter(|config| config.backing == Backing::Named) else { return Ok(None) };
        // One creator after the other, so that they do not need the space twice. But a stopped creator does not delay the
        // others for long: only one process can take the final step of creating the link, whether it has the host role or
        // not.
        let has_host_role = lock.try_take_host_role().map_err(failed)?;
        if !(has_host_role || self.is_late(limit)) || !lock.is_open().map_err(failed)? {
            return Ok(Some(Attempt::Unsettled(GOING)));
        }
        if lock.others_joined().map_err(failed)? {
            lock.leave_host_role();
            // There may be a link with this name whose memory has no names.
            let has_host = lock.host().map_err(failed)?.is_some();
            return Ok((!has_host).then_some(Attempt::Unsettled(REMOVED)));
        }
        // Another process may have created it since the check.
        let segments = match store.existing(Vec::new())? {
            Some(segments) => segments,
            None => match self.make_segments(store, config, has_host_role)? {
                Some(segments) => segments,
                None => return Ok(Some(Attempt::Unsettled(GOING))),
            },
        };
        if !join(store, lock)? {
            return Ok(Some(Attempt::Unsettled("has a lock file that another program has locked")));
        }
        lock.leave_host_role();
        Ok(Some(Attempt::Done(segments)))
    }

    /// Whether a creator has waited so long for another process that this must be stopped, or stuck.
    fn is_late(&self, limit: Duration) -> bool {
        SETTLE.max(self.timeout).saturating_sub(limit) >= SETTLE / 2
    }

    /// Creates the link's segments, if no link was found. Returns `None` if another process was faster. Without the host
    /// role, another process may be using the usual names of the pools, so other names are used.
    fn make_segments(
        &self,
        store: &Store,
        config: &LinkConfig,
        has_host_role: bool,
    ) -> Result<Option<Vec<Segment>>> {
        let shape = LinkShape::of(config);
        let epoch = file::random()
            .map(u64::from_ne_bytes)
            .map_err(|error| Error::system(&store.link, "read /dev/urandom", error))?;
        let one_receiver = config.receivers == Receivers::One;
        let conduct = Conduct { notify: config.notify, spin_us: config.spin_us, one_receiver };
        let header = |pool| Header { pool, epoch, shape, conduct };
        let pools = PoolId::ALL.into_iter().filter(|&pool| shape.pools[pool as usize].1 > 0);
        let headers: Vec<_> = std::iter::once(None).chain(pools.map(Some)).map(header).collect();

        if has_host_role {
            remove_remnants(store)?;
        }
        let needed = headers.iter().map(Header::bytes).sum();
        if let Some(room) = cgroup::room_bytes().filter(|&room| needed > room) {
            return Err(Error::from(ErrorKind::MemoryLimit { link: Arc::clone(&store.link), needed, room }));
        }
        let segments = headers.into_iter().map(|header| store.create(header)).collect::<Result<Vec<_>>>()?;
        core_of(store, &segments)?.format();
        if store.backing == Backing::Memfd || publish(store, &segments, has_host_role)? {
            return Ok(Some(segments));
        }
        Ok(None)
    }
}

/// Gives segments their names, the link's own last: a process that finds it finds all of them. Returns `false` if another
/// process has created the link.
fn publish(store: &Store, segments: &[Segment], has_host_role: bool) -> Result<bool> {
    let mut published = Vec::new();
    let done = publish_each(store, segments, has_host_role, &mut published);
    if !matches!(done, Ok(true)) {
        for path in published {
            let _ = std::fs::remove_file(path);
        }
    }
    done
}

fn publish_each(
    store: &Store,
    segments: &[Segment],
    has_host_role: bool,
    published: &mut Vec<PathBuf>,
) -> Result<bool> {
    for segment in segments[1..].iter().chain(&segments[..1]) {
        let spare = segment.header.pool.map(|pool| store.spare_path(pool, segment.header.epoch));
        let usual = store.path(segment.header.pool);
        let paths = match spare {
            Some(spare) if has_host_role => [Some(usual), Some(spare)],
            Some(spare) => [Some(spare), None],
            None => [Some(usual), None],
        };
        let mut done = false;
        for path in paths.into_iter().flatten() {
            let file = segment.file.as_ref().map_or(Ok(()), |file| file::publish(file, &path));
            match file {
                Ok(()) => {
                    published.push(path);
                    done = true;
                    break;
                }
                Err(error) if error.kind() == AlreadyExists => {}
                Err(error) => return Err(store.refused(&path.display().to_string(), error)),
            }
        }
        if !done {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes pools without a link, which a creator left when it died between two names. This is done before new ones are
/// created: a directory may have no more space than one link needs.
fn remove_remnants(store: &Store) -> Result<()> {
    if store.backing != Backing::Named {
        return Ok(());
    }
    for pool in PoolId::ALL {
        // Only files of ours: `open` refuses anything else.
        if store.open(Some(pool))?.is_some() {
            let path = store.path(Some(pool));
            std::fs::remove_file(&path).map_err(|error| store.refused(&path.display().to_string(), error))?;
        }
    }
    Ok(())
}

/// The result of one attempt to open a link.
pub(super) enum Attempt<T> {
    Done(T),
    /// There is no such link.
    Absent,
    /// The link is being created or removed, or has no host. The text is the error if that does not end.
    Unsettled(&'static str),
}

impl<T> Attempt<T> {
    pub(super) fn and_then<U>(self, next: impl FnOnce(T) -> Result<U>) -> Result<Attempt<U>> {
        Ok(match self {
            Self::Done(done) => Attempt::Done(next(done)?),
            Self::Absent => Attempt::Absent,
            Self::Unsettled(what) => Attempt::Unsettled(what),
        })
    }
}

/// A link whose memory is mapped, and on which this process is present.
pub(super) struct EnteredLink {
    pub(super) shared: Arc<Shared>,
    /// The connection to the host that provided it.
    pub(super) session: Option<(OwnedFd, (Host, u64))>,
    /// The listener, if this process is the host now.
    pub(super) listening: Option<HostListener>,
}

const GOING: &str = "is starting or ending, or the process that removes the link is stopped or stuck; retry";
const REMOVED: &str = "runs, but the files of the link were removed; end the link's processes first";
const SECOND: &str =
    "is another sidecar, or a process that was stopped or got stuck while it created the link; end it first";

/// Becomes present. Returns `false` if the link is being removed, or was.
fn join(store: &Store, lock: &Lock) -> Result<bool> {
    let failed = |error| locking(store, error);
    Ok(lock.try_join().map_err(failed)? && lock.is_open().map_err(failed)?)
}

/// Makes the connection by which a link was provided the session with its host.
fn session(shared: &Shared, connection: OwnedFd, host: (Host, u64)) -> (OwnedFd, (Host, u64)) {
    shared.fetch_memory(&connection);
    let _ = file::set_nonblocking(&connection);
    (connection, host)
}

/// Opens a session with the host of a link with device pools, if it answers.
fn session_with_host(shared: &Shared) -> Option<(OwnedFd, (Host, u64))> {
    match ask(&shared.store, &shared.lock) {
        Ok(HostAnswer::Offer(_, connection, host)) => Some(session(shared, connection, host)),
        _ => None,
    }
}

/// Assembles the part of a link that all handles of this process share.
fn assemble(store: &Store, mut segments: Vec<Segment>, lock: Arc<Lock>) -> Result<Arc<Shared>> {
    let me = ProcessIdentity::me()
        .map_err(|error| Error::system(&store.link, "read /proc/self (is /proc mounted?)", error))?;
    let core = core_of(store, &segments)?;
    let conduct = segments[0].header.conduct;
    let mode = segments[0].file.as_ref().map_or(Ok(store.file_mode), file::mode_of);
    let file_mode = mode.map_err(|error| store.refused(&store.path(None).display().to_string(), error))?;
    let metadata = segments[0].file.as_ref().and_then(|file| file.metadata().ok());
    let owner = metadata.map(|metadata| (metadata.uid(), metadata.gid()));
    let backing = segments_backing(&segments, store);
    if backing == Backing::Named && core.shape.device_pools().next().is_none() {
        // Mapped, and never handed out. A process may have thousands of links, so the descriptors are closed.
        segments.iter_mut().for_each(|segment| segment.file = None);
    }
    Ok(Arc::new(Shared {
        core,
        store: Store { backing, file_mode, ..store.clone() },
        me,
        segments,
        notify: conduct.notify,
        bells: Bells::default(),
        owner,
        spin_us: conduct.spin_us,
        lock,
        broker: Mutex::new(None),
        memories: device::Memories::default(),
        gathering: OnceLock::new(),
    }))
}

/// The backing that the segments really have: a process that attaches does not choose it.
fn segments_backing(segments: &[Segment], store: &Store) -> Backing {
    if store.backing == Backing::Memfd || segments[0].file.as_ref().is_some_and(file::is_size_sealed) {
        Backing::Memfd
    } else {
        Backing::Named
    }
}

/// Checks that an existing link has the shape of the configuration.
fn same_shape(store: &Store, config: &LinkConfig, segments: &[Segment]) -> Result<()> {
    let (found, asked) = (segments[0].header.shape, LinkShape::of(config));
    let differs = |field: String, existing: String, asked: String| {
        Error::from(ErrorKind::Differs { link: Arc::clone(&store.link), field, existing, asked })
    };
    if found.ring_capacity != asked.ring_capacity {
        let (existing, asked) = (found.ring_capacity.to_string(), asked.ring_capacity.to_string());
        return Err(differs("ring.len".into(), existing, asked));
    }
    if found.ring_mode() != asked.ring_mode() {
        let mode = |shape: LinkShape| format!("{:?}", shape.ring_mode()).to_lowercase();
        return Err(differs("ring.mode".into(), mode(found), mode(asked)));
    }
    if let (Some(found), Some(asked)) = (found.broadcast, asked.broadcast) {
        let slow = |rules: BroadcastConfig| format!("{:?}", rules.slow).to_lowercase();
        if found.slow != asked.slow {
            return Err(differs("ring.slow".into(), slow(found), slow(asked)));
        }
        if found.history != asked.history {
            let (existing, asked) = (found.history.to_string(), asked.history.to_string());
            return Err(differs("ring.history".into(), existing, asked));
        }
        if found.slow == SlowReaders::Evict && found.evict_after_ms != asked.evict_after_ms {
            let (existing, asked) = (found.evict_after_ms.to_string(), asked.evict_after_ms.to_string());
            return Err(differs("ring.evict_after_ms".into(), existing, asked));
        }
    }
    if found.request_window != asked.request_window {
        let (existing, asked) = (found.request_window.to_string(), asked.request_window.to_string());
        return Err(differs("requests.window".into(), existing, asked));
    }
    if found.latency_sample != asked.latency_sample {
        let text = |sample| if sample == 0 { "none".to_owned() } else { format!("{sample}") };
        let (existing, asked) = (text(found.latency_sample), text(asked.latency_sample));
        return Err(differs("latency.sample".into(), existing, asked));
    }
    for pool in PoolId::ALL {
        let (existing, asked) = (found.pools[pool as usize], asked.pools[pool as usize]);
        if existing != asked {
            let text = |(size, len): (u32, u32)| format!("{size} bytes x {len}");
            return Err(differs(format!("pools.{}", pool.name()), text(existing), text(asked)));
        }
    }
    let backing = segments_backing(segments, &Store { backing: Backing::Named, ..store.clone() });
    if backing != config.backing {
        let text = |backing| format!("{backing:?}").to_lowercase();
        return Err(differs("backing".into(), text(backing), text(config.backing)));
    }
    let conduct = segments[0].header.conduct;
    let asked = config.receivers == Receivers::One;
    if conduct.one_receiver != asked {
        let text = |one| if one { "one" } else { "many" }.to_owned();
        return Err(differs("receivers".into(), text(conduct.one_receiver), text(asked)));
    }
    if conduct.notify != config.notify {
        let (existing, asked) = (conduct.notify.to_string(), config.notify.to_string());
        return Err(differs("notify.enabled".into(), existing, asked));
    }
    if config.notify && conduct.spin_us != config.spin_us {
        let (existing, asked) = (conduct.spin_us.to_string(), config.spin_us.to_string());
        return Err(differs("notify.spin_us".into(), existing, asked));
    }
    Ok(())
}

impl LinkOptions {
    /// Takes a seat, unless this side takes one process and has it.
    fn admit(&self, shared: &Arc<Shared>, attachment: &Arc<Attachment>, side: Side) -> Result<Link> {
        let link = Link::seated_beside_emptier(shared, attachment, side)?;
        let me = &link.shared.me;
        let single = link.core().shape.single;
        let one_receiver = link.shared.segments[0].header.conduct.one_receiver && !single;
        let refused = |owner: Participant| {
            let (link, pid) = (link.link(), owner.word.pid());
            Error::from(if one_receiver && (side == Side::Secondary || self.second_primary) {
                ErrorKind::ReceiverTaken { link, side, pid }
            } else {
                ErrorKind::AlreadyOwned { link, side, pid }
            })
        };
        if side == Side::Primary {
            let claimed = link.core().primary_role().claim(&link.endpoint.me, &link.core().seats);
            if let Err(owner) = claimed
                && !owner.is_of(me)
                && (!self.second_primary || single || one_receiver)
            {
                return Err(refused(owner));
            }
        }
        if one_receiver || single && side == Side::Secondary {
            let start = Instant::now();
            let (core, mine) = (link.core(), &link.endpoint.me);
            loop {
                match core.seats.admit_alone(mine, core.admission_role(side), |other| other.is_of(me)) {
                    Admission::Admitted => break,
                    Admission::Taken(owner) => return Err(refused(owner)),
                    Admission::Undecided(other) if start.elapsed() >= ADMISSION_MAX => {
                        return Err(refused(other));
                    }
                    Admission::Undecided(_) => std::thread::sleep(RETRY),
                }
                // It may have died.
                link.recover()?;
            }
        }
        Ok(link)
    }
}

impl Link {
    /// Calls [`LinkOptions::create`] with the default options.
    ///
    /// # Errors
    /// As [`LinkOptions::create`].
    pub fn create(config: &LinkConfig) -> Result<Self> {
        LinkOptions::new().create(config)
    }

    /// Calls [`LinkOptions::attach`] with the default options, as the secondary.
    ///
    /// # Errors
    /// As [`LinkOptions::attach`].
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// use shmesh::{Link, Side, config::LinkConfig};
    /// # // SAFETY: there is no other thread yet.
    /// # unsafe { std::env::set_var("SHMESH_DIR", dir.path()) };
    /// let phy = Link::create(&LinkConfig::new("fronthaul".parse()?))?;
    /// let mac = Link::attach("fronthaul")?; // in another process
    /// assert_eq!((mac.name(), mac.side()), (phy.name(), Side::Secondary));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn attach(link: &str) -> Result<Self> {
        LinkOptions::new().attach(link, Side::Secondary)
    }
}
