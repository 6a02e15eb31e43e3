//! What can go wrong, each with the thing, the limit and the remedy.

use std::io;
use std::path::PathBuf;

use shmesh::config::PoolId;

/// A result of this crate.
///
/// ```
/// let attached: shmesh_nvipc_wire::Result<_> = shmesh_nvipc_wire::Options::new().attach("no/prefix");
/// assert!(attached.is_err());
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Nothing here is fatal: after any of them the endpoint can be used, or at least closed.
///
/// ```
/// let error = shmesh_nvipc_wire::Options::new().attach("no/prefix").unwrap_err();
/// assert!(matches!(error, shmesh_nvipc_wire::Error::Prefix { .. }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The prefix cannot be the name of files.
    #[error("prefix {prefix:?}: give 1 to 31 bytes without '/' and NUL, and not '.' first")]
    Prefix {
        /// As it was given.
        prefix: String,
    },
    /// A size is out of range.
    #[error("pool {pool}: {field} {value} is more than {max}; make it smaller")]
    Pool {
        /// The pool.
        pool: PoolId,
        /// Which of its sizes.
        field: &'static str,
        /// What was asked for.
        value: u64,
        /// What is possible.
        max: u64,
    },
    /// There is no pool for the MSG part.
    #[error("pool cpu_msg is not configured, and every message needs it: give buf_size and pool_len")]
    NoMsgPool,
    /// Somebody lives there.
    #[error("{path}: another primary listens there; end it, or use another prefix", path = .path.display())]
    InUse {
        /// Its socket.
        path: PathBuf,
    },
    /// Files of that name are not NVIPC's.
    #[error("{path}: not a file of NVIPC (a link of another layout?); remove it, or use another prefix", path = .path.display())]
    NotTheirs {
        /// The file.
        path: PathBuf,
    },
    /// Nobody serves the link.
    #[error("{path}: no primary listens there; start it, and look whether both see the same directory", path = .path.display())]
    NoPrimary {
        /// Where it would.
        path: PathBuf,
    },
    /// The primary is of a release that is not known here.
    #[error("{what}: version {found} of NVIPC is not known; 2530 is (releases 25-3 and 26-1)")]
    Version {
        /// The file.
        what: String,
        /// The version in it.
        found: i32,
    },
    /// A segment is stale or half-written.
    #[error("{what}: {why}; restart the primary")]
    Damaged {
        /// The file.
        what: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A segment is shorter than its configuration says.
    #[error(
        "{what}: {found} bytes, and {expected} are needed; it is stale or half-written: restart the primary"
    )]
    Truncated {
        /// The file.
        what: String,
        /// Its size.
        found: u64,
        /// What it should have.
        expected: u64,
    },
    /// The file system is full.
    #[error("{what}: no room for {needed} bytes; make pools smaller, or {dir} larger", dir = .dir.display())]
    NoSpace {
        /// The file.
        what: String,
        /// Bytes that it needs.
        needed: u64,
        /// Where.
        dir: PathBuf,
    },
    /// No buffer is free now.
    #[error("pool {pool}: all {len} buffers are in use; release messages, or make pool_len larger")]
    Empty {
        /// The pool.
        pool: PoolId,
        /// Its length.
        len: u32,
    },
    /// The link has no such pool, or its buffers are not in memory of the host.
    #[error("pool {pool}: {why}")]
    NoPool {
        /// The pool.
        pool: PoolId,
        /// What is the matter, and what to do.
        why: &'static str,
    },
    /// The address is not of a buffer that this endpoint holds.
    #[error(
        "{address:#x}: not a buffer of {pool} that is held here; it was released or sent, or was never allocated or received"
    )]
    NotHeld {
        /// The address.
        address: usize,
        /// The pool that it was looked for in.
        pool: PoolId,
    },
    /// A length is negative or longer than the buffer.
    #[error("{part} of {len} bytes: a buffer of {pool} has {max}")]
    Length {
        /// `msg_len` or `data_len`.
        part: &'static str,
        /// As it was given.
        len: i64,
        /// The pool.
        pool: PoolId,
        /// Bytes of a buffer.
        max: u32,
    },
    /// The peer sent a message that cannot be one. It is dropped; the next may be good.
    #[error("a message of the peer: {why}; it is dropped")]
    BadMessage {
        /// What is wrong with it.
        why: &'static str,
    },
    /// A queue in shared memory is in no state that its users leave.
    #[error("{what}: a queue holds what no side writes; restart the primary")]
    Queue {
        /// Which one.
        what: &'static str,
    },
    /// Nobody has connected yet, or the other side has ended.
    #[error("no peer is connected; start it")]
    NoPeer,
    /// The primary has ended. What it sent can be received.
    #[error("the primary has ended; close this endpoint and attach again")]
    PrimaryEnded,
    /// Somebody has taken a dump with NVIPC's tool: that ends the link.
    #[error("nv_ipc_dump was called on this link, which ends it; restart both sides")]
    Dumped,
    /// This endpoint is closed.
    #[error("this endpoint is closed; open it again")]
    Closed,
    /// A setting of the UDP transport cannot be.
    #[error("udp: {why}")]
    Udp {
        /// What, and what to do.
        why: &'static str,
    },
    /// The kernel refuses.
    #[error("cannot {doing}")]
    System {
        /// What was tried.
        doing: String,
        /// What it said.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn system(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { doing: doing.into(), source: source.into() }
    }
}
