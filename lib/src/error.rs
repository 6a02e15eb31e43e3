//! What can go wrong, each with the thing, the limit and the remedy.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use shmesh_sys::errno;
use shmesh_sys::rlimit::{self, OpenFiles};

use crate::config::{ConfigError, NameError, PoolId};
use crate::participant::Side;

/// A result of this library.
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
/// assert_eq!(ping(&link)?, 0, "what it sent is queued at the other side");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation failed: one word, so that success costs nothing to return. [`kind`](Self::kind) says more.
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
    /// What went wrong, with its details.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let options = shmesh::LinkOptions::new().dir(dir.path());
    /// # let link = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
    /// use shmesh::ErrorKind;
    /// let error = link.send_inline(1, 0, &[0; 113]).unwrap_err();
    /// assert!(matches!(error.kind(), ErrorKind::InlineTooLong { len: 113, .. }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

/// What can go wrong.
///
/// Each prints as one line. What the kernel said, where it refused, is the [`source`](std::error::Error::source).
/// More kinds may come.
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
    /// The name of a link is not one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The configuration is not one.
    #[error(transparent)]
    Config(#[from] ConfigError),

    /// There is no such link.
    #[error("link {link}: not found in {dir}: start its primary, or look with `shmesh ls --dir {dir}`", dir = .dir.display())]
    NotFound {
        /// The link.
        link: Arc<str>,
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// The IPC directory is not there.
    #[error(
        "link {link}: there is no IPC directory {dir}; make it (in a pod: mount a volume there), or name another with \
         SHMESH_DIR", dir = .dir.display()
    )]
    NoDirectory {
        /// The link.
        link: Arc<str>,
        /// The directory.
        dir: PathBuf,
    },
    /// The link's primary, or the only participant that its side may have, lives.
    #[error("link {link}: process {pid} is its {side} already; stop it first, or use another name")]
    AlreadyOwned {
        /// The link.
        link: Arc<str>,
        /// The side that is taken.
        side: Side,
        /// Who has it, as its own pid namespace numbers it.
        pid: u32,
    },
    /// The link has one receiver a side, and this side has it.
    #[error(
        "link {link}: process {pid} receives on the {side} side, and this link has one receiver a side (`receivers: one`); end \
         that process first, or use a link for each receiver; with `receivers: many` they share one queue"
    )]
    ReceiverTaken {
        /// The link.
        link: Arc<str>,
        /// The side.
        side: Side,
        /// The receiver, as its own pid namespace numbers it.
        pid: u32,
    },
    /// The link shall start empty, and another participant is attached.
    #[error(
        "link {link}: it cannot start empty (`fresh`), because process {pid} is attached to the {side} side; end that process \
         first, or create the link without `fresh`"
    )]
    InUse {
        /// The link.
        link: Arc<str>,
        /// The side of that participant.
        side: Side,
        /// Its process, as its own pid namespace numbers it.
        pid: u32,
    },
    /// A link of this name exists with another shape, backing, receivers or notification.
    #[error(
        "link {link}: it exists with {field} {existing}, asked for was {asked}; use the same configuration, or remove it \
         with `shmesh rm {link}`"
    )]
    Differs {
        /// The link.
        link: Arc<str>,
        /// What differs.
        field: String,
        /// As it exists.
        existing: String,
        /// As it was asked for.
        asked: String,
    },
    /// A file or memfd is not a segment of ours.
    #[error("link {link}: {what} is not a shmesh segment; move it away, or use another link name")]
    NotOurs {
        /// The link.
        link: Arc<str>,
        /// The file.
        what: String,
    },
    /// A segment, or the process that holds it, is of another version of this library.
    #[error(
        "link {link}: {what} has layout version {found}, this library speaks {ours}; run one version on both sides, and \
         remove the link with `shmesh rm {link}`"
    )]
    Version {
        /// The link.
        link: Arc<str>,
        /// The file or the peer.
        what: String,
        /// Its version.
        found: u16,
        /// Ours.
        ours: u16,
    },
    /// A segment does not have the size that its header says.
    #[error(
        "link {link}: {what} has {found} bytes, its header says {expected}: it was truncated; remove the link with `shmesh rm {link}`"
    )]
    Truncated {
        /// The link.
        link: Arc<str>,
        /// The file.
        what: String,
        /// Its size.
        found: u64,
        /// The size it should have.
        expected: u64,
    },
    /// The header of a segment contradicts itself, or the link's other segments; or a guarded segment was truncated while it was in use.
    #[error("link {link}: {what} is damaged ({why}); remove the link with `shmesh rm {link}`")]
    Damaged {
        /// The link.
        link: Arc<str>,
        /// The file.
        what: String,
        /// What was found.
        why: &'static str,
    },
    /// The file system has no room.
    #[error(
        "link {link}: {what} needs {needed} bytes, {dir} has {free} free; make pools smaller, or give {dir} more \
         (in a pod: the sizeLimit of the emptyDir at /dev/shm)", dir = .dir.display()
    )]
    NoSpace {
        /// The link.
        link: Arc<str>,
        /// The segment.
        what: String,
        /// Its size in bytes.
        needed: u64,
        /// What is left.
        free: u64,
        /// The IPC directory.
        dir: PathBuf,
    },
    /// The memory cgroup has no room, and the kernel would kill this process instead of failing the call.
    #[error(
        "link {link}: its segments need {needed} bytes, the memory limit of this container, or the machine, leaves {room}; raise \
         resources.limits.memory, or make pools smaller"
    )]
    MemoryLimit {
        /// The link.
        link: Arc<str>,
        /// Size of all its segments in bytes.
        needed: u64,
        /// Bytes that can still be charged.
        room: u64,
    },
    /// This user may not use the link.
    #[error(
        "link {link}: no permission for {what}: it belongs to another user; run as that user, or create the link with file_mode 0660 and a common group"
    )]
    Permission {
        /// The link.
        link: Arc<str>,
        /// The file.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// All seats of the participant table are taken.
    #[error(
        "link {link}: all {limit} participants are attached; detach one, or call recover() if some have died"
    )]
    Crowded {
        /// The link.
        link: Arc<str>,
        /// How many there can be.
        limit: usize,
    },
    /// A ring with one producer and one consumer has it already.
    #[error(
        "link {link}: participant {seat} (process {pid}) is the {role} of this ring, which has one (ring mode spsc); use that handle, or ring mode mpmc"
    )]
    RoleTaken {
        /// The link.
        link: Arc<str>,
        /// "producer" or "consumer".
        role: &'static str,
        /// Who has it.
        seat: u8,
        /// Its process.
        pid: u32,
    },

    /// The pool has no free buffer.
    #[error(
        "link {link}: all {len} buffers of pool {pool} are loaned, queued or held by a receiver; receive or release some, or raise its pool_len"
    )]
    Exhausted {
        /// The link.
        link: Arc<str>,
        /// The pool.
        pool: PoolId,
        /// Its number of buffers.
        len: u32,
    },
    /// The small cells in which inline messages travel are all in use.
    #[error(
        "link {link}: all {len} inline cells are queued or held by a receiver; receive some, or raise the ring's len"
    )]
    InlineExhausted {
        /// The link.
        link: Arc<str>,
        /// The number of cells.
        len: u32,
    },
    /// The ring has no free slot.
    #[error(
        "link {link}: {len} messages are queued and the ring is full; the receiver is behind, or raise the ring's len"
    )]
    Full {
        /// The link.
        link: Arc<str>,
        /// Its capacity.
        len: u32,
    },
    /// A reader of a broadcast ring with `slow: skip` has as many messages in buffers as it can.
    #[error(
        "link {link}: this reader holds {limit} messages, which is the limit with slow: skip; drop one, or copy what it says"
    )]
    HoldingTooMany {
        /// The link.
        link: Arc<str>,
        /// Messages that a reader can hold.
        limit: usize,
    },
    /// A message does not fit.
    #[error(
        "link {link}: {len} bytes do not fit into a buffer of pool {pool}, which has {limit}; use a pool with larger buffers, or raise its buf_size_bytes"
    )]
    TooLong {
        /// The link.
        link: Arc<str>,
        /// The pool.
        pool: PoolId,
        /// Asked for.
        len: usize,
        /// Size of its buffers.
        limit: u32,
    },
    /// A message does not fit into a slot.
    #[error("link {link}: an inline message has at most {limit} bytes, not {len}; loan a buffer instead", limit = crate::ring::INLINE_MAX_BYTES)]
    InlineTooLong {
        /// The link.
        link: Arc<str>,
        /// Asked for.
        len: usize,
    },
    /// The link has no such pool.
    #[error(
        "link {link}: pool {pool} is not configured; set its buf_size_bytes and pool_len, or use another pool"
    )]
    NoPool {
        /// The link.
        link: Arc<str>,
        /// The pool.
        pool: PoolId,
    },
    /// A DATA part was asked for in the pool of the MSG parts.
    #[error("link {link}: pool cpu_msg holds MSG parts; loan a DATA part from another pool")]
    MsgPool {
        /// The link.
        link: Arc<str>,
    },
    /// The loan has a MSG part only.
    #[error("link {link}: this loan has no DATA part; take one that has with `loan_with`")]
    NoDataPart {
        /// The link.
        link: Arc<str>,
    },
    /// The DATA part is in device memory, where the CPU does not reach.
    #[error(
        "link {link}: the buffers of pool {pool} are in device memory; open it with `Link::device_pool`, and take the place of \
         the DATA part from there"
    )]
    OnDevice {
        /// The link.
        link: Arc<str>,
        /// The pool.
        pool: PoolId,
    },
    /// The pool is in shared memory, or another one in device memory.
    #[error(
        "link {link}: the buffers of pool {pool} are not in this device memory; only those of cuda_data and gpu_data are, each in \
         its own"
    )]
    NotOnDevice {
        /// The link.
        link: Arc<str>,
        /// The pool.
        pool: PoolId,
    },
    /// The payload is in device memory that this process does not have, because nobody kept it, and the pool was given other.
    #[error(
        "link {link}: this message's DATA part is in other device memory than pool {pool} has here: all who had it have ended, or \
         it was replaced meanwhile; open the pool again, and ask for the payload once more"
    )]
    OtherMemory {
        /// The link.
        link: Arc<str>,
        /// The pool.
        pool: PoolId,
    },
    /// A loan was offered to a link that did not make it.
    #[error("link {link}: the loan belongs to another handle; send it with the handle that made it")]
    ForeignLoan {
        /// The link.
        link: Arc<str>,
    },

    /// This participant was declared dead while it was stopped. What it held was given to others.
    #[error(
        "link {link}: this participant was evicted and its loans were reclaimed; drop this handle and attach again"
    )]
    Evicted {
        /// The link.
        link: Arc<str>,
    },
    /// Shared memory holds something that no participant of ours writes.
    #[error(
        "link {link}: {what}; a peer is broken or hostile: find it with `shmesh dump {link}`, then remove the link"
    )]
    Corrupt {
        /// The link.
        link: Arc<str>,
        /// What was found.
        what: &'static str,
    },
    /// A participant that lives cannot be evicted from a ring with one producer and one consumer.
    #[error(
        "link {link}: participant {seat} (process {pid}) lives; in ring mode spsc it must end before its place is taken"
    )]
    StillAlive {
        /// The link.
        link: Arc<str>,
        /// The participant.
        seat: u8,
        /// Its process.
        pid: u32,
    },
    /// The link was made without notification.
    #[error(
        "link {link}: it has no notification (notify.enabled: false); poll with receive(), or create it with notification"
    )]
    NoNotification {
        /// The link.
        link: Arc<str>,
    },
    /// The process that hands out what has no name is not there, or did not answer as expected.
    #[error("link {link}: the host of its memory at {path} {what}", path = .path.display())]
    Host {
        /// The link.
        link: Arc<str>,
        /// Its socket.
        path: PathBuf,
        /// What it did.
        what: &'static str,
    },
    /// Nobody serves the link, or who did has gone.
    #[error("link {link}: nobody serves it at {}; start a sidecar, or connect again", path.display())]
    NoBroker {
        /// The link.
        link: Arc<str>,
        /// Where somebody should.
        path: PathBuf,
    },
    /// The broker refused a request that breaks a rule or a limit.
    #[error("link {link}: the broker refuses: {text}")]
    Refused {
        /// The link.
        link: Arc<str>,
        /// Why.
        text: String,
    },
    /// This process may not, or there is no such key: which of them, nobody is told but the broker's audit log.
    #[error("link {link}: the broker denies it: {text}")]
    Denied {
        /// The link.
        link: Arc<str>,
        /// What it says.
        text: String,
    },
    /// The imported memory is still held in this process.
    #[error("link {link}: the imported memory is still held here; drop every `Arc` of it, then close")]
    StillMapped {
        /// The link.
        link: Arc<str>,
    },
    /// Others still import the memory.
    #[error("link {link}: {}; they close first, or force it", still_imported(importers))]
    Busy {
        /// The link.
        link: Arc<str>,
        /// Bare thread-group ids.
        importers: Vec<i32>,
    },
    /// The kernel refused something.
    #[error("link {link}: cannot {doing}")]
    System {
        /// The link.
        link: Arc<str>,
        /// What was tried.
        doing: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    /// Whether the same call can succeed later without anybody changing a configuration: a pool or ring was full, all
    /// seats were taken, or the link was not there yet.
    ///
    /// ```
    /// let error = shmesh::Error::from(shmesh::ErrorKind::Full { link: "fronthaul".into(), len: 8 });
    /// assert!(error.is_retryable());
    /// ```
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::Exhausted { .. }
                | ErrorKind::InlineExhausted { .. }
                | ErrorKind::Full { .. }
                | ErrorKind::HoldingTooMany { .. }
                | ErrorKind::Crowded { .. }
                | ErrorKind::NotFound { .. }
                | ErrorKind::NoDirectory { .. }
                | ErrorKind::AlreadyOwned { .. }
                | ErrorKind::InUse { .. }
                | ErrorKind::ReceiverTaken { .. }
                | ErrorKind::RoleTaken { .. }
        )
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
        return "importers may still come back after the restart of the sidecar".to_owned();
    }
    format!("still imported by {importers:?}")
}
