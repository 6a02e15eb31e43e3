//! The error type of this library: each error names the link, the limit and the remedy.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use shmesh_sys::errno;
use shmesh_sys::rlimit::{self, OpenFiles};

use crate::config::{ConfigError, NameError, PoolId};
use crate::participant::Side;

/// The result type of this library's operations.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// fn ping(link: &shmesh::Link) -> shmesh::Result<usize> {
///     link.send_inline(1, 0, b"ping")?;
///     link.notify()?;
///     Ok(link.queued())
/// }
/// assert_eq!(ping(&link)?, 0, "the message is queued on the other side");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation failed. It is one pointer wide, so that returning `Ok` is cheap; [`kind`](Self::kind) has the details.
///
/// ```
/// use shmesh::{Error, ErrorKind, LinkOptions, Side};
/// # let dir = tempfile::tempdir()?;
/// let missing: Error = LinkOptions::new().dir(dir.path()).attach("fronthaul", Side::Secondary).unwrap_err();
/// assert!(matches!(missing.kind(), ErrorKind::NotFound { .. }));
/// assert!(missing.to_string().starts_with("link fronthaul: not found in"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Error(Box<ErrorKind>);

impl Error {
    /// The kind of this error, with its details.
    #[must_use]
    pub fn kind(&self) -> &ErrorKind {
        &self.0
    }
}

impl<K: Into<ErrorKind>> From<K> for Error {
    #[cold]
    fn from(kind: K) -> Self {
        Self(Box::new(kind.into()))
    }
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.0, f)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// The kinds of [`Error`], with their details.
///
/// Each prints as one line. The kernel's error, if there is one, is the [`source`](std::error::Error::source).
/// Later versions may add kinds.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::ErrorKind;
/// # config.ring_len = 1;
/// # let link = options.create(&config)?;
/// link.loan()?.send()?;
/// match link.loan()?.send().unwrap_err().error.kind() {
///     ErrorKind::Full { len, .. } => assert_eq!(*len, 1), // wait for the receiver
///     other => panic!("unexpected: {other}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The name of a link is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The configuration of a link is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),

    /// The IPC directory has no link of this name.
    #[error("link {link}: not found in {dir}: start its primary, or list links with `shmesh ls --dir {dir}`", dir = .dir.display())]
    NotFound {
        /// Name of the link.
        link: Arc<str>,
        /// The IPC directory that was searched.
        dir: PathBuf,
    },
    /// The IPC directory does not exist.
    #[error(
        "link {link}: the IPC directory {dir} does not exist; create it (in a pod: mount a volume there), or set SHMESH_DIR", dir = .dir.display()
    )]
    NoDirectory {
        /// Name of the link.
        link: Arc<str>,
        /// The missing IPC directory.
        dir: PathBuf,
    },
    /// The side allows one process, and that process is alive.
    #[error(
        "link {link}: process {pid} is already its {side}; stop that process first, or use another link name"
    )]
    AlreadyOwned {
        /// Name of the link.
        link: Arc<str>,
        /// The side that is occupied.
        side: Side,
        /// The process that occupies it, as numbered in its own pid namespace.
        pid: u32,
    },
    /// The link allows one receiving process per side, and this side has one.
    #[error(
        "link {link}: process {pid} already receives on the {side} side, and this link allows one receiver per side (`receivers: one`); \
        stop that process first, or use one link per receiver; with `receivers: many` receivers share one queue"
    )]
    ReceiverTaken {
        /// Name of the link.
        link: Arc<str>,
        /// The side that already has a receiver.
        side: Side,
        /// The receiving process, as numbered in its own pid namespace.
        pid: u32,
    },
    /// `fresh` was requested, but another participant is attached.
    #[error(
        "link {link}: it cannot start empty (`fresh`), because process {pid} is attached to the {side} side; stop that process \
        first, or create the link without `fresh`"
    )]
    InUse {
        /// Name of the link.
        link: Arc<str>,
        /// The side of that participant.
        side: Side,
        /// Its process, as numbered in its own pid namespace.
        pid: u32,
    },
    /// A link of this name exists with another shape, backing, receivers or notification.
    #[error(
        "link {link}: it exists with {field} {existing}, but {asked} was requested; use the same configuration, or remove the link \
         with `shmesh rm {link}`"
    )]
    Differs {
        /// Name of the link.
        link: Arc<str>,
        /// The setting that differs.
        field: String,
        /// Its value in the existing link.
        existing: String,
        /// The value that was requested.
        asked: String,
    },
    /// A file or memfd is not a segment of shmesh.
    #[error("link {link}: {what} is not a shmesh segment; move it away, or use another link name")]
    NotOurs {
        /// Name of the link.
        link: Arc<str>,
        /// The file or memfd.
        what: String,
    },
    /// A segment, or the host that serves it, has another layout version.
    #[error(
        "link {link}: {what} has layout version {found}, but this library supports {ours}; run the same version on both sides, and \
        remove the link with `shmesh rm {link}`"
    )]
    Version {
        /// Name of the link.
        link: Arc<str>,
        /// The file or the peer.
        what: String,
        /// The layout version that was found.
        found: u16,
        /// The layout version of this library.
        ours: u16,
    },
    /// A segment does not have the size that its header says.
    #[error(
        "link {link}: {what} has {found} bytes, but its header says {expected}: it was truncated; remove the link with `shmesh rm {link}`"
    )]
    Truncated {
        /// Name of the link.
        link: Arc<str>,
        /// The file or memfd.
        what: String,
        /// Its size in bytes.
        found: u64,
        /// The size in bytes that its header gives.
        expected: u64,
    },
    /// The header of a segment contradicts itself or the link's other segments, or a guarded segment was truncated while in use.
    #[error("link {link}: {what} is damaged ({why}); remove the link with `shmesh rm {link}`")]
    Damaged {
        /// Name of the link.
        link: Arc<str>,
        /// The file or memfd.
        what: String,
        /// The contradiction that was found.
        why: &'static str,
    },
    /// The file system has too little free space.
    #[error(
        "link {link}: {what} needs {needed} bytes, but {dir} has {free} free; make pools smaller, or enlarge {dir} \
         (in a pod: the sizeLimit of the emptyDir at /dev/shm)", dir = .dir.display()
    )]
    NoSpace {
        /// Name of the link.
        link: Arc<str>,
        /// The segment that does not fit.
        what: String,
        /// Its size in bytes.
        needed: u64,
        /// Free space in bytes.
        free: u64,
        /// The IPC directory, which is on it.
        dir: PathBuf,
    },
    /// The memory limit would be exceeded. This is checked in advance, because the kernel would kill the process instead of failing the call.
    #[error(
        "link {link}: its segments need {needed} bytes, but {room} remain below the memory limit of this container or machine; \
        raise resources.limits.memory, or make pools smaller"
    )]
    MemoryLimit {
        /// Name of the link.
        link: Arc<str>,
        /// Size of all its segments in bytes.
        needed: u64,
        /// Bytes that can still be charged.
        room: u64,
    },
    /// This user has no permission to use the link.
    #[error(
        "link {link}: no permission for {what}: it belongs to another user; run as that user, or create the link with file_mode 0660 and a common group"
    )]
    Permission {
        /// Name of the link.
        link: Arc<str>,
        /// The file or memfd.
        what: String,
        /// The error from the kernel.
        source: io::Error,
    },
    /// All seats of the link are taken.
    #[error(
        "link {link}: all {limit} seats are taken; detach a participant, or call recover() if some have died"
    )]
    Crowded {
        /// Name of the link.
        link: Arc<str>,
        /// The maximum number of participants.
        limit: usize,
    },
    /// The ring is `spsc`, and another participant is its producer or consumer.
    #[error(
        "link {link}: participant {seat} (process {pid}) is the only {role} that this ring allows (ring mode spsc); use that handle, or ring mode mpmc"
    )]
    RoleTaken {
        /// Name of the link.
        link: Arc<str>,
        /// The role: "producer" or "consumer".
        role: &'static str,
        /// Seat of the participant that has the role.
        seat: u8,
        /// Process of that participant.
        pid: u32,
    },

    /// The pool has no free buffer.
    #[error(
        "link {link}: all {len} buffers of pool {pool} are loaned, queued or borrowed by a receiver; release some, or raise its pool_len"
    )]
    Exhausted {
        /// Name of the link.
        link: Arc<str>,
        /// The buffer pool concerned.
        pool: PoolId,
        /// The number of buffers in it.
        len: u32,
    },
    /// All slots for inline messages are in use.
    #[error(
        "link {link}: all {len} slots for inline messages are queued or borrowed by a receiver; receive some messages, or raise the ring's len"
    )]
    InlineExhausted {
        /// Name of the link.
        link: Arc<str>,
        /// The number of these slots.
        len: u32,
    },
    /// The ring has no free slot.
    #[error(
        "link {link}: the ring is full with {len} messages; retry when the receiver has caught up, or raise the ring's len"
    )]
    Full {
        /// Name of the link.
        link: Arc<str>,
        /// The capacity of the ring.
        len: u32,
    },
    /// The reader of a broadcast ring with `slow: skip` has borrowed the maximum number of messages in buffers.
    #[error(
        "link {link}: this reader has borrowed {limit} messages, the limit with slow: skip; drop one first, or copy its bytes"
    )]
    HoldingTooMany {
        /// Name of the link.
        link: Arc<str>,
        /// The maximum number of borrowed messages.
        limit: usize,
    },
    /// The message is longer than a buffer of the pool.
    #[error(
        "link {link}: {len} bytes do not fit into a buffer of pool {pool}, which has {limit}; use a pool with larger buffers, or raise its buf_size_bytes"
    )]
    TooLong {
        /// Name of the link.
        link: Arc<str>,
        /// The buffer pool concerned.
        pool: PoolId,
        /// The requested length in bytes.
        len: usize,
        /// Size of its buffers in bytes.
        limit: u32,
    },
    /// The message is too long to travel in the ring.
    #[error("link {link}: an inline message has at most {limit} bytes, not {len}; loan a buffer instead", limit = crate::ring::INLINE_MAX_BYTES)]
    InlineTooLong {
        /// Name of the link.
        link: Arc<str>,
        /// The requested length in bytes.
        len: usize,
    },
    /// The link has no pool of this kind.
    #[error(
        "link {link}: pool {pool} is not configured; set its buf_size_bytes and pool_len, or use another pool"
    )]
    NoPool {
        /// Name of the link.
        link: Arc<str>,
        /// The buffer pool concerned.
        pool: PoolId,
    },
    /// A DATA part was requested from the pool of MSG parts.
    #[error("link {link}: pool cpu_msg holds MSG parts; loan a DATA part from another pool")]
    MsgPool {
        /// Name of the link.
        link: Arc<str>,
    },
    /// The loan has a MSG part only.
    #[error("link {link}: this loan has no DATA part; loan one with `loan_with`")]
    NoDataPart {
        /// Name of the link.
        link: Arc<str>,
    },
    /// The DATA part is in device memory, which the CPU cannot access.
    #[error(
        "link {link}: the buffers of pool {pool} are in device memory; open the pool with `Link::device_pool`, which gives the \
        device address of the DATA part"
    )]
    OnDevice {
        /// Name of the link.
        link: Arc<str>,
        /// The buffer pool concerned.
        pool: PoolId,
    },
    /// The buffers of the pool are not in the device memory that was opened.
    #[error(
        "link {link}: the buffers of pool {pool} are not in this device memory; cuda_data and gpu_data have device memory of their \
        own, other pools have none"
    )]
    NotOnDevice {
        /// Name of the link.
        link: Arc<str>,
        /// The buffer pool concerned.
        pool: PoolId,
    },
    /// The payload is in device memory that no longer exists or was replaced: all processes that had it mapped have ended.
    #[error(
        "link {link}: the DATA part of this message is in device memory that pool {pool} no longer has, because all its processes \
        ended or it was replaced; open the pool again, and have the sender repeat the message"
    )]
    OtherMemory {
        /// Name of the link.
        link: Arc<str>,
        /// The buffer pool concerned.
        pool: PoolId,
    },
    /// The loan belongs to another handle.
    #[error("link {link}: the loan belongs to another handle; send it with the handle that made it")]
    ForeignLoan {
        /// Name of the link.
        link: Arc<str>,
    },
    /// The link has no requests.
    #[error(
        "link {link}: it has no requests; create it with `requests: {{ window: 8 }}`, or use send and receive"
    )]
    NoRequests {
        /// Name of the link.
        link: Arc<str>,
    },
    /// A request was made on the primary side, or taken on the secondary side.
    #[error(
        "link {link}: the secondary side makes requests and the primary side answers them; this handle is {side}"
    )]
    RequestSide {
        /// Name of the link.
        link: Arc<str>,
        /// The side of the handle.
        side: Side,
    },
    /// This participant has as many requests pending as the link allows.
    #[error(
        "link {link}: {window} requests of this participant are pending, which is its limit; take or drop a reply first, or raise \
         requests.window"
    )]
    WindowFull {
        /// Name of the link.
        link: Arc<str>,
        /// The maximum number of its pending requests.
        window: u32,
    },
    /// The maximum number of replies waits for the client, which has not taken them.
    #[error(
        "link {link}: the client in seat {seat} (process {pid}) has not taken {limit} replies {what}, which is the limit; serve other clients, wait for it with `wait_room`, or drop the request; a larger pool_len or requests.window raises a client's share"
    )]
    RepliesFull {
        /// Name of the link.
        link: Arc<str>,
        /// Seat of the client.
        seat: u8,
        /// Process of the client.
        pid: u32,
        /// The maximum number of replies that wait for it.
        limit: u32,
        /// The resource that is limited.
        what: &'static str,
    },
    /// The process that had taken the request ended before its last reply.
    #[error(
        "link {link}: process {pid} took the request and ended before it replied; make the request again"
    )]
    ServerGone {
        /// Name of the link.
        link: Arc<str>,
        /// The process, as numbered in its own pid namespace.
        pid: u32,
    },
    /// The process that had taken the request dropped it without a last reply.
    #[error(
        "link {link}: process {pid} took the request and dropped it without a last reply; look for the reason in its log"
    )]
    Unanswered {
        /// Name of the link.
        link: Arc<str>,
        /// The process, as numbered in its own pid namespace.
        pid: u32,
    },
    /// The last reply was sent, or taken, before this call.
    #[error("link {link}: the request is complete, because its last reply was sent or taken before; drop it")]
    RequestOver {
        /// Name of the link.
        link: Arc<str>,
    },
    /// A request does not fit into a slot.
    #[error("link {link}: an inline request has at most {limit} bytes, not {len}; loan a buffer instead", limit = crate::ring::REQUEST_INLINE_MAX_BYTES)]
    InlineRequestTooLong {
        /// Name of the link.
        link: Arc<str>,
        /// Length of the request in bytes.
        len: usize,
    },
    /// The link carries typed messages of another type.
    #[error(
        "link {link}: it carries {declared}, not {asked}; {remedy}",
        remedy = remedy_of_other_type(.link, .user)
    )]
    OtherType {
        /// Name of the link.
        link: Arc<str>,
        /// The type that was declared first, as a peer wrote it.
        declared: String,
        /// The type that this process requested.
        asked: String,
        /// Seat and process id of a participant that uses the declared type. `None` if there is none, but messages of
        /// that type are queued.
        user: Option<(u8, u32)>,
    },
    /// Another participant is declaring the type of the messages, and has not finished.
    #[error(
        "link {link}: the participant in seat {seat} (process {pid}) is declaring the type of its messages; retry, or if it is stopped, end that process or evict it with `Link::evict`"
    )]
    TypeUndecided {
        /// Name of the link.
        link: Arc<str>,
        /// Seat of that participant.
        seat: u8,
        /// Process of that participant.
        pid: u32,
    },
    /// The name of the type is too long, or has other characters than printable ASCII.
    #[error("link {link}: the type name {name:?} is invalid; choose one of 1 to {limit} printable ASCII characters, with `typed_as` or `typed_requests_as`", limit = crate::segment::payload_type::NAME_MAX)]
    TypeName {
        /// Name of the link.
        link: Arc<str>,
        /// The invalid name of the type.
        name: String,
    },
    /// A value needs a stricter alignment than buffers have.
    #[error(
        "link {link}: {name} is aligned to {align} bytes, but buffers are aligned to {limit}; reduce the alignment of the type"
    )]
    TypeAlignment {
        /// Name of the link.
        link: Arc<str>,
        /// Name of the type.
        name: String,
        /// Alignment of the type in bytes.
        align: usize,
        /// Alignment of buffers in bytes.
        limit: usize,
    },
    /// A value fits into no buffer of the link.
    #[error(
        "link {link}: a value of {name} has {size} bytes, but the largest buffer in host memory has {limit}; raise buf_size_bytes of \
         cpu_msg, or configure cpu_data or cpu_large"
    )]
    TypeTooLarge {
        /// Name of the link.
        link: Arc<str>,
        /// Name of the type.
        name: String,
        /// Bytes of the value.
        size: usize,
        /// The largest value that fits.
        limit: usize,
    },
    /// A received message is not a value of the type, and was dropped.
    #[error(
        "link {link}: a message of {len} bytes is not a value of {asked}, and was dropped; use the same type in the sender"
    )]
    NotOfType {
        /// Name of the link.
        link: Arc<str>,
        /// The type of this process.
        asked: String,
        /// Length of the message in bytes.
        len: usize,
    },

    /// This participant was declared dead while it was stopped, and its buffers were recovered.
    #[error(
        "link {link}: this participant was evicted and its loans were reclaimed; drop this handle and attach again"
    )]
    Evicted {
        /// Name of the link.
        link: Arc<str>,
    },
    /// Shared memory has a value that no correct participant writes.
    #[error(
        "link {link}: {what}; a peer is defective or hostile: find it with `shmesh dump {link}`, then remove the link"
    )]
    Corrupt {
        /// Name of the link.
        link: Arc<str>,
        /// The contradiction that was found.
        what: &'static str,
    },
    /// The participant is alive, and an `spsc` ring does not allow its eviction.
    #[error(
        "link {link}: participant {seat} (process {pid}) is alive; in ring mode spsc it cannot be evicted: stop the process first"
    )]
    StillAlive {
        /// Name of the link.
        link: Arc<str>,
        /// Seat of that participant.
        seat: u8,
        /// Process of that participant.
        pid: u32,
    },
    /// The link was created without notification.
    #[error(
        "link {link}: it was created without notification (notify.enabled: false); poll with receive(), or create the link with notification"
    )]
    NoNotification {
        /// Name of the link.
        link: Arc<str>,
    },
    /// The host of the link's memory is missing, or gave an unexpected answer.
    #[error("link {link}: the host of its memory at {path} {what}", path = .path.display())]
    Host {
        /// Name of the link.
        link: Arc<str>,
        /// Path of its socket.
        path: PathBuf,
        /// The rule that it breaks.
        what: &'static str,
    },
    /// The link has no broker, or its broker has ended.
    #[error("link {link}: no broker listens at {path}; start a sidecar, or connect again", path = .path.display())]
    NoBroker {
        /// Name of the link.
        link: Arc<str>,
        /// Where the broker should listen.
        path: PathBuf,
    },
    /// The broker refused a request that violates a rule or a limit.
    #[error("link {link}: the broker refused the request: {text}")]
    Refused {
        /// Name of the link.
        link: Arc<str>,
        /// The reason, as sent by the broker.
        text: String,
    },
    /// This process is not permitted, or the key does not exist. Only the broker's audit log says which.
    #[error(
        "link {link}: the broker denied the request: {text}; the audit log of the sidecar has the reason"
    )]
    Denied {
        /// Name of the link.
        link: Arc<str>,
        /// The text of the broker, which does not reveal the reason.
        text: String,
    },
    /// The imported memory is still in use in this process.
    #[error(
        "link {link}: the imported memory is still in use in this process; drop every `Arc` of it, then close it"
    )]
    StillMapped {
        /// Name of the link.
        link: Arc<str>,
    },
    /// Other processes still import the memory.
    #[error(
        "link {link}: {importers}; wait until they have closed it, or force the release",
        importers = still_imported(.importers)
    )]
    Busy {
        /// Name of the link.
        link: Arc<str>,
        /// Their thread-group ids, without start times.
        importers: Vec<i32>,
    },
    /// A system call failed.
    #[error("link {link}: cannot {doing}")]
    System {
        /// Name of the link.
        link: Arc<str>,
        /// The failed operation, as in "cannot ...".
        doing: String,
        /// The error from the kernel.
        source: io::Error,
    },
}

impl Error {
    /// Whether there was no room for a message: its pool, the ring or the window of requests was full.
    ///
    /// The same call succeeds when a receiver has made room. Nothing gives notice of that, so a sender that waits tries again after a
    /// pause, as `AsyncLink` does. Implies [`is_retryable`](Self::is_retryable).
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// config.ring_len = 2;
    /// let phy = options.create(&config)?;
    /// let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
    /// phy.send_inline(1, 0, b"first")?;
    /// phy.send_inline(2, 0, b"second")?;
    /// assert!(phy.send_inline(3, 0, b"third").unwrap_err().lacks_room());
    /// drop(mac.receive()?);
    /// phy.send_inline(3, 0, b"third")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn lacks_room(&self) -> bool {
        use ErrorKind::{Exhausted, Full, InlineExhausted, WindowFull};
        matches!(self.kind(), Exhausted { .. } | Full { .. } | InlineExhausted { .. } | WindowFull { .. })
    }

    /// Whether the same call can succeed later without a change of configuration: a pool or ring was full, all
    /// seats were taken, or the link did not exist yet.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        let may_change = matches!(
            self.kind(),
            ErrorKind::HoldingTooMany { .. }
                | ErrorKind::RepliesFull { .. }
                | ErrorKind::ServerGone { .. }
                | ErrorKind::Crowded { .. }
                | ErrorKind::NotFound { .. }
                | ErrorKind::NoDirectory { .. }
                | ErrorKind::AlreadyOwned { .. }
                | ErrorKind::InUse { .. }
                | ErrorKind::ReceiverTaken { .. }
                | ErrorKind::RoleTaken { .. }
                | ErrorKind::TypeUndecided { .. }
        );
        may_change || self.lacks_room()
    }

    pub(crate) fn system(link: &Arc<str>, doing: impl Into<String>, source: io::Error) -> Self {
        let mut doing = doing.into();
        if source.raw_os_error() == Some(errno::EMFILE)
            && let Ok(OpenFiles { soft, hard }) = rlimit::open_files()
        {
            let remedy = format!(
                " (this process may have {soft} open files, its soft limit RLIMIT_NOFILE; raise it, with `ulimit -n` or setrlimit, up \
                 to {hard})"
            );
            doing.push_str(&remedy);
        }
        ErrorKind::System { link: Arc::clone(link), doing, source }.into()
    }
}

fn still_imported(importers: &[i32]) -> String {
    if importers.is_empty() {
        return "the sidecar restarted, and importers may still reconnect".to_owned();
    }
    format!("still imported by {importers:?}")
}

fn remedy_of_other_type(link: &str, user: &Option<(u8, u32)>) -> String {
    match user {
        Some((seat, pid)) => format!(
            "the participant in seat {seat} (process {pid}) uses that type: end that process, or use one type on both sides"
        ),
        None => format!(
            "messages of that type are queued: receive them, create the link with `fresh`, or remove it with `shmesh rm {link}`"
        ),
    }
}
