//! NVIPC's tap: a third reader of all messages that an instance sends and receives.
//!
//! While it is started, each message is copied in the call that sends or receives it. So no message is missed for which
//! there is room, no buffer of the link waits for the reader, and a message that was read does not change until it is
//! freed.
//!
//! There is room for a third of the buffers of each pool, as in NVIPC, and for 64 MiB. Further messages are sent normally,
//! and counted as lost. While the tap is stopped, it costs one check of a flag per message.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

pub use crate::backend::CopiedMessage;
use crate::backend::{Backend, Buffers, Failure, Fields, PoolId};
use crate::cancel::SLICE;
use crate::types::{NVIPC_MAX_CELL_ID, NVIPC_MAX_MSG_ID, nv_ipc_debug_config_t};

/// The tap may hold one in this many buffers of a pool, and at least one.
const SHARE: usize = 3;
/// Limit of the tap in bytes, unless a single message is longer. The reader may be gone, and the process has a memory
/// limit.
pub(crate) const BYTES_MAX: usize = 64 << 20;

/// The ids that pass the filter; `None` for all, including ids that a filter cannot name.
type IdFilter = Option<[bool; NVIPC_MAX_MSG_ID]>;

fn wanted(filter: [u8; NVIPC_MAX_MSG_ID]) -> IdFilter {
    let chosen = filter.map(|byte| byte != 0);
    // An empty selection is the initial state of a configuration.
    (chosen.contains(&true) && chosen.contains(&false)).then_some(chosen)
}

fn wants(wanted: &IdFilter, id: i32) -> bool {
    let chosen = |chosen: &[bool; NVIPC_MAX_MSG_ID]| chosen.get(usize::try_from(id).ok()?).copied();
    wanted.as_ref().is_none_or(|wanted| chosen(wanted).unwrap_or(false))
}

/// The tap of one instance.
#[derive(Debug)]
pub(crate) struct Forward {
    bytes_max: usize,
    /// Only written under the lock.
    started: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    /// Number of messages until the tap stops; `None` for no limit.
    left: Option<u32>,
    lost: u32,
    msg_ids: IdFilter,
    cell_ids: IdFilter,
    waiting: VecDeque<CopiedMessage>,
    /// Messages that the reader has not freed, by address of the MSG part.
    read: HashMap<usize, CopiedMessage>,
    /// Number of buffers of each pool in the tap.
    used: [usize; PoolId::COUNT],
    bytes: usize,
}

/// A started tap, locked by a caller that has a message for it. Other callers wait until this is dropped, which keeps
/// messages in order.
#[derive(Debug)]
pub(crate) struct Tap<'a> {
    forward: &'a Forward,
    state: MutexGuard<'a, State>,
}

/// The result of offering a message to the tap.
#[derive(Debug)]
pub(crate) enum TapOutcome {
    /// A filter excludes it.
    Unwanted,
    /// There is no room for it.
    Lost,
    Copied(CopiedMessage),
}

impl Forward {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, started: AtomicBool::new(false), state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Consistent between any two statements, so a panic elsewhere does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the tap; `None` while it is stopped.
    #[inline]
    pub(crate) fn tap(&self) -> Option<Tap<'_>> {
        if self.started.load(Ordering::Relaxed) { self.locked() } else { None }
    }

    #[cold]
    fn locked(&self) -> Option<Tap<'_>> {
        let state = self.state();
        self.started.load(Ordering::Relaxed).then_some(Tap { forward: self, state })
    }

    /// Starts the tap as a configuration says: for a number of messages, or without limit.
    pub(crate) fn start_as_configured(&self, debug: &nv_ipc_debug_config_t) {
        match debug.grpc_forward {
            -1 => drop(self.start(0, debug.msg_filter, debug.cell_filter)),
            // 1 means prepared; the application starts it.
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

    /// Called with the lock held.
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

    /// Waits for a limited time for a message. Returns `Ok(Some(false))` when `until` has passed, `Ok(None)` to be called
    /// again.
    pub(crate) fn wait(&self, until: Option<SystemTime>) -> Result<Option<bool>, Failure> {
        let is_there = |state: &State| state.closed || !state.waiting.is_empty();
        let mut state = self.state();
        // The clock may be set while a caller waits.
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

    /// Takes the oldest message. The reader holds it until it is freed.
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
                "msg_buf {msg:p} is not a message from nvipc_fw_dequeue, or was freed before"
            )));
        };
        copied.pools().for_each(|pool| state.used[pool.index()] -= 1);
        state.bytes -= copied.bytes();
        Ok(())
    }

    /// Wakes all callers that wait.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.switch(&state, false);
        self.changed.notify_all();
    }
}

impl Tap<'_> {
    /// Copies a message that the backend holds, if the filters accept it. [`put`](Self::put) forwards it.
    pub(crate) fn copy(
        &self,
        backend: &dyn Backend,
        fields: Fields,
        msg: NonNull<u8>,
        data: Option<NonNull<u8>>,
    ) -> Result<TapOutcome, Failure> {
        let state = &*self.state;
        if !wants(&state.msg_ids, fields.msg_id) || !wants(&state.cell_ids, fields.cell_id) {
            return Ok(TapOutcome::Unwanted);
        }
        let has_room = |pool: PoolId| {
            let len = backend.pool(pool).map_or(0, |(_, len)| len as usize);
            state.used[pool.index()] < (len / SHARE).max(1)
        };
        // Without a DATA part its length has no meaning.
        let data_len = fields.data_pool.map_or(0, |_| fields.data_len as usize);
        let bytes = fields.msg_len as usize + data_len;
        let is_full = state.bytes > 0 && state.bytes + bytes > self.forward.bytes_max;
        if is_full || ![Some(PoolId::CpuMsg), fields.data_pool].into_iter().flatten().all(has_room) {
            return Ok(TapOutcome::Lost);
        }
        Ok(backend.copied(fields, msg, data)?.map_or(TapOutcome::Lost, TapOutcome::Copied))
    }

    /// Forwards a message that was sent or received.
    pub(crate) fn put(&mut self, message: TapOutcome) {
        let state = &mut *self.state;
        match message {
            TapOutcome::Unwanted => return,
            TapOutcome::Lost => {
                state.lost = state.lost.saturating_add(1);
                return;
            }
            TapOutcome::Copied(copied) => {
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
    fn tap_bytes_are_limited_but_one_message_always_fits() {
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
            // A sender without DATA may have left anything in the length field.
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
    fn empty_filter_passes_all_ids() {
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
