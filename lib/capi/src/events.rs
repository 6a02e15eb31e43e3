//! Peer events: other participants attach, detach and die.

use std::ffi::c_int;

use shmesh::{Participant, PeerEvent, Side};

use crate::error::{argument, shmesh_error_t};
use crate::link::{in_time, limit, shmesh_link_t, shmesh_side_t, with};
use shmesh_error_t::*;

/// What happened to another participant of a link.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_event_kind_t {
    /// It attached, or was attached already when this handle attached.
    SHMESH_EVENT_ATTACHED = 1,
    /// It closed its handle.
    SHMESH_EVENT_DETACHED = 2,
    /// Its process ended without that, and what it held was taken back.
    SHMESH_EVENT_DIED = 3,
    /// It was evicted although its process lived. No further event follows for it.
    SHMESH_EVENT_EVICTED = 4,
    /// Participants came and went between two looks, `missed` of them; the other members are 0.
    SHMESH_EVENT_MISSED = 5,
}

use shmesh_event_kind_t::*;

/// An event of another participant. Each handle is a participant of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct shmesh_event_t {
    /// A `shmesh_event_kind_t`. Later versions may add kinds.
    pub kind: c_int,
    /// A `shmesh_side_t`: the side of the participant.
    pub side: c_int,
    /// Its seat, as `shmesh ls` shows it. Another participant may sit there later.
    pub seat: u32,
    /// Its process id, as its own pid namespace numbers it.
    pub pid: u32,
    /// With SHMESH_EVENT_MISSED, how many.
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
            _ => Self::default(),
        }
    }
}

/// Takes the next event of another participant; EMPTY if there is none. Never waits.
///
/// Participants that are attached when this handle attaches come first, as attached. From then on each is reported once as
/// attached, and once as detached, died or evicted. The descriptor of `shmesh_link_fd` becomes readable after an event: take
/// its signals, then messages and events until there are none.
///
/// # Safety
/// `event` is NULL or points to a place for an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_next_event(
    link: *const shmesh_link_t,
    event: *mut shmesh_event_t,
) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place =
            unsafe { event.as_mut() }.ok_or_else(|| argument("event is NULL; pass where to put it"))?;
        let Some(event) = link.next_event() else { return Ok(SHMESH_ERROR_EMPTY) };
        *place = event.into();
        Ok(SHMESH_OK)
    })
}

/// Waits until there is an event, at most so many nanoseconds; a negative number is for ever. Messages do not end it.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait_event(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait_event(limit(timeout_ns))?)))
}
