//! Errors of this crate: each names the thing, the limit and the remedy.

use std::io;
use std::path::PathBuf;

use shmesh::config::PoolId;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of this crate. After any of them the endpoint stays usable, or can at least be closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The prefix cannot be part of a file name.
    #[error(
        "prefix {prefix:?} is not valid; give 1 to 31 bytes without '/' and NUL that do not begin with '.'"
    )]
    Prefix {
        /// The prefix that was given.
        prefix: String,
    },
    /// A size is out of range.
    #[error("pool {pool}: {field} is {value}, the limit is {max}; lower it")]
    Pool {
        /// The pool with that size.
        pool: PoolId,
        /// Which size: `buf_size` or `pool_len`.
        field: &'static str,
        /// The size that was requested.
        value: u64,
        /// The largest size that is possible.
        max: u64,
    },
    /// The pool `cpu_msg` is not configured.
    #[error("pool cpu_msg is not configured, but every message needs it; set its buf_size and pool_len")]
    NoMsgPool,
    /// Another primary has this prefix.
    #[error("{path}: another primary listens there; end it, or use another prefix", path = .path.display())]
    InUse {
        /// The socket on which it listens.
        path: PathBuf,
    },
    /// The files with this name are not NVIPC's.
    #[error("{path} is not a file of NVIPC's layout; remove it, or use another prefix", path = .path.display())]
    NotTheirs {
        /// The file that is not NVIPC's.
        path: PathBuf,
    },
    /// No primary serves the link.
    #[error("{path}: no primary listens there; start the primary, and check that both sides use the same directory", path = .path.display())]
    NoPrimary {
        /// The socket on which a primary would listen.
        path: PathBuf,
    },
    /// The primary has an unsupported release of NVIPC.
    #[error(
        "{what}: version {found} of NVIPC's layout is not supported; use release 25-3 or 26-1 (version 2530)"
    )]
    Version {
        /// The file with the version.
        what: String,
        /// The version in the file.
        found: i32,
    },
    /// A segment is stale or half-written.
    #[error("{what}: {why}; restart the primary")]
    Damaged {
        /// The file with the damage.
        what: String,
        /// A description of the damage.
        why: &'static str,
    },
    /// A segment is shorter than its configuration says.
    #[error(
        "{what} has {found} bytes, but its configuration requires {expected}: it is stale or incomplete; restart the primary"
    )]
    Truncated {
        /// The file that is too short.
        what: String,
        /// Its size in bytes.
        found: u64,
        /// The size that its configuration requires, in bytes.
        expected: u64,
    },
    /// The file system is full.
    #[error("{what} needs {needed} bytes, but {dir} has less free space; make pools smaller, or enlarge {dir}", dir = .dir.display())]
    NoSpace {
        /// The file that does not fit.
        what: String,
        /// Its size in bytes.
        needed: u64,
        /// The directory of the file system.
        dir: PathBuf,
    },
    /// No buffer is free.
    #[error("pool {pool}: all {len} buffers are in use; release messages, or raise its pool_len")]
    Empty {
        /// The pool without free buffers.
        pool: PoolId,
        /// Its number of buffers.
        len: u32,
    },
    /// The link has no such pool, or the pool is in device memory.
    #[error("pool {pool}: {why}")]
    NoPool {
        /// The pool that was named.
        pool: PoolId,
        /// The reason and the remedy.
        why: &'static str,
    },
    /// The address is not in a buffer that this endpoint holds.
    #[error(
        "{address:#x} is not a buffer of pool {pool} that this endpoint holds: it was released, sent, or never allocated or received"
    )]
    NotHeld {
        /// The address that was given.
        address: usize,
        /// The pool in which it was looked up.
        pool: PoolId,
    },
    /// A length is negative or longer than the buffer.
    #[error("{part} is {len}, but a buffer of pool {pool} has {max} bytes; send less, or raise its buf_size")]
    Length {
        /// Which length: `msg_len` or `data_len`.
        part: &'static str,
        /// The length that was given.
        len: i64,
        /// The pool of the buffer.
        pool: PoolId,
        /// Size of its buffers in bytes.
        max: u32,
    },
    /// The peer sent an invalid message, which is dropped. Later messages may be valid.
    #[error("a message of the peer is invalid and was dropped: {why}")]
    BadMessage {
        /// The rule that it breaks.
        why: &'static str,
    },
    /// A queue in shared memory is in an impossible state.
    #[error("{what} is damaged: it has a value that no correct process writes; restart the primary")]
    Queue {
        /// The queue that is damaged.
        what: &'static str,
    },
    /// No peer has connected yet, or the peer has ended.
    #[error("no peer is connected; start the other side")]
    NoPeer,
    /// The primary has ended. Messages that it sent can still be received.
    #[error("the primary has ended; close this endpoint and attach again")]
    PrimaryEnded,
    /// NVIPC's dump tool was used on the link, which ends it.
    #[error("nv_ipc_dump was called on this link, which ends it; restart both sides")]
    Dumped,
    /// This endpoint was closed.
    #[error("this endpoint is closed; open it again")]
    Closed,
    /// A setting or message is not possible with the UDP transport.
    #[error("udp: {why}")]
    Udp {
        /// The reason and the remedy.
        why: &'static str,
    },
    /// A system call failed.
    #[error("cannot {doing}")]
    System {
        /// The operation that failed.
        doing: String,
        /// The error of the system call.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn system(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { doing: doing.into(), source: source.into() }
    }
}
