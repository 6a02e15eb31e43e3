//! Formatting of participants, in words and in JSON.

use serde_json::{Value, json};
use shmesh::Side;
use shmesh::inspect::SeatView;
use shmesh_sys::process::Liveness;
use shmesh_sys::top;

use crate::human;

/// `alive`, `dead`, `unknown` or `evicted`.
pub(crate) fn state(seat: &SeatView) -> &'static str {
    match seat.liveness {
        Liveness::Dead => "dead",
        _ if seat.participant.word.is_evicted() => "evicted",
        Liveness::Alive => "alive",
        Liveness::Unknown => "unknown",
    }
}

/// The position of a reader of a broadcast ring, as a part of its state: `, 3 behind, 20 lost`.
pub(crate) fn place(seat: &SeatView) -> String {
    let Some(reader) = seat.reader else { return String::new() };
    let lost = if reader.lost == 0 { String::new() } else { format!(", {} lost", human::count(reader.lost)) };
    format!(", {} behind{lost}", human::count(reader.behind))
}

/// The readers of a broadcast ring in a sentence; `None` if there are none.
pub(crate) fn readers(seats: &[SeatView]) -> Option<String> {
    let readers: Vec<_> = seats.iter().filter_map(|seat| seat.reader).collect();
    let behind = readers.iter().map(|reader| reader.behind).max()?;
    let lost: u64 = readers.iter().map(|reader| reader.lost).fold(0, u64::saturating_add);
    let lost = if lost == 0 { String::new() } else { format!("; {} lost in all", human::count(lost)) };
    let readers = human::plural(readers.len() as u64, "reader");
    Some(format!("{readers}, the slowest {} behind{lost}", human::plural(behind, "message")))
}

/// Whether the participant may still be alive: its death is not proved.
pub(crate) fn may_live(seat: &SeatView) -> bool {
    seat.liveness != Liveness::Dead
}

/// One side in a few words, as [`top::processes`] writes it.
pub(crate) fn side(seats: &[SeatView], side: Side) -> String {
    let of_side = seats.iter().filter(|seat| seat.participant.word.side() == side);
    top::processes(of_side.map(|seat| (seat.participant.word.pid(), state(seat))))
}

/// One sentence per participant whose state is `unknown`, with the reason.
pub(crate) fn doubts(seats: &[SeatView]) -> impl Iterator<Item = String> {
    seats.iter().filter(|seat| state(seat) == "unknown").filter_map(|seat| {
        let (side, pid) = (seat.participant.word.side(), seat.participant.word.pid());
        Some(format!("whether {side} {pid} is alive is unknown: {}", seat.unknown_because?))
    })
}

/// A participant as JSON for other programs.
pub(crate) fn json(seat: &SeatView) -> Value {
    json!({
        "seat": seat.participant.seat.value(),
        "side": seat.participant.word.side().to_string(),
        "pid": seat.participant.word.pid(),
        "state": state(seat),
        "unknown_because": seat.unknown_because,
        "asleep": seat.asleep,
        "reader": seat.reader.map(|reader| json!({ "behind": reader.behind, "lost": reader.lost })),
        "start_time": seat.participant.start_time,
        "pid_namespace": seat.participant.pid_namespace,
    })
}
