//! Backends: the transports that carry the messages of an instance.
//!
//! NVIPC's functions identify buffers by address, and any thread may call any of them. So a backend can be called from any
//! thread at any time, and finds by address which buffers this endpoint holds. It trusts neither caller nor peer: an
//! address that it did not hand out is refused.
//!
//! | file | concept |
//! |---|---|
//! | `link.rs` | links in shmesh's own layout |
//! | `device.rs` | their device pools |
//! | `wire.rs` | links in NVIPC's layout, whose peer may be NVIPC |
//! | `udp.rs` | datagrams to another node |
//! | `copied.rs` | copies of messages for a tap |

mod copied;
mod device;
mod link;
mod udp;
mod wire;

use std::ffi::c_int;
use std::fmt::{self, Debug};
use std::ptr::NonNull;
use std::sync::Arc;

use shmesh::{Error, ErrorKind};
use shmesh_sys::causes::with_causes;

pub use copied::CopiedMessage;
pub(crate) use device::{Maker, present};
pub use link::LinkBackend;
pub use shmesh::config::PoolId;
pub use udp::UdpBackend;
pub use wire::WireBackend;

/// The reason why a call failed.
#[derive(Debug)]
pub enum Failure {
    /// No buffer of this pool is free, which is ordinary: the caller retries. With the number of buffers of the pool.
    Exhausted(PoolId, u32),
    /// The primary ended before the link was complete. An attempt to attach may be repeated.
    PrimaryLeft(String),
    /// Any other reason, with the remedy.
    Refused(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted(pool, len) => write!(
                f,
                "all {len} buffers of pool {pool} are allocated, queued or held by a receiver; receive or release some, \
                 or raise its pool_len"
            ),
            Self::PrimaryLeft(text) | Self::Refused(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Failure {}

/// Converts an error of the library, with its causes.
#[cold]
fn failed(error: &Error) -> Failure {
    if let ErrorKind::Exhausted { pool, len, .. } = error.kind() {
        return Failure::Exhausted(*pool, *len);
    }
    Failure::Refused(with_causes(error))
}

/// The result type of backends.
pub type Result<T> = std::result::Result<T, Failure>;

/// The direction of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Direction {
    /// From a DATA part in device memory.
    ToHost,
    /// To a DATA part in device memory.
    ToDevice,
}

/// The fields of a message.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fields {
    /// The message id, as the application defines it.
    pub msg_id: i32,
    /// The cell id, as the application defines it.
    pub cell_id: i32,
    /// Bytes of the MSG part.
    pub msg_len: u32,
    /// Bytes of the DATA part. Meaningless without one.
    pub data_len: u32,
    /// The pool of the DATA part; `None` without one.
    pub data_pool: Option<PoolId>,
}

/// The addresses of a message's parts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Buffers {
    /// The MSG part, which is a whole buffer.
    pub msg: NonNull<u8>,
    /// The DATA part, if there is one.
    pub data: Option<NonNull<u8>>,
}

/// A message that was received.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedMessage {
    /// Its fields. Lengths are checked against the buffers.
    pub fields: Fields,
    /// The addresses of its parts.
    pub buffers: Buffers,
}

/// A prepared sleep: the thread polls the descriptors for reading, and drops this when it is awake.
#[derive(Debug)]
pub struct PollSleep {
    /// The descriptors to poll, open as long as `guard` lives.
    pub fds: [c_int; 2],
    /// Ends the sleep when dropped, in the thread that slept.
    pub guard: Box<dyn Debug>,
}

/// Decides whether another secondary may attach.
pub type Agrees = Arc<dyn Fn() -> bool + Send + Sync>;

/// One endpoint of a connection, which ends when it is dropped. [`close`](Self::close) first wakes the calls that wait.
pub trait Backend: Send + Sync + Debug {
    /// Buffer size in bytes and number of buffers of `pool`; `None` if there is no such pool.
    fn pool(&self, pool: PoolId) -> Option<(u32, u32)>;

    /// Number of slots of a ring.
    fn ring_len(&self) -> u32;

    /// Allocates a MSG buffer and, if `data` names a pool, a buffer of that pool: both or none. Never waits.
    ///
    /// # Errors
    /// [`Exhausted`](Failure::Exhausted), at once; [`Refused`](Failure::Refused) for a pool that does not exist.
    fn allocate(&self, data: Option<PoolId>) -> Result<Buffers>;

    /// Sends the loan or message at `msg`. After `Ok`, this endpoint no longer holds it; after an error it still does.
    ///
    /// # Errors
    /// If a length does not fit, or this endpoint does not hold the addresses.
    fn send(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()>;

    /// Sends to this endpoint itself.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn send_loopback(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()>;

    /// Whether [`receive`](Self::receive) would have returned `None` at some time during this call. Takes no lock and does not
    /// panic. `false` says nothing.
    fn is_known_empty(&self) -> bool {
        false
    }

    /// Receives the oldest message, if there is one. Never waits.
    ///
    /// # Errors
    /// If the peer breaks the rules. The next message can be received.
    fn receive(&self) -> Result<Option<ReceivedMessage>>;

    /// Releases the loan or message at `msg`, with its DATA part. `data` and `pool` are the caller's view of that part.
    ///
    /// # Errors
    /// If this endpoint does not hold it.
    fn release(&self, msg: NonNull<u8>, data: Option<NonNull<u8>>, pool: Option<PoolId>) -> Result<()>;

    /// Wakes the other side once. Posts are counted.
    ///
    /// # Errors
    /// If a system call fails.
    fn post(&self) -> Result<()>;

    /// Consumes one post and returns whether there was one. Never waits.
    ///
    /// # Errors
    /// After [`close`](Self::close), or if a system call fails.
    fn take(&self) -> Result<bool>;

    /// As [`take`](Self::take), for a caller that found the descriptor readable.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    fn take_signal(&self) -> Result<bool> {
        self.take()
    }

    /// Prepares a thread to sleep until there may be a post, or the backend is closed. Returns `None` if a post arrived
    /// meanwhile and was consumed.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    fn sleep(self: Arc<Self>) -> Result<Option<PollSleep>>;

    /// The descriptor that is readable while there are posts.
    ///
    /// # Errors
    /// If there is no descriptor.
    fn fd(&self) -> Result<c_int>;

    /// Approximate number of queued messages.
    ///
    /// # Errors
    /// After [`close`](Self::close).
    fn queued(&self) -> Result<usize>;

    /// The time at which the message at `msg` was sent, in nanoseconds of the real-time clock.
    ///
    /// # Errors
    /// If the time is unknown.
    fn sent_at(&self, msg: NonNull<u8>) -> Result<i64>;

    /// Copies between the host and a DATA part in device memory, and waits for completion.
    ///
    /// # Errors
    /// If the bytes do not lie in one buffer of a device pool, or the driver fails.
    fn copy(&self, _direction: Direction, _host: NonNull<u8>, _device: u64, _len: usize) -> Result<()> {
        Err(Failure::Refused(
            "this transport has no device pools; use transport shm and layout shmesh, or cpu_data and a CUDA stream of your own".into(),
        ))
    }

    /// The number of the GPU with the device pools; -1 if they are in host memory or do not exist.
    fn cuda_device_id(&self) -> c_int {
        -1
    }

    /// Whether host pools are page-locked for a GPU.
    fn is_locked(&self) -> bool {
        false
    }

    /// Whether an address is in a buffer in GPU memory.
    fn is_on_gpu(&self, _address: u64) -> bool {
        false
    }

    /// Sets a function to ask before another secondary may attach, where one could do harm. Links of shmesh never ask.
    fn ask_before_another(&self, _agrees: Agrees) {}

    /// Whether [`copied`](Self::copied) is implemented.
    fn can_copy(&self) -> bool {
        false
    }

    /// Copies the loan or message at `msg`, as [`send`](Self::send) would send it. Returns `None` if memory is short.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send) that can be found in advance; or if there is no tap.
    fn copied(&self, _: Fields, _: NonNull<u8>, _: Option<NonNull<u8>>) -> Result<Option<CopiedMessage>> {
        Err(Failure::Refused("messages of this transport cannot be copied for a tap".into()))
    }

    /// Whether this value may stay in memory for some time after [`close`](Self::close), because nothing of consequence is
    /// left in it then.
    fn may_linger(&self) -> bool {
        false
    }

    /// Wakes all calls that wait, and releases what this endpoint holds. Calls that other threads make later fail.
    fn close(&self);
}
