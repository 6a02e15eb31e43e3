//! Samples of links, and the rates between two of them.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use shmesh::config::LinkName;
use shmesh::inspect::{BufferState, LinkTimes, SeatView, Snapshot, TimeHistogram, View, names};
use shmesh::{SeatIndex, Side};

use crate::{ls, nvipc, people};

/// The links of an IPC directory at one moment.
#[derive(Debug)]
pub(super) struct Sample {
    at: Instant,
    pub(super) links: Vec<LinkSample>,
}

/// One link at one moment.
#[derive(Clone, Debug)]
pub(super) struct LinkSample {
    pub(super) name: LinkName,
    /// The state of the link, or why it cannot be read.
    pub(super) seen: Result<LinkState, String>,
}

/// The readable state of a link.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkState {
    /// Distinguishes the link from others that had its name before.
    epoch: u64,
    /// The ring mode, or `nvipc` for a link in NVIPC's layout.
    pub(super) mode: &'static str,
    /// The rings `m2s` and `s2m`, in this order.
    pub(super) rings: [RingUse; 2],
    pub(super) pools: Vec<PoolUse>,
    pub(super) participants: Vec<ParticipantUse>,
    wake_ups: Option<u64>,
    requests: Option<u64>,
    /// Requests whose clients wait for replies.
    pub(super) pending: Option<usize>,
    times: Option<LinkTimes>,
}

/// The messages of one direction.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct RingUse {
    /// Messages sent since the link was created; `None` in NVIPC's layout, which does not count them.
    sent: Option<u64>,
    pub(super) queued: usize,
}

/// The buffers of a pool.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PoolUse {
    pub(super) name: &'static str,
    pub(super) used: usize,
    pub(super) len: usize,
}

/// A participant, and the buffers that it holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct ParticipantUse {
    pub(super) seat: SeatView,
    /// Buffers that it writes.
    pub(super) loaned: usize,
    /// Buffers that it has received and not released.
    pub(super) borrowed: usize,
}

/// Messages, requests and wake-ups per second between two samples, and the times of messages.
///
/// A rate is `None` if the link was not in both, or does not count. Times are `None` also if no message was timed in between.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Messages sent on `m2s` and `s2m`.
    pub(super) messages: [Option<f64>; 2],
    pub(super) requests: Option<f64>,
    /// System calls that woke a sleeping receiver.
    pub(super) wake_ups: Option<f64>,
    /// Median and 99th percentile of the time from sending to receiving, in seconds.
    pub(super) latency: Option<[f64; 2]>,
    /// The same of the time from receiving to releasing.
    pub(super) hold: Option<[f64; 2]>,
}

impl Sample {
    /// Reads the links of the directory: all, or those with these names.
    ///
    /// Each link is mapped while it is read and no longer, so that the memory of a removed link is not kept.
    pub(super) fn take(dir: &Path, only: &[LinkName]) -> std::io::Result<Self> {
        let names = if only.is_empty() { names(dir)? } else { only.to_vec() };
        let links = names.into_iter().map(|name| LinkSample { seen: look(dir, &name), name });
        Ok(Self { links: links.collect(), at: Instant::now() })
    }

    /// The time since another sample, in seconds.
    pub(super) fn seconds_since(&self, before: &Self) -> f64 {
        self.at.saturating_duration_since(before.at).as_secs_f64()
    }

    /// The rates of `link`, one of this sample, since `before`.
    pub(super) fn rates(&self, link: &LinkSample, before: Option<&Self>) -> Rates {
        let earlier = before.and_then(|before| {
            let earlier = before.links.iter().find(|earlier| earlier.name == link.name)?;
            Some((earlier.seen.as_ref().ok()?, self.seconds_since(before)))
        });
        let (Ok(now), Some((earlier, seconds))) = (&link.seen, earlier) else { return Rates::default() };
        if now.epoch != earlier.epoch || seconds <= 0.0 {
            return Rates::default();
        }
        // A counter that went back was overwritten by a faulty process: it has no rate.
        #[expect(clippy::cast_precision_loss, reason = "a rate that people read")]
        let rate =
            |now: Option<u64>, earlier: Option<u64>| Some(now?.checked_sub(earlier?)? as f64 / seconds);
        let times = |which: fn(&LinkTimes) -> &TimeHistogram| {
            let since = which(now.times.as_ref()?).since(which(earlier.times.as_ref()?));
            let quantile = |share| since.quantile(share).map(|time| time.as_secs_f64());
            Some([quantile(0.5)?, quantile(0.99)?])
        };
        Rates {
            latency: times(|times| &times.latency),
            hold: times(|times| &times.hold),
            messages: [0, 1].map(|ring: usize| rate(now.rings[ring].sent, earlier.rings[ring].sent)),
            requests: rate(now.requests, earlier.requests),
            wake_ups: rate(now.wake_ups, earlier.wake_ups),
        }
    }

    /// The sample and its rates as one JSON object.
    pub(super) fn json(&self, before: Option<&Self>) -> Value {
        let links = self.links.iter().map(|link| link.json(&self.rates(link, before)));
        json!({
            "interval_seconds": before.map(|before| self.seconds_since(before)),
            "links": links.collect::<Vec<_>>(),
        })
    }
}

impl LinkSample {
    fn json(&self, rates: &Rates) -> Value {
        let state = match &self.seen {
            Ok(state) => state,
            Err(error) => return json!({ "name": self.name.as_str(), "usable": false, "error": error }),
        };
        let pools =
            state.pools.iter().map(|pool| json!({ "pool": pool.name, "used": pool.used, "len": pool.len }));
        let participants = state.participants.iter().map(|participant| {
            let mut json = people::json(&participant.seat);
            json["loaned"] = participant.loaned.into();
            json["borrowed"] = participant.borrowed.into();
            json
        });
        let [m2s, s2m] = state.rings;
        let quantiles = |times: Option<[f64; 2]>| times.map(|[p50, p99]| json!({ "p50": p50, "p99": p99 }));
        json!({
            "name": self.name.as_str(),
            "usable": true,
            "mode": state.mode,
            "messages_per_second": { "m2s": rates.messages[0], "s2m": rates.messages[1] },
            "sent": { "m2s": m2s.sent, "s2m": s2m.sent },
            "queued": { "m2s": m2s.queued, "s2m": s2m.queued },
            "requests_per_second": rates.requests,
            "requests_pending": state.pending,
            "wake_ups_per_second": rates.wake_ups,
            "latency_seconds": quantiles(rates.latency),
            "hold_seconds": quantiles(rates.hold),
            "pools": pools.collect::<Vec<_>>(),
            "participants": participants.collect::<Vec<_>>(),
        })
    }
}

impl LinkState {
    fn of(view: &View, snapshot: &Snapshot) -> Self {
        let pools = snapshot.tables.iter().map(|table| PoolUse {
            name: table.pool.map_or("inline", shmesh::config::PoolId::name),
            used: table.held.len(),
            len: table.len,
        });
        let held = |state: BufferState| {
            snapshot.tables.iter().map(|table| table.count(|buffer| buffer == state)).sum::<usize>()
        };
        let participant = |seat: &SeatView| {
            let index: SeatIndex = seat.participant.seat;
            ParticipantUse {
                seat: *seat,
                loaned: held(BufferState::Loaned(index)),
                borrowed: held(BufferState::Borrowed(index)),
            }
        };
        Self {
            epoch: view.epoch(),
            mode: ls::mode(view),
            rings: [0, 1].map(|ring: usize| RingUse {
                sent: Some(snapshot.rings[ring].sent),
                queued: snapshot.rings[ring].queued.len(),
            }),
            pools: pools.collect(),
            participants: snapshot.seats.iter().map(participant).collect(),
            wake_ups: Some(snapshot.wake_ups),
            requests: snapshot.requests.map(|requests| requests.made),
            pending: snapshot.requests.map(|requests| requests.pending),
            times: view.times(),
        }
    }

    /// The pool with the largest share of used buffers. Among equals, the first.
    pub(super) fn fullest_pool(&self) -> Option<&PoolUse> {
        let fuller = |a: &PoolUse, b: &PoolUse| b.used * a.len > a.used * b.len;
        self.pools.iter().reduce(|fullest, pool| if fuller(fullest, pool) { pool } else { fullest })
    }

    /// The participants of one side in a few words, and `-` if there are none.
    pub(super) fn side(&self, side: Side) -> String {
        let seats: Vec<SeatView> = self.participants.iter().map(|participant| participant.seat).collect();
        people::side(&seats, side)
    }

    /// Number of participants that sleep until a message arrives.
    pub(super) fn asleep(&self) -> usize {
        self.participants.iter().filter(|participant| participant.seat.asleep).count()
    }
}

impl PoolUse {
    /// Used buffers in percent.
    pub(super) fn percent(&self) -> usize {
        self.used * 100 / self.len.max(1)
    }
}

fn look(dir: &Path, name: &LinkName) -> Result<LinkState, String> {
    let error = match View::open(dir, name) {
        Ok(view) => return Ok(LinkState::of(&view, &view.snapshot())),
        Err(error) => error,
    };
    let Some(theirs) = nvipc::seen(dir, name) else { return Err(crate::in_one_line(&error)) };
    let pools = nvipc::pools(&theirs).map(|(pool, _, len, free)| PoolUse {
        name: pool.name(),
        used: (len as usize).saturating_sub(free),
        len: len as usize,
    });
    let queued = [theirs.m2s.len(), theirs.s2m.len()];
    Ok(LinkState {
        mode: "nvipc",
        rings: queued.map(|queued| RingUse { sent: None, queued }),
        pools: pools.collect(),
        ..LinkState::default()
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn state(epoch: u64, sent: u64) -> LinkState {
        let rings = [RingUse { sent: Some(sent), queued: 0 }, RingUse::default()];
        LinkState { epoch, rings, wake_ups: Some(sent), ..LinkState::default() }
    }

    fn sample(at: Instant, seen: Result<LinkState, String>) -> Sample {
        Sample { at, links: vec![LinkSample { name: "radio".parse().unwrap(), seen }] }
    }

    fn rates(before: Result<LinkState, String>, after: Result<LinkState, String>) -> Rates {
        let start = Instant::now();
        let before = sample(start, before);
        let after = sample(start + Duration::from_secs(2), after);
        after.rates(&after.links[0], Some(&before))
    }

    #[test]
    fn rates_are_per_second_between_two_samples() {
        let rates = rates(Ok(state(1, 100)), Ok(state(1, 400)));
        assert_eq!((rates.messages, rates.wake_ups), ([Some(150.0), None], Some(150.0)));
    }

    #[test]
    fn link_that_was_created_again_or_not_read_before_has_no_rates() {
        assert_eq!(rates(Ok(state(1, 400)), Ok(state(2, 500))), Rates::default());
        assert_eq!(rates(Err("damaged".to_owned()), Ok(state(1, 400))), Rates::default());
        let only = sample(Instant::now(), Ok(state(1, 400)));
        assert_eq!(only.rates(&only.links[0], None), Rates::default());
    }

    #[test]
    fn counter_that_went_back_has_no_rate() {
        assert_eq!(rates(Ok(state(1, 400)), Ok(state(1, 399))).messages, [None, None]);
    }

    #[test]
    fn fullest_pool_has_the_largest_share_of_used_buffers() {
        let pool = |name, used, len| PoolUse { name, used, len };
        let state = |pools| LinkState { pools, ..LinkState::default() };
        let of_three = state(vec![pool("a", 5, 100), pool("b", 2, 4), pool("c", 1, 2)]);
        assert_eq!(of_three.fullest_pool().map(|pool| (pool.name, pool.percent())), Some(("b", 50)));
        assert_eq!(state(vec![]).fullest_pool(), None);
        assert_eq!(pool("empty", 0, 0).percent(), 0);
    }
}
