//! One side of a link: allocate, send, receive, release, notify.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | the calls |
//! | `link.rs` | the parts of a link in shared memory, lookup of buffers by address |
//! | `open.rs` | create a link as its primary, attach as its secondary |
//! | `peer.rs` | the service thread: accepts peers and detects their death |
//! | `recover.rs` | recovery of what a dead secondary left |

mod link;
mod open;
mod peer;
mod recover;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::{Duration, Instant};

use shmesh::Side;
use shmesh::config::{PoolConfig, PoolId};
use shmesh_sys::eventfd;
use shmesh_sys::poll::{self, Watch};

use crate::held::DataBuffer;
use crate::layout::{
    INFO_CELL_ID, INFO_DATA_LEN, INFO_DIRECTION, INFO_MSG_ID, INFO_MSG_LEN, INFO_REFERENCES,
};
use crate::queue::IndexQueue;
use crate::{Error, Result};
pub use link::RecoveryStats;
use link::{Pool, Shared};
pub use open::Options;

/// Addresses of the buffers of one message.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
/// # let phy = shmesh_nvipc_wire::Options::new().dir(dir.path()).create("nvipc", pools)?;
/// use shmesh::config::PoolId;
/// let both = phy.allocate(Some(PoolId::CpuData))?;
/// assert!(!both.msg.is_null() && !both.data.is_null());
/// let alone = phy.allocate(None)?;
/// assert!(alone.data.is_null() && alone.data_pool.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Buffers {
    /// The MSG buffer, or null.
    pub msg: *mut u8,
    /// The DATA buffer, or null.
    pub data: *mut u8,
    /// The pool of the DATA buffer.
    pub data_pool: Option<PoolId>,
}

impl Buffers {
    /// A value without buffers: both addresses are null.
    pub const NONE: Self = Self { msg: std::ptr::null_mut(), data: std::ptr::null_mut(), data_pool: None };
}

/// A message: its descriptor and the addresses of its buffers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Message {
    /// The message id, as the application defines it.
    pub msg_id: i32,
    /// The radio cell that the message is about.
    pub cell_id: i32,
    /// Bytes of the MSG part.
    pub msg_len: i32,
    /// Bytes of the DATA part. Without a DATA buffer the number has no meaning and is passed through.
    pub data_len: i32,
    /// The addresses of its buffers.
    pub buffers: Buffers,
}

// SAFETY: the addresses are only names of buffers; nothing here dereferences them. Code that does is responsible for it.
#[expect(unsafe_code, reason = "raw pointers are not Send by default, and these are only names of buffers")]
unsafe impl Send for Buffers {}

/// One side of a link in NVIPC's layout.
///
/// Every call may come from any thread. Addresses of buffers stay mapped until the endpoint is dropped.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
/// let options = shmesh_nvipc_wire::Options::new().dir(dir.path());
/// let phy = options.create("nvipc", pools)?;
/// let mac = options.attach("nvipc")?;
/// assert_eq!((phy.side(), mac.side()), (shmesh::Side::Primary, shmesh::Side::Secondary));
/// assert_eq!(phy.prefix(), "nvipc");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
    service: std::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Endpoint {
    /// The side of this endpoint.
    #[must_use]
    pub fn side(&self) -> Side {
        self.shared.side
    }

    /// The prefix of the link's files, which is NVIPC's name for the link.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.shared.names.prefix()
    }

    /// The size of a pool, as the primary configured it.
    #[must_use]
    pub fn pool(&self, pool: PoolId) -> PoolConfig {
        self.shared.shape.pools[pool.index()]
    }

    /// Allocates a MSG buffer, and with `pool` a DATA buffer of that pool. The buffers are not cleared.
    ///
    /// # Errors
    /// [`Empty`](Error::Empty) if no buffer is free: this call does not wait. [`NoPool`](Error::NoPool).
    /// [`Closed`](Error::Closed), [`PrimaryEnded`](Error::PrimaryEnded), [`Dumped`](Error::Dumped).
    pub fn allocate(&self, pool: Option<PoolId>) -> Result<Buffers> {
        let shared = &*self.shared;
        let data_pool = match pool {
            None => None,
            Some(pool) => Some(shared.data_pool(pool)?),
        };
        let msg_pool = shared.msg_pool();
        let _entered = shared.enter()?;
        let msg = take_free(msg_pool)?;
        let data = match data_pool.map(take_free).transpose() {
            Ok(index) => index.zip(pool).map(|(index, pool)| DataBuffer { pool, index }),
            Err(error) => {
                msg_pool.put_back(msg);
                return Err(error);
            }
        };
        shared.attached.set(msg, data);
        let info = shared.info(msg);
        shared.write_data(info, data);
        info[INFO_REFERENCES].store(1, Relaxed);
        Ok(shared.buffers(msg, data))
    }

    /// Sends a message. Its buffers then belong to the receiver. A received message may be forwarded this way.
    ///
    /// A DATA buffer that was allocated or received with the MSG buffer is sent with it, as in NVIPC, even if
    /// `buffers.data` is null.
    ///
    /// # Errors
    /// [`Length`](Error::Length), [`NotHeld`](Error::NotHeld): nothing was sent, and the buffers stay with the caller.
    /// [`Queue`](Error::Queue), and the errors of [`allocate`](Self::allocate) for a link that has ended.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
    /// # let phy = shmesh_nvipc_wire::Options::new().dir(dir.path()).create("nvipc", pools)?;
    /// use shmesh_nvipc_wire::{Error, Message};
    /// let buffers = phy.allocate(None)?;
    /// let message = Message { msg_id: 1, cell_id: 0, msg_len: 16, data_len: 0, buffers };
    /// phy.send(message)?;
    /// assert!(matches!(phy.send(message), Err(Error::NotHeld { .. })), "it is the receiver's now");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn send(&self, message: Message) -> Result<()> {
        let ring = self.shared.tx();
        self.enqueue(message, ring, self.shared.direction())
    }

    /// Sends a message to this side itself, through the ring that it receives from.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_to_self(&self, message: Message) -> Result<()> {
        let ring = self.shared.rx();
        let direction = match self.shared.side {
            Side::Primary => 2,
            Side::Secondary => 3,
        };
        self.enqueue(message, ring, direction)
    }

    /// Returns the buffers that [`send`](Self::send) would send with this message, for a caller that copies them first.
    ///
    /// # Errors
    /// [`Length`](Error::Length), [`NotHeld`](Error::NotHeld), and the errors of [`receive`](Self::receive) for a link that
    /// has ended.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
    /// # let phy = shmesh_nvipc_wire::Options::new().dir(dir.path()).create("nvipc", pools)?;
    /// use shmesh_nvipc_wire::{Buffers, Message};
    /// let buffers = phy.allocate(Some(shmesh::config::PoolId::CpuData))?;
    /// let msg_alone = Buffers { data: std::ptr::null_mut(), data_pool: None, ..buffers };
    /// let message = Message { msg_id: 1, cell_id: 0, msg_len: 16, data_len: 0, buffers: msg_alone };
    /// assert_eq!(phy.parts(message)?, buffers, "its DATA buffer goes along");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn parts(&self, message: Message) -> Result<Buffers> {
        let _entered = self.shared.enter_to_receive()?;
        let checked = self.checked(&message)?;
        Ok(self.shared.buffers(checked.index, checked.data))
    }

    /// Checks that this side holds the buffers of a message and that its lengths fit.
    fn checked(&self, message: &Message) -> Result<CheckedMessage> {
        let shared = &*self.shared;
        let Buffers { msg, data, data_pool } = message.buffers;
        let msg_pool = shared.msg_pool();
        let index = msg_pool.held_index(msg)?;
        let msg_len = msg_pool.checked_len("msg_len", message.msg_len)?;
        let data = if data.is_null() {
            shared.attached.get(index).filter(|data| shared.holds(*data))
        } else {
            let id = data_pool.ok_or(Error::NotHeld { address: data.addr(), pool: PoolId::CpuData })?;
            Some(DataBuffer { pool: id, index: shared.data_pool(id)?.held_index(data)? })
        };
        let data_len = match data {
            None => message.data_len.cast_unsigned(),
            Some(data) => shared.data_pool(data.pool)?.checked_len("data_len", message.data_len)?,
        };
        Ok(CheckedMessage { index, msg_len, data, data_len })
    }

    fn enqueue(&self, message: Message, ring: &IndexQueue, direction: u32) -> Result<()> {
        let shared = &*self.shared;
        let _entered = shared.enter()?;
        let CheckedMessage { index, msg_len, data, data_len } = self.checked(&message)?;
        let (msg_pool, msg) = (shared.msg_pool(), message.buffers.msg);
        // If two threads send the same buffer, only one succeeds here.
        if !msg_pool.held.give(index) {
            return Err(msg_pool.not_held(msg));
        }
        if let Some(data) = data
            && !shared.data_pool(data.pool)?.held.give(data.index)
        {
            msg_pool.held.take(index);
            return Err(shared.data_pool(data.pool)?.not_held(message.buffers.data));
        }
        let info = shared.info(index);
        info[INFO_MSG_ID].store(message.msg_id.cast_unsigned(), Relaxed);
        info[INFO_CELL_ID].store(message.cell_id.cast_unsigned(), Relaxed);
        info[INFO_MSG_LEN].store(msg_len, Relaxed);
        info[INFO_DATA_LEN].store(data_len, Relaxed);
        info[INFO_DIRECTION].store(direction, Relaxed);
        shared.write_data(info, data);
        shared.stamp(index);
        let put = ring.enqueue(index);
        if put.is_err() {
            msg_pool.held.take(index);
            if let Some(data) = data {
                shared.data_pool(data.pool)?.held.take(data.index);
            }
            return Err(Error::Queue { what: "the ring to the peer" });
        }
        Ok(())
    }

    /// Whether [`receive`](Self::receive) would have returned no message at some time during this call. It takes no lock, for
    /// callers that poll. `false` says nothing.
    #[must_use]
    #[inline]
    pub fn has_no_message(&self) -> bool {
        self.shared.rx().is_empty_now() && self.shared.check_open_to_send().is_ok()
    }

    /// Whether [`allocate`](Self::allocate) would have found one of its pools empty at some time during this call. As
    /// [`has_no_message`](Self::has_no_message).
    #[must_use]
    #[inline]
    pub fn empty_pool(&self, data: Option<PoolId>) -> Option<PoolId> {
        let pools = [Some(PoolId::CpuMsg), data].into_iter().flatten();
        let mut pools = pools.filter_map(|id| self.shared.pools[id.index()].as_ref());
        let empty = pools.find(|pool| pool.is_empty_now())?;
        self.shared.check_open_to_send().is_ok().then_some(empty.id)
    }

    /// Receives the next message, if there is one. The caller holds its buffers until it releases or forwards them.
    ///
    /// # Errors
    /// [`BadMessage`](Error::BadMessage): that message is dropped and its buffers are released. Call again, as more may be
    /// queued.
    /// [`Queue`](Error::Queue), [`Closed`](Error::Closed), [`Dumped`](Error::Dumped), and
    /// [`PrimaryEnded`](Error::PrimaryEnded) once
    /// the primary has ended and the ring is empty.
    pub fn receive(&self) -> Result<Option<Message>> {
        let shared = &*self.shared;
        let _entered = shared.enter_to_receive()?;
        let taken = shared.rx().dequeue().map_err(|_| Error::Queue { what: "the ring from the peer" })?;
        let Some(index) = taken else {
            return if shared.is_over() { Err(Error::PrimaryEnded) } else { Ok(None) };
        };
        let msg_pool = shared.msg_pool();
        let bad = |why| Err(Error::BadMessage { why });
        if !msg_pool.held.take(index) {
            return bad("it names a MSG buffer that is held here");
        }
        let info = shared.info(index);
        let load = |word: usize| info[word].load(Relaxed);
        let msg_len = load(INFO_MSG_LEN);
        let data = match shared.read_data(info) {
            Ok(data) => data,
            Err(why) => {
                shared.attached.set(index, None);
                shared.release_msg(index);
                return bad(why);
            }
        };
        shared.attached.set(index, data);
        let data_len = load(INFO_DATA_LEN);
        let data_max = data.map(|data| shared.shape.pools[data.pool.index()].buf_size_bytes);
        let why = if msg_len > msg_pool.config.buf_size_bytes {
            Some("its msg_len is longer than a buffer")
        } else if data_max.is_some_and(|max| data_len > max) {
            Some("its data_len is longer than a buffer")
        } else {
            None
        };
        if let Some(why) = why {
            if let (true, Some(data)) = (shared.release_msg(index), data) {
                shared.release_data(data);
            }
            return bad(why);
        }
        Ok(Some(Message {
            msg_id: load(INFO_MSG_ID).cast_signed(),
            cell_id: load(INFO_CELL_ID).cast_signed(),
            msg_len: msg_len.cast_signed(),
            data_len: data_len.cast_signed().max(0),
            buffers: shared.buffers(index, data),
        }))
    }

    /// Returns buffers to their pools: both, or one of them if the other is null.
    ///
    /// # Errors
    /// [`NotHeld`](Error::NotHeld) for a buffer that is not held here; the other one is released anyway.
    /// [`Closed`](Error::Closed), [`Dumped`](Error::Dumped).
    pub fn release(&self, buffers: Buffers) -> Result<()> {
        let shared = &*self.shared;
        let _entered = shared.enter_to_receive()?;
        let mut done = Ok(());
        let mut traced = false;
        if !buffers.msg.is_null() {
            match shared.msg_pool().held_index(buffers.msg) {
                Ok(index) => traced = !shared.release_msg(index),
                Err(error) => done = Err(error),
            }
        }
        if !buffers.data.is_null() {
            let pool = buffers
                .data_pool
                .ok_or(Error::NotHeld { address: buffers.data.addr(), pool: PoolId::CpuData });
            match pool.and_then(|id| Ok((id, shared.data_pool(id)?.held_index(buffers.data)?))) {
                // NVIPC's tracing still reads the message, and releases both buffers with its last reference.
                Ok((pool, index)) if traced => drop(shared.data_pool(pool)?.held.give(index)),
                Ok((pool, index)) => shared.release_data(DataBuffer { pool, index }),
                Err(error) => done = Err(error),
            }
        }
        done
    }

    /// Wakes the other side: one call that waits there, or the next one that will.
    ///
    /// # Errors
    /// [`NoPeer`](Error::NoPeer) before a peer has connected and after it has ended. [`PrimaryEnded`](Error::PrimaryEnded),
    /// [`Closed`](Error::Closed), [`Dumped`](Error::Dumped).
    pub fn notify(&self) -> Result<()> {
        let entered = self.shared.enter()?;
        drop(entered);
        let peer = self.shared.peer().ok_or(Error::NoPeer)?;
        peer.post().map_err(|error| Error::system("notify the peer", error))
    }

    /// Waits until the other side notifies, and consumes one notification. Returns `false` if `limit` expired.
    ///
    /// # Errors
    /// [`PrimaryEnded`](Error::PrimaryEnded), [`Closed`](Error::Closed), also if that happens during the wait.
    pub fn wait(&self, limit: Option<Duration>) -> Result<bool> {
        let shared = &*self.shared;
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            if self.take()? {
                return Ok(true);
            }
            shared.living()?;
            let [rung, over] = self.waits_on();
            let ready = poll::wait(&mut [Watch::readable(&rung), Watch::readable(&over)], deadline);
            if ready.map_err(|error| Error::system("wait for the peer", error))? == 0 {
                return Ok(false);
            }
        }
    }

    /// Consumes one notification, if there is one.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), [`System`](Error::System).
    pub fn take(&self) -> Result<bool> {
        if self.shared.closed.load(Acquire) {
            return Err(Error::Closed);
        }
        eventfd::take(&self.shared.eventfd).map_err(|error| Error::system("take a notification", error))
    }

    /// The descriptor that becomes readable when the other side notifies, for `poll` and `epoll`. It is blocking, as
    /// NVIPC's is.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.eventfd.as_fd()
    }

    /// The two descriptors that [`wait`](Self::wait) polls. The first is readable after a notification, the second once the
    /// link has
    /// ended or this endpoint is closed.
    #[must_use]
    pub fn waits_on(&self) -> [BorrowedFd<'_>; 2] {
        [self.shared.eventfd.as_fd(), self.shared.over.as_fd()]
    }

    /// As [`waits_on`](Self::waits_on), for applications that wait for a new primary, as NVIPC's do: the second descriptor
    /// becomes
    /// readable when this endpoint is closed, but not when the primary ends.
    #[must_use]
    pub fn waits_on_until_closed(&self) -> [BorrowedFd<'_>; 2] {
        [self.shared.eventfd.as_fd(), self.shared.closing.as_fd()]
    }

    /// Whether the primary is known to have ended.
    #[must_use]
    pub fn has_primary_ended(&self) -> bool {
        self.shared.is_over()
    }

    /// Whether a peer has connected and is not known to have ended.
    #[must_use]
    pub fn has_peer(&self) -> bool {
        self.shared.peer().is_some_and(|peer| !peer.has_ended())
    }

    /// Approximate number of messages queued for this side.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.shared.rx().len()
    }

    /// Whether an address lies in a buffer of this link.
    #[must_use]
    pub fn is_inside(&self, address: *const u8) -> bool {
        self.shared.pools.iter().flatten().any(|pool| pool.index(address).is_some())
    }

    /// Number of bytes from an address to the end of its buffer, or `None` if it lies in no buffer of `pool`.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let pools = shmesh::config::LinkConfig::new("nvipc".parse()?).pools;
    /// # let phy = shmesh_nvipc_wire::Options::new().dir(dir.path()).create("nvipc", pools)?;
    /// use shmesh::config::PoolId;
    /// let buffers = phy.allocate(None)?;
    /// assert_eq!(phy.room_at(PoolId::CpuMsg, buffers.msg.wrapping_add(8)), Some(8184));
    /// assert_eq!(phy.room_at(PoolId::CpuData, buffers.msg), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn room_at(&self, pool: PoolId, address: *const u8) -> Option<usize> {
        self.shared.pools[pool.index()].as_ref()?.room_at(address)
    }

    /// The time at which a held message was sent, in nanoseconds since 1970, as its sender recorded it.
    ///
    /// # Errors
    /// [`NotHeld`](Error::NotHeld) if this endpoint does not hold the MSG buffer.
    pub fn sent_at(&self, msg: *const u8) -> Result<u64> {
        let index = self.shared.msg_pool().held_index(msg)?;
        let [seconds, nanos] = self.shared.time_of_send(index).each_ref().map(|word| word.load(Relaxed));
        Ok(seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos))
    }

    /// Totals of what was recovered from secondaries that ended.
    #[must_use]
    pub fn recovered(&self) -> RecoveryStats {
        self.shared.recovered()
    }

    /// Closes the endpoint: its buffers are released, calls that wait return, and a primary removes the files.
    ///
    /// Later calls fail with [`Closed`](Error::Closed). Addresses stay mapped until the endpoint is dropped, and show zeros.
    /// Dropping also closes.
    pub fn close(&self) {
        let shared = &*self.shared;
        {
            let _alone = shared.alone();
            if shared.closed.swap(true, AcqRel) {
                return;
            }
            if !shared.is_over() {
                shared.release_all();
            }
            shared.discard();
            let _ = eventfd::post(&shared.closing);
        }
        // The listener ends with its thread. Until the files are removed, no other process may take them for stale.
        let _no_successor = shared.lock_files();
        let _ = eventfd::post(&shared.over);
        let service = self.service.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        // A callback of the application may close the endpoint from the service thread, which cannot join itself.
        if let Some(service) = service.filter(|service| service.thread().id() != std::thread::current().id())
        {
            let _ = service.join();
        }
        shared.remove_files();
        // This comes last: it tells the peer that this endpoint no longer touches shared memory.
        if let Some(peer) = shared.peer() {
            peer.say_goodbye();
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

/// A checked message to send, with indices in place of addresses.
struct CheckedMessage {
    index: u32,
    msg_len: u32,
    data: Option<DataBuffer>,
    data_len: u32,
}

/// Takes a free buffer of a pool.
fn take_free(pool: &Pool) -> Result<u32> {
    if let Some(index) = pool.held.unpark() {
        return Ok(index);
    }
    // If NVIPC wiped the pool, its free list offers buffers that we hold. They are skipped here and come back when we
    // release them.
    for _ in 0..=pool.config.pool_len {
        match pool.free.dequeue() {
            Ok(Some(index)) if pool.held.take(index) => return Ok(index),
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(_) => return Err(Error::Queue { what: "a list of free buffers" }),
        }
    }
    Err(pool.empty())
}

impl Pool {
    fn empty(&self) -> Error {
        Error::Empty { pool: self.id, len: self.config.pool_len }
    }

    /// Whether there was no buffer to allocate at some time during this call.
    fn is_empty_now(&self) -> bool {
        !self.held.has_parked() && self.free.is_empty_now()
    }

    /// Releases a buffer of ours: parks it for our next allocation, or returns it to the list of both sides.
    fn put_back(&self, index: u32) {
        if !self.held.park(index) {
            self.return_to_list(index);
        }
    }

    /// Whether the free list is so short that the other side may soon find it empty.
    fn is_scarce(&self) -> bool {
        self.free.len() < (self.config.pool_len / 8) as usize
    }

    /// Returns all parked buffers to the free list.
    fn return_parked(&self) {
        self.held.unpark_all().into_iter().for_each(|index| self.return_to_list(index));
    }

    fn return_to_list(&self, index: u32) {
        if self.held.give(index) {
            // It fails if the buffer is there already, because NVIPC wiped the pool. Or the list is damaged, and recovery
            // or a new link
            // brings the buffer back.
            let _ = self.free.enqueue(index);
        }
    }
}
