//! Samples of links, and the rates between two of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use shmesh::SeatIndex;
use shmesh::config::LinkName;
use shmesh::inspect::{BufferState, CachedView, LinkTimes, SeatView, Snapshot, TimeHistogram, View, names};
use shmesh_nvipc_wire::{LinkSnapshot, MappedLink};
use shmesh_sys::causes::with_causes;
use shmesh_sys::top::{Directions, LinkRow, PoolUse, Quantiles, RowParticipant};

use crate::{ls, nvipc, people};

/// The links of an IPC directory at one moment.
#[derive(Debug)]
pub(super) struct Sample {
    at: Instant,
    pub(super) links: Vec<LinkSample>,
}

/// The links of an IPC directory, each opened at its first sample and kept while it exists.
#[derive(Debug)]
pub(super) struct Sampler {
    dir: PathBuf,
    /// The names of the links; all of the directory if there are none.
    only: Vec<LinkName>,
    open: BTreeMap<LinkName, SampledLink>,
}

/// One link, in the layout in which it was last seen.
#[derive(Debug)]
struct SampledLink {
    view: CachedView,
    theirs: Option<MappedLink>,
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
    /// The link in the table.
    pub(super) fn row(&self, rates: &Rates) -> LinkRow {
        let name = self.name.to_string();
        let state = match &self.seen {
            Ok(state) => state,
            Err(error) => return LinkRow { name, error: Some(error.clone()), ..LinkRow::default() },
        };
        let participants = state.participants.iter().map(|participant| RowParticipant {
            side: participant.seat.participant.word.side().to_string(),
            pid: participant.seat.participant.word.pid(),
            state: people::state(&participant.seat).to_owned(),
            asleep: participant.seat.asleep,
        });
        let [m2s, s2m] = rates.messages;
        let [queued_m2s, queued_s2m] = state.rings.map(|ring| ring.queued as u64);
        LinkRow {
            name,
            error: None,
            mode: state.mode.to_owned(),
            participants: participants.collect(),
            messages_per_second: Directions { m2s, s2m },
            queued: Directions { m2s: queued_m2s, s2m: queued_s2m },
            pools: state.pools.clone(),
            wake_ups_per_second: rates.wake_ups,
            latency_seconds: rates.latency.map(|[p50, p99]| Quantiles { p50, p99 }),
        }
    }

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
            name: table.pool.map_or("inline", shmesh::config::PoolId::name).to_owned(),
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

    fn of_nvipc(link: &LinkSnapshot) -> Self {
        let pools = nvipc::pools(link).map(|(pool, _, len, free)| PoolUse {
            name: pool.name().to_owned(),
            used: (len as usize).saturating_sub(free),
            len: len as usize,
        });
        let queued = [link.m2s.len(), link.s2m.len()];
        Self {
            mode: "nvipc",
            rings: queued.map(|queued| RingUse { sent: None, queued }),
            pools: pools.collect(),
            ..Self::default()
        }
    }
}

impl Sampler {
    pub(super) fn new(dir: &Path, only: &[LinkName]) -> Self {
        Self { dir: dir.to_path_buf(), only: only.to_vec(), open: BTreeMap::new() }
    }

    /// Reads the links. Files are opened only of links that are new since the last sample, or in an unusable state.
    pub(super) fn sample(&mut self) -> std::io::Result<Sample> {
        let names = if self.only.is_empty() { names(&self.dir)? } else { self.only.clone() };
        // The memory of removed links is not kept.
        self.open.retain(|name, _| names.contains(name));
        let look = |name: LinkName| {
            let link = self
                .open
                .entry(name.clone())
                .or_insert_with(|| SampledLink { view: CachedView::new(&self.dir, &name), theirs: None });
            LinkSample { seen: link.look(&self.dir, &name), name }
        };
        let links = names.into_iter().map(look).collect();
        Ok(Sample { links, at: Instant::now() })
    }
}

impl SampledLink {
    fn look(&mut self, dir: &Path, name: &LinkName) -> Result<LinkState, String> {
        let theirs = match self.theirs.take().filter(MappedLink::is_current) {
            Some(theirs) => theirs,
            None => match self.view.get() {
                Ok(view) => return Ok(LinkState::of(view, &view.snapshot())),
                Err(error) => {
                    let theirs = MappedLink::open(dir, name.as_str()).ok().flatten();
                    theirs.ok_or_else(|| with_causes(&error))?
                }
            },
        };
        let snapshot = self.theirs.insert(theirs).snapshot();
        snapshot.map(|link| LinkState::of_nvipc(&link)).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
    use shmesh::config::Backing;

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

    /// `kubectl shmesh top` makes its table of the JSON.
    #[test]
    fn row_of_the_json_is_that_of_the_table() {
        let dir = tempfile::tempdir().unwrap();
        let options = shmesh::LinkOptions::new().dir(dir.path());
        let link = options.create(&shmesh::config::LinkConfig::new("radio".parse().unwrap())).unwrap();
        let _reader = options.attach("radio", shmesh::Side::Secondary).unwrap();
        let _loan = link.loan().unwrap();
        link.send_inline(1, 0, b"").unwrap();
        std::fs::write(dir.path().join("bad_shm"), b"SHMESH").unwrap();
        let sample = Sampler::new(dir.path(), &[]).sample().unwrap();
        let timed = Rates {
            messages: [Some(1500.5), None],
            wake_ups: Some(2.0),
            latency: Some([3e-7, 4e-3]),
            ..Rates::default()
        };
        let names: Vec<&str> = sample.links.iter().map(|link| link.name.as_str()).collect();
        assert_eq!(names, ["bad", "radio"]);
        for link in &sample.links {
            for rates in [timed, Rates::default()] {
                let row: LinkRow = serde_json::from_value(link.json(&rates)).unwrap();
                assert_eq!(row, link.row(&rates));
            }
        }
        let cells = sample.links[1].row(&timed).cells();
        let pid = std::process::id().to_string();
        assert_eq!((&cells[2], &cells[3], cells[6].as_str()), (&pid, &pid, "1"));
        assert_eq!(cells[10..], ["300 ns", "4.00 ms"]);
    }

    /// The names of files in a directory that were opened since the last call.
    fn opened(watch: &Inotify) -> Vec<String> {
        let events = watch.read_events().unwrap_or_default();
        events.into_iter().filter_map(|event| event.name?.into_string().ok()).collect()
    }

    #[test]
    fn each_link_is_opened_once_and_kept_while_it_exists() {
        let dir = tempfile::tempdir().unwrap();
        let options = shmesh::LinkOptions::new().dir(dir.path());
        let create = |name: &str, backing| {
            let mut config = shmesh::config::LinkConfig::new(name.parse().unwrap());
            config.backing = backing;
            options.create(&config).unwrap()
        };
        let pools = shmesh::config::LinkConfig::new("x".parse().unwrap()).pools;
        let (radio, _held) = (create("radio", Backing::Named), create("held", Backing::Memfd));
        let _theirs = shmesh_nvipc_wire::Options::new().dir(dir.path()).create("theirs", pools).unwrap();

        let watch = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
        watch.add_watch(dir.path(), AddWatchFlags::IN_OPEN).unwrap();
        let mut sampler = Sampler::new(dir.path(), &[]);
        let first = sampler.sample().unwrap();
        let modes: Vec<&str> = first.links.iter().map(|link| link.seen.as_ref().unwrap().mode).collect();
        assert_eq!(modes, ["mpmc", "mpmc", "nvipc"]);
        let files = opened(&watch);
        for file in ["radio_shm", "radio_cpu_msg", "radio_cpu_data", "held.lock", "theirs_debug"] {
            assert_eq!(files.iter().filter(|name| *name == file).count(), 1, "{files:?}");
        }

        radio.send_inline(1, 0, b"").unwrap();
        for _ in 0..3 {
            let next = sampler.sample().unwrap();
            assert_eq!(next.links[1].seen.as_ref().unwrap().rings[0].queued, 1);
            assert_eq!(opened(&watch), [""; 0]);
        }

        let _late = create("late", Backing::Named);
        opened(&watch);
        let names = |sample: &Sample| {
            sample.links.iter().map(|link| link.name.to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&sampler.sample().unwrap()), "held late radio theirs");
        let files = opened(&watch);
        assert!(!files.is_empty() && files.iter().all(|name| name.starts_with("late")), "{files:?}");
    }

    #[test]
    fn link_that_is_created_again_is_sampled_as_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let options = shmesh::LinkOptions::new().dir(dir.path());
        let create = |len| {
            let mut config = shmesh::config::LinkConfig::new("radio".parse().unwrap());
            config.pools[shmesh::config::PoolId::CpuMsg.index()].pool_len = len;
            options.create(&config).unwrap()
        };
        let link = create(32);
        let mut sampler = Sampler::new(dir.path(), &[]);
        let before = sampler.sample().unwrap();
        drop(link);
        let link = create(64);
        link.send_inline(1, 0, b"").unwrap();
        let now = sampler.sample().unwrap();
        let state = now.links[0].seen.as_ref().unwrap();
        assert_eq!((state.pools[0].len, state.rings[0].queued), (64, 1));
        assert_eq!(now.rates(&now.links[0], Some(&before)), Rates::default());

        let is_mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.contains(dir.path().join("radio_shm").to_str().unwrap())
        };
        drop(link.receive().unwrap());
        options.attach("radio", shmesh::Side::Secondary).unwrap().receive().unwrap();
        drop(link);
        assert!(is_mapped(), "by the sampler");
        assert!(sampler.sample().unwrap().links.is_empty());
        assert!(!is_mapped(), "the memory of a removed link is not kept");
    }

    #[test]
    fn nvipc_link_that_is_created_again_is_read_anew() {
        let dir = tempfile::tempdir().unwrap();
        let mut pools = shmesh::config::LinkConfig::new("x".parse().unwrap()).pools;
        let mut sampler = Sampler::new(dir.path(), &["theirs".parse().unwrap()]);
        assert!(sampler.sample().unwrap().links[0].seen.is_err());
        for len in [32, 64] {
            pools[0].pool_len = len;
            let _theirs = shmesh_nvipc_wire::Options::new().dir(dir.path()).create("theirs", pools).unwrap();
            for _ in 0..2 {
                let sample = sampler.sample().unwrap();
                assert_eq!(sample.links[0].seen.as_ref().unwrap().pools[0].len, len as usize);
            }
        }
    }
}
