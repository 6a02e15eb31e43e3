//! The backend for links in NVIPC's layout. The peer may be an unmodified NVIPC process.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shmesh_nvipc_wire::{self as wire, Endpoint, Options};
use shmesh_sys::causes::with_causes;

use super::{
    Agrees, Backend, Buffers, CopiedMessage, Direction, Failure, Fields, PollSleep, PoolId, ReceivedMessage,
    Result,
};
use crate::log::say;

/// An endpoint on a link in NVIPC's layout.
#[derive(Debug)]
pub struct WireBackend {
    endpoint: Endpoint,
    agrees: ReconnectHook,
    has_said_so: AtomicBool,
}

/// The function to ask before another secondary may attach.
#[derive(Clone, Default)]
struct ReconnectHook(Arc<Mutex<Option<Agrees>>>);

impl std::fmt::Debug for ReconnectHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReconnectHook")
    }
}

#[cold]
pub(super) fn failed(error: wire::Error) -> Failure {
    if let wire::Error::Empty { pool, len } = error {
        return Failure::Exhausted(pool, len);
    }
    Failure::Refused(with_causes(&error))
}

impl WireBackend {
    /// Creates a link as its primary.
    ///
    /// # Errors
    /// As for [`Options::create`].
    pub fn create(
        options: &Options,
        prefix: &str,
        pools: [shmesh::config::PoolConfig; PoolId::COUNT],
    ) -> Result<Self> {
        let agrees = ReconnectHook::default();
        let asked = agrees.clone();
        let ask = move || {
            // Called without the lock, because the function may set its own successor.
            let agrees = asked.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            agrees.is_none_or(|agrees| agrees())
        };
        let endpoint = options.create_with(prefix, pools, ask).map_err(failed)?;
        Ok(Self { endpoint, agrees, has_said_so: AtomicBool::new(false) })
    }

    /// Attaches to a link as its secondary.
    ///
    /// # Errors
    /// As for [`Options::attach`].
    pub fn attach(options: &Options, prefix: &str) -> Result<Self> {
        let endpoint = options.attach(prefix).map_err(failed)?;
        Ok(Self { endpoint, agrees: ReconnectHook::default(), has_said_so: AtomicBool::new(false) })
    }
}

/// Converts buffers to the wire crate's type.
pub(super) fn named(msg: NonNull<u8>, data: Option<NonNull<u8>>, data_pool: Option<PoolId>) -> wire::Buffers {
    let data = data.map_or(std::ptr::null_mut(), NonNull::as_ptr);
    wire::Buffers { msg: msg.as_ptr(), data, data_pool }
}

/// Converts a caller's message to the wire crate's type. A DATA part without a pool follows its MSG part.
pub(super) fn given(fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> wire::Message {
    let data = data.filter(|_| fields.data_pool.is_some());
    // Longer lengths fit into no buffer.
    let signed = |len: u32| i32::try_from(len).unwrap_or(i32::MAX);
    wire::Message {
        msg_id: fields.msg_id,
        cell_id: fields.cell_id,
        msg_len: signed(fields.msg_len),
        data_len: signed(fields.data_len),
        buffers: named(msg, data, fields.data_pool),
    }
}

pub(super) fn allocated(buffers: wire::Buffers) -> Result<Buffers> {
    let msg = NonNull::new(buffers.msg).ok_or_else(|| {
        Failure::Refused("msg_buf is NULL; pass the message as it was allocated or received".into())
    })?;
    Ok(Buffers { msg, data: NonNull::new(buffers.data) })
}

pub(super) fn taken(message: wire::Message) -> Result<ReceivedMessage> {
    let len = |len: i32| u32::try_from(len).unwrap_or(0);
    Ok(ReceivedMessage {
        fields: Fields {
            msg_id: message.msg_id,
            cell_id: message.cell_id,
            msg_len: len(message.msg_len),
            data_len: len(message.data_len),
            data_pool: message.buffers.data_pool.filter(|_| !message.buffers.data.is_null()),
        },
        buffers: allocated(message.buffers)?,
    })
}

impl Backend for WireBackend {
    fn pool(&self, pool: PoolId) -> Option<(u32, u32)> {
        let size = self.endpoint.pool(pool);
        size.is_enabled().then_some((size.buf_size_bytes, size.pool_len))
    }

    fn ring_len(&self) -> u32 {
        self.endpoint.pool(PoolId::CpuMsg).pool_len
    }

    fn allocate(&self, data: Option<PoolId>) -> Result<Buffers> {
        // Without a lock, for programs that poll.
        if let Some(empty) = self.endpoint.empty_pool(data) {
            return Err(Failure::Exhausted(empty, self.endpoint.pool(empty).pool_len));
        }
        allocated(self.endpoint.allocate(data).map_err(failed)?)
    }

    fn send(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()> {
        self.endpoint.send(given(fields, msg, data)).map_err(failed)
    }

    fn send_loopback(&self, fields: Fields, msg: NonNull<u8>, data: Option<NonNull<u8>>) -> Result<()> {
        self.endpoint.send_to_self(given(fields, msg, data)).map_err(failed)
    }

    fn is_known_empty(&self) -> bool {
        self.endpoint.has_no_message()
    }

    fn receive(&self) -> Result<Option<ReceivedMessage>> {
        self.endpoint.receive().map_err(failed)?.map(taken).transpose()
    }

    fn release(&self, msg: NonNull<u8>, data: Option<NonNull<u8>>, pool: Option<PoolId>) -> Result<()> {
        self.endpoint.release(named(msg, data, pool)).map_err(failed)
    }

    fn post(&self) -> Result<()> {
        self.endpoint.notify().map_err(failed)
    }

    fn take(&self) -> Result<bool> {
        self.endpoint.take().map_err(failed)
    }

    /// Keeps waiting after the primary has ended: NVIPC's programs wait in a loop, perhaps at SCHED_FIFO, and an immediate
    /// error would make that loop spin.
    fn sleep(self: Arc<Self>) -> Result<Option<PollSleep>> {
        if self.endpoint.has_primary_ended() && !self.has_said_so.swap(true, Ordering::Relaxed) {
            say!(
                "link {}: the primary has ended, and this wait goes on until ipc_destroy: destroy this instance and create it \
                 again to join the primary's successor",
                self.endpoint.prefix()
            );
        }
        let fds = self.endpoint.waits_on_until_closed().map(|fd| fd.as_raw_fd());
        Ok(Some(PollSleep { fds, guard: Box::new(self) }))
    }

    fn fd(&self) -> Result<c_int> {
        Ok(self.endpoint.fd().as_raw_fd())
    }

    fn queued(&self) -> Result<usize> {
        Ok(self.endpoint.queued())
    }

    fn sent_at(&self, msg: NonNull<u8>) -> Result<i64> {
        let at = self.endpoint.sent_at(msg.as_ptr()).map_err(failed)?;
        Ok(i64::try_from(at).unwrap_or(-1))
    }

    fn copy(&self, direction: Direction, host: NonNull<u8>, device: u64, len: usize) -> Result<()> {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(device).unwrap_or(0));
        let room =
            [PoolId::CudaData, PoolId::GpuData].into_iter().find_map(|pool| self.endpoint.room_at(pool, at));
        if room.is_none_or(|room| room < len) {
            return Err(Failure::Refused(format!(
                "link {}: {len} bytes at {device:#x} are not in one buffer of cuda_data or gpu_data; pass data_buf of a message \
                 from there, or what lies in it",
                self.endpoint.prefix()
            )));
        }
        let (from, to) = match direction {
            Direction::ToHost => (at, host.as_ptr()),
            Direction::ToDevice => (host.as_ptr(), at),
        };
        // SAFETY: the device bytes lie in one buffer of this link, and the caller guarantees as many at its address.
        unsafe { std::ptr::copy(from, to, len) };
        Ok(())
    }

    fn can_copy(&self) -> bool {
        true
    }

    fn copied(
        &self,
        fields: Fields,
        msg: NonNull<u8>,
        data: Option<NonNull<u8>>,
    ) -> Result<Option<CopiedMessage>> {
        let message = given(fields, msg, data);
        let buffers = allocated(self.endpoint.parts(message).map_err(failed)?)?;
        // SAFETY: this endpoint holds the buffers, and `parts` has checked the lengths.
        Ok(unsafe { CopiedMessage::of(fields, buffers) })
    }

    fn ask_before_another(&self, agrees: Agrees) {
        *self.agrees.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(agrees);
    }

    /// `close` gives back the memory of the link.
    fn may_linger(&self) -> bool {
        true
    }

    fn close(&self) {
        self.endpoint.close();
    }
}
