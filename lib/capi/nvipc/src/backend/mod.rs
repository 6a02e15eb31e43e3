//! What carries the messages of an instance.
//!
//! NVIPC's functions name buffers by address, and any thread may call any of them. So a backend is called by any thread at
//! any time, and knows by the address which buffers this endpoint holds. It trusts neither the caller nor the peer: an address
//! that it did not hand out is refused.
//!
//! | file | what it is |
//! |---|---|
//! | `link.rs` | a link of shmesh |
//! | `device.rs` | its pools in device memory |
//! | `wire.rs` | a link in NVIPC's own layout, whose other side may be NVIPC |
//! | `udp.rs` | datagrams, to another node |

mod device;
mod link;
mod udp;
mod wire;

use std::ffi::c_int;
use std::fmt::{self, Debug};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::tap::Copied;
pub(crate) use device::{Maker, present};
pub use link::LinkBackend;
pub use shmesh::config::PoolId;
pub use udp::UdpBackend;
pub use wire::WireBackend;

/// Why a call failed.
#[derive(Debug)]
pub enum Failure {
    /// Ordinary: no buffer of this pool is free, and the caller tries again. How many it has.
    Exhausted(PoolId, u32),
    /// The primary left before the link was complete; who joins it may try again.
    PrimaryLeft(String),
    /// Anything else, with what the user can do about it.
    Refused(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted(pool, len) => write!(
                f,
                "all {len} buffers of pool {pool} are allocated, on their way or held by a receiver; receive or release some, \
                 or raise its pool_len"
            ),
            Self::PrimaryLeft(text) | Self::Refused(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Failure {}

/// A result of a backend.
pub type Result<T> = std::result::Result<T, Failure>;

/// Where bytes are copied.
#[derive(Clone, Copy, Debug)]
pub enum Direction {
    /// From a DATA part in device memory.
    ToHost,
    /// To a DATA part in device memory.
    ToDevice,
}

/// What a message says about itself.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fields {
    /// The application's to choose.
    pub msg_id: i32,
    /// The application's to choose.
    pub cell_id: i32,
    /// Bytes of the MSG part.
    pub msg_len: u32,
    /// Bytes of the DATA part. Without one it says nothing.
    pub data_len: u32,
    /// The pool of the DATA part; `None` when there is none.
    pub data_pool: Option<PoolId>,
}

/// Where the parts of a message are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Buffers {
    /// The MSG part: a whole buffer of its pool.
    pub msg: NonNull<u8>,
    /// The DATA part, if there is one.
    pub data: Option<NonNull<u8>>,
}

/// A message that was received.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// What it says about itself. Lengths are checked against the buffers.
    pub fields: Fields,
    /// Where it is.
    pub buffers: Buffers,
}

/// A sleep that was prepared: the thread polls the descriptors for reading, and drops this when it is awake.
#[derive(Debug)]
pub struct Sleep {
    /// What to poll. Open for as long as `guard` lives.
    pub fds: [c_int; 2],
    /// Ends the sleep when it is dropped, in the thread that slept.
    pub guard: Box<dyn Debug>,
}

/// Says whether another secondary may come.
pub type Agrees = Arc<dyn Fn() -> bool + Send + Sync>;

/// One endpoint of a connection. Dropping it ends that; who waits is told by [`close`](Self::close) before.
pub trait Backend: Send + Sync + Debug {
    /// Bytes of a buffer of `pool` and how many there are; `None` when there is no such pool.
    fn pool(&self, pool: PoolId) -> Option<(u32, u32)>;

    /// Slots of a ring.
    fn ring_len(&self) -> u32;

    /// Takes a MSG buffer and, if `data` names a pool, one of that. Never waits. Takes both or none.
    ///
    /// # Errors
    /// [`Exhausted`](Failure::Exhausted), at once; [`Refused`](Failure::Refused) for a pool that is not there.
    fn allocate(&self, data: Option<PoolId>) -> Result<Buffers>;

    /// Sends what this endpoint holds at `msg`. After `Ok` it no longer holds it; after an error it does.
    ///
    /// # Errors
    /// Of a length that does not fit, and of addresses that it does not hold.
    fn send(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()>;

    /// As [`send`](Self::send), to this very endpoint.
    ///
    /// # Errors
    /// As there.
    fn send_loopback(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()>;

    /// Takes the oldest message; `None` when there is none. Never waits.
    ///
    /// # Errors
    /// Of a peer that breaks the rules; the next message can be received.
    fn receive(&self) -> Result<Option<Received>>;

    /// Gives back what this endpoint holds at `msg`, with its DATA part. `data` and `pool` are what the caller says of that.
    ///
    /// # Errors
    /// Of what it does not hold.
    fn release(&self, msg: NonNull<u8>, data: Option<NonNull<u8>>, pool: Option<PoolId>) -> Result<()>;

    /// Wakes the other side once. Such posts add up.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn post(&self) -> Result<()>;

    /// Takes one post; `false`: there is none. Never waits.
    ///
    /// # Errors
    /// After [`close`](Self::close); when the kernel refuses.
    fn take(&self) -> Result<bool>;

    /// As [`take`](Self::take), for a caller that found the descriptor readable.
    ///
    /// # Errors
    /// As there.
    fn take_signal(&self) -> Result<bool> {
        self.take()
    }

    /// Prepares a thread to sleep until something may be there to take, or the backend is closed. `None`: a post came
    /// meanwhile, and was taken.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    fn sleep(self: Arc<Self>) -> Result<Option<Sleep>>;

    /// A descriptor that is readable while there are posts.
    ///
    /// # Errors
    /// When there is none.
    fn fd(&self) -> Result<c_int>;

    /// About how many messages wait to be received.
    ///
    /// # Errors
    /// After [`close`](Self::close).
    fn queued(&self) -> Result<usize>;

    /// When the message at `msg` was sent, in nanoseconds of the real-time clock.
    ///
    /// # Errors
    /// When that is not known.
    fn sent_at(&self, msg: NonNull<u8>) -> Result<i64>;

    /// Copies between the host and a DATA part in device memory, and waits until it is done.
    ///
    /// # Errors
    /// The bytes do not lie in one buffer of a device pool; the driver refuses.
    fn copy(&self, _direction: Direction, _host: NonNull<u8>, _device: u64, _len: usize) -> Result<()> {
        Err(Failure::Refused(
            "there are no device pools here; use transport shm and layout shmesh, or cpu_data and your own stream".into(),
        ))
    }

    /// The number of the GPU that device pools are on; -1 when they are in memory of the host, or there are none.
    fn cuda_device_id(&self) -> c_int {
        -1
    }

    /// Whether pools of the host are locked for a GPU.
    fn is_locked(&self) -> bool {
        false
    }

    /// Whether an address is in a buffer that is memory of a GPU.
    fn is_on_gpu(&self, _address: u64) -> bool {
        false
    }

    /// Asks before a further secondary is let in, where one could do harm. Links of shmesh never ask.
    fn ask_before_another(&self, _agrees: Agrees) {}

    /// Whether [`copied`](Self::copied) is there.
    fn can_copy(&self) -> bool {
        false
    }

    /// Copies what this endpoint holds at `msg`, as [`send`](Self::send) would send it. `None`: there is no memory for it.
    ///
    /// # Errors
    /// As of `send`, for what can be seen before it; where there is no tap.
    fn copied(&self, _: Fields, _: NonNull<u8>, _: Option<NonNull<u8>>) -> Result<Option<Copied>> {
        Err(Failure::Refused("messages of this transport cannot be copied for a tap".into()))
    }

    /// Lets nobody wait any longer, and gives back what the endpoint holds.
    fn close(&self);
}
