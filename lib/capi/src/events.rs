//! Peer events: other participants attach, detach, die or are evicted.

use std::ffi::c_int;

use shmesh::{Participant, PeerEvent, Side};

use crate::error::{argument, shmesh_error_t};
use crate::link::{in_time, limit, shmesh_link_t, shmesh_side_t, with};
use shmesh_error_t::*;

/// The kinds of events of other participants.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_event_kind_t {
    /// The participant attached, or was already attached when this handle attached.
    SHMESH_EVENT_ATTACHED = 1,
    /// The participant closed its handle.
    SHMESH_EVENT_DETACHED = 2,
    /// The process ended without closing its handle, and its buffers were recovered.
    SHMESH_EVENT_DIED = 3,
    /// The participant was evicted while its process was alive. No further event follows for it.
    SHMESH_EVENT_EVICTED = 4,
    /// `missed` participants attached and ended between two calls and are not reported; the other members are 0.
    SHMESH_EVENT_MISSED = 5,
    /// `missed` messages of the other side were lost between nodes; `shmesh_link_lost` counts them, too. The event is there before the
    /// first message after them. The other members are 0.
    SHMESH_EVENT_LOST = 6,
}

use shmesh_event_kind_t::*;

/// An event of another participant. Each handle is one participant.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct shmesh_event_t {
    /// A `shmesh_event_kind_t`. Later versions may add kinds.
    pub kind: c_int,
    /// A `shmesh_side_t`: the side of the participant.
    pub side: c_int,
    /// The seat of the participant, as `shmesh ls` shows it. Seats are reused.
    pub seat: u32,
    /// The process id of the participant in its own pid namespace.
    pub pid: u32,
    /// SHMESH_EVENT_MISSED: the number of missed participants. SHMESH_EVENT_LOST: the number of lost messages, at most UINT32_MAX.
    pub missed: u32,
}

impl From<PeerEvent> for shmesh_event_t {
    fn from(event: PeerEvent) -> Self {
        let of = |kind, peer: Participant| {
            let side = match peer.word.side() {
                Side::Primary => shmesh_side_t::SHMESH_PRIMARY,
                Side::Secondary => shmesh_side_t::SHMESH_SECONDARY,
            };
            let (seat, pid) = (peer.seat.value().into(), peer.word.pid());
            Self { kind: kind as c_int, side: side as c_int, seat, pid, missed: 0 }
        };
        match event {
            PeerEvent::Attached(peer) => of(SHMESH_EVENT_ATTACHED, peer),
            PeerEvent::Detached(peer) => of(SHMESH_EVENT_DETACHED, peer),
            PeerEvent::Died(peer) => of(SHMESH_EVENT_DIED, peer),
            PeerEvent::Evicted(peer) => of(SHMESH_EVENT_EVICTED, peer),
            PeerEvent::Missed(missed) => {
                Self { kind: SHMESH_EVENT_MISSED as c_int, missed, ..Self::default() }
            }
            PeerEvent::Lost(lost) => {
                let missed = u32::try_from(lost).unwrap_or(u32::MAX);
                Self { kind: SHMESH_EVENT_LOST as c_int, missed, ..Self::default() }
            }
            _ => Self::default(),
        }
    }
}

/// Takes the next event of another participant; EMPTY if there is none. Never blocks.
///
/// The first events report the participants that were attached before this handle. From then on each participant is reported
/// once as attached, and once as detached, died or evicted. The descriptor of `shmesh_link_fd` becomes readable after an
/// event: take its signals, then messages and events until there are none.
///
/// # Safety
/// `event` is NULL or points to memory for an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_next_event(
    link: *const shmesh_link_t,
    event: *mut shmesh_event_t,
) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { event.as_mut() }
            .ok_or_else(|| argument("event is NULL; pass the address of a variable for it"))?;
        let Some(event) = link.next_event() else { return Ok(SHMESH_ERROR_EMPTY) };
        *place = event.into();
        Ok(SHMESH_OK)
    })
}

/// Waits for an event, at most `timeout_ns` nanoseconds; negative: without a limit. Messages do not end the wait.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait_event(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait_event(limit(timeout_ns))?)))
}
