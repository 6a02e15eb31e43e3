//! NVIPC's tap: a third reader of all messages that an instance sends and receives.
//!
//! While it is started, each message is copied in the call that sends or receives it. So nothing is missed that there is room
//! for, no buffer of the link waits for the reader, and what the reader has stays as it is until it gives it back. There is
//! room for a third of the buffers of each pool, as with NVIPC, and for 64 MiB; what comes beyond that goes on its way and is
//! counted. While it is not started, a message costs one look at a flag.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::backend::{Backend, Buffers, Failure, Fields, PoolId};
use crate::cancel::SLICE;
use crate::types::{NVIPC_MAX_CELL_ID, NVIPC_MAX_MSG_ID, nv_ipc_debug_config_t};

/// One of so many buffers of a pool may be in the tap, and one at least.
const SHARE: usize = 3;
/// Bytes in the tap, unless one message alone has more: its reader may be gone, and the process has a limit of memory.
pub(crate) const BYTES_MAX: usize = 64 << 20;

/// A message that nobody writes to but its reader. Parts begin where any type may.
#[derive(Debug)]
pub struct Copied {
    fields: Fields,
    msg: Vec<u128>,
    data: Option<Vec<u128>>,
}

/// Copies a part. `None`: there is no memory for it. The helpers look at 16 bytes of a MSG part, whatever it says of itself.
///
/// # Safety
/// As of [`Copied::of`].
unsafe fn part(from: NonNull<u8>, len: u32) -> Option<Vec<u128>> {
    let len = len as usize;
    let words = len.div_ceil(size_of::<u128>()).max(1);
    let mut part = Vec::<u128>::new();
    part.try_reserve_exact(words).ok()?;
    let to = part.as_mut_ptr().cast::<u8>();
    // SAFETY: the caller's promise, and room for as many; with the rest of the last word all bytes of `words` are written.
    unsafe {
        to.copy_from_nonoverlapping(from.as_ptr(), len);
        to.add(len).write_bytes(0, words * size_of::<u128>() - len);
        part.set_len(words);
    }
    Some(part)
}

impl Copied {
    /// Copies the parts. `None`: there is no memory for it. A DATA part that no CPU can read is left out.
    ///
    /// # Safety
    /// At `buffers` are as many bytes as `fields` say, and nobody writes them meanwhile.
    pub(crate) unsafe fn of(mut fields: Fields, buffers: Buffers) -> Option<Self> {
        let data = buffers.data.filter(|_| fields.data_pool.is_some_and(|pool| !pool.is_device()));
        if data.is_none() {
            (fields.data_pool, fields.data_len) = (None, 0);
        }
        // SAFETY: the caller's promise.
        let msg = unsafe { part(buffers.msg, fields.msg_len) }?;
        let data = match data {
            // SAFETY: the caller's promise.
            Some(data) => Some(unsafe { part(data, fields.data_len) }?),
            None => None,
        };
        Some(Self { fields, msg, data })
    }

    fn buffers(&mut self) -> Buffers {
        let first = |part: &mut Vec<u128>| NonNull::from(part.as_mut_slice()).cast();
        Buffers { msg: first(&mut self.msg), data: self.data.as_mut().map(first) }
    }

    fn bytes(&self) -> usize {
        (self.msg.len() + self.data.as_ref().map_or(0, Vec::len)) * size_of::<u128>()
    }

    /// The pools that it takes room of.
    fn pools(&self) -> impl Iterator<Item = PoolId> + use<> {
        [Some(PoolId::CpuMsg), self.fields.data_pool].into_iter().flatten()
    }
}

/// Which ids are wanted; `None`: all, also those that a filter cannot name.
type Wanted = Option<[bool; NVIPC_MAX_MSG_ID]>;

fn wanted(filter: [u8; NVIPC_MAX_MSG_ID]) -> Wanted {
    let chosen = filter.map(|byte| byte != 0);
    // None chosen is what a configuration is before somebody chooses.
    (chosen.contains(&true) && chosen.contains(&false)).then_some(chosen)
}

fn wants(wanted: &Wanted, id: i32) -> bool {
    let chosen = |chosen: &[bool; NVIPC_MAX_MSG_ID]| chosen.get(usize::try_from(id).ok()?).copied();
    wanted.as_ref().is_none_or(|wanted| chosen(wanted).unwrap_or(false))
}

/// The tap of one instance.
#[derive(Debug)]
pub(crate) struct Forward {
    bytes_max: usize,
    /// Written under the lock alone.
    started: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    /// How many more; `None`: as many as come.
    left: Option<u32>,
    lost: u32,
    msg_ids: Wanted,
    cell_ids: Wanted,
    waiting: VecDeque<Copied>,
    /// What the reader has, by the address of the MSG part.
    read: HashMap<usize, Copied>,
    /// Buffers in the tap, of each pool.
    used: [usize; PoolId::COUNT],
    bytes: usize,
}

/// A tap that is started, for who has a message for it. Others wait until this is dropped, so messages are in order.
#[derive(Debug)]
pub(crate) struct Tap<'a> {
    forward: &'a Forward,
    state: MutexGuard<'a, State>,
}

/// What becomes of a message.
#[derive(Debug)]
pub(crate) enum Forwarded {
    /// A filter does not want it.
    Unwanted,
    /// There is no room for it.
    Lost,
    Copied(Copied),
}

impl Forward {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, started: AtomicBool::new(false), state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whole between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` while it is not started.
    #[inline]
    pub(crate) fn tap(&self) -> Option<Tap<'_>> {
        if self.started.load(Ordering::Relaxed) { self.locked() } else { None }
    }

    #[cold]
    fn locked(&self) -> Option<Tap<'_>> {
        let state = self.state();
        self.started.load(Ordering::Relaxed).then_some(Tap { forward: self, state })
    }

    /// Starts it as a configuration says: for so many messages, or for ever.
    pub(crate) fn start_as_configured(&self, debug: &nv_ipc_debug_config_t) {
        match debug.grpc_forward {
            -1 => drop(self.start(0, debug.msg_filter, debug.cell_filter)),
            // 1: prepared, and somebody starts it.
            count @ 2.. => drop(self.start(count.cast_unsigned(), debug.msg_filter, debug.cell_filter)),
            _ => {}
        }
    }

    pub(crate) fn start(
        &self,
        count: u32,
        msg_filter: [u8; NVIPC_MAX_MSG_ID],
        cell_filter: [u8; NVIPC_MAX_CELL_ID],
    ) -> Result<(), Failure> {
        let mut state = self.state();
        if self.started.load(Ordering::Relaxed) {
            let text = "the tap is started already; call nvipc_fw_stop first";
            return Err(Failure::Refused(text.into()));
        }
        (state.msg_ids, state.cell_ids) = (wanted(msg_filter), wanted(cell_filter));
        state.left = (count > 0).then_some(count);
        self.switch(&state, true);
        Ok(())
    }

    /// For who has the lock.
    fn switch(&self, _: &State, on: bool) {
        self.started.store(on, Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.switch(&self.state(), false);
    }

    pub(crate) fn reset(&self) {
        let mut state = self.state();
        self.switch(&state, false);
        state.lost = 0;
    }

    pub(crate) fn is_started(&self) -> bool {
        let _state = self.state();
        self.started.load(Ordering::Relaxed)
    }

    pub(crate) fn lost(&self) -> u32 {
        self.state().lost
    }

    /// Waits for a while until there is a message. `Ok(Some(false))`: the time is over; `Ok(None)`: only the while.
    pub(crate) fn wait(&self, until: Option<SystemTime>) -> Result<Option<bool>, Failure> {
        let is_there = |state: &State| state.closed || !state.waiting.is_empty();
        let mut state = self.state();
        // A clock may be set while somebody waits for a time of it.
        let left = until.map(|until| until.duration_since(SystemTime::now()).unwrap_or_default());
        let slice = left.unwrap_or(SLICE).min(SLICE);
        if !is_there(&state) && !slice.is_zero() {
            state = self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.closed {
            return Err(Failure::Refused("this instance was destroyed; create another".into()));
        }
        Ok(if is_there(&state) { Some(true) } else { slice.is_zero().then_some(false) })
    }

    /// The oldest message; it is the reader's until it is freed.
    pub(crate) fn read(&self) -> Option<(Fields, Buffers)> {
        let mut state = self.state();
        let mut copied = state.waiting.pop_front()?;
        let (fields, buffers) = (copied.fields, copied.buffers());
        state.read.insert(buffers.msg.addr().get(), copied);
        Some((fields, buffers))
    }

    pub(crate) fn free(&self, msg: NonNull<u8>) -> Result<(), Failure> {
        let mut state = self.state();
        let Some(copied) = state.read.remove(&msg.addr().get()) else {
            return Err(Failure::Refused(format!(
                "msg_buf {msg:p} is of no message that nvipc_fw_dequeue gave and that is not freed yet"
            )));
        };
        copied.pools().for_each(|pool| state.used[pool.index()] -= 1);
        state.bytes -= copied.bytes();
        Ok(())
    }

    /// Lets nobody wait any longer.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.switch(&state, false);
        self.changed.notify_all();
    }
}

impl Tap<'_> {
    /// Copies a message that the backend holds, if it is wanted. It is not forwarded before [`put`](Self::put).
    pub(crate) fn copy(
        &self,
        backend: &dyn Backend,
        fields: Fields,
        msg: NonNull<u8>,
        data: Option<NonNull<u8>>,
    ) -> Result<Forwarded, Failure> {
        let state = &*self.state;
        if !wants(&state.msg_ids, fields.msg_id) || !wants(&state.cell_ids, fields.cell_id) {
            return Ok(Forwarded::Unwanted);
        }
        let has_room = |pool: PoolId| {
            let len = backend.pool(pool).map_or(0, |(_, len)| len as usize);
            state.used[pool.index()] < (len / SHARE).max(1)
        };
        // Without a DATA part its length says nothing.
        let data_len = fields.data_pool.map_or(0, |_| fields.data_len as usize);
        let bytes = fields.msg_len as usize + data_len;
        let is_full = state.bytes > 0 && state.bytes + bytes > self.forward.bytes_max;
        if is_full || ![Some(PoolId::CpuMsg), fields.data_pool].into_iter().flatten().all(has_room) {
            return Ok(Forwarded::Lost);
        }
        Ok(backend.copied(fields, msg, data)?.map_or(Forwarded::Lost, Forwarded::Copied))
    }

    /// Forwards a message that was sent or received.
    pub(crate) fn put(&mut self, message: Forwarded) {
        let state = &mut *self.state;
        match message {
            Forwarded::Unwanted => return,
            Forwarded::Lost => {
                state.lost = state.lost.saturating_add(1);
                return;
            }
            Forwarded::Copied(copied) => {
                copied.pools().for_each(|pool| state.used[pool.index()] += 1);
                state.bytes += copied.bytes();
                state.waiting.push_back(copied);
            }
        }
        if let Some(left) = &mut state.left {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.forward.switch(state, false);
            }
        }
        self.forward.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_in_it_are_limited_and_one_message_always_fits() {
        let dir = tempfile::tempdir().unwrap();
        let config = shmesh::config::LinkConfig::new("tapped".parse().unwrap());
        let options = shmesh::LinkOptions::new().dir(dir.path());
        let link = options.create(&config).unwrap();
        let backend = crate::backend::LinkBackend::new(link, crate::backend::Maker::Us(-1), -1).unwrap();
        let forward = Forward::new(1000);
        forward.start(0, [0; 256], [0; 256]).unwrap();
        let pass = |msg_len| {
            let msg = backend.allocate(None).unwrap().msg;
            let mut tap = forward.tap().unwrap();
            // Who sends no DATA may have left anything in its length.
            let fields = Fields { msg_len, data_len: u32::MAX, ..Fields::default() };
            let message = tap.copy(&backend, fields, msg, None).unwrap();
            tap.put(message);
            drop(tap);
            backend.release(msg, None, None).unwrap();
            forward.lost()
        };
        assert_eq!([5000, 1, 0].map(&pass), [0, 1, 2]);
        forward.free(forward.read().unwrap().1.msg).unwrap();
        assert_eq!([500, 488, 1, 500].map(&pass), [2, 2, 3, 4], "each in words of sixteen bytes");
        forward.free(forward.read().unwrap().1.msg).unwrap();
        assert_eq!(pass(400), 4);
        backend.close();
    }

    #[test]
    fn filters_name_ids_and_an_empty_one_means_all() {
        let mut filter = [0; NVIPC_MAX_MSG_ID];
        assert!(wants(&wanted(filter), 7) && wants(&wanted(filter), -1) && wants(&wanted([1; 256]), 256));
        filter[0x80] = 1;
        let wanted = wanted(filter);
        assert!(wants(&wanted, 0x80));
        for id in [0x81, 0, -1, 256, i32::MIN, i32::MAX] {
            assert!(!wants(&wanted, id), "{id}");
        }
    }
}
