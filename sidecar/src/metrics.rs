//! Metrics of the sidecar, for `/metrics`.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, MetricEncoder, NativeHistogram, NativeHistogramBuckets, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use shmesh::config::PoolId;
use shmesh::inspect::{BufferState, LinkTimes, Snapshot, TimeHistogram};

use crate::broker::{Reason, Stats};
use crate::links::{KeptLink, Links};

const PREFIX: &str = "shmesh_sidecar";

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByReason {
    reason: &'static str,
}

/// The reason why a record is missing in the audit log.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SuppressionCause {
    /// The account exceeded its rate limit.
    Rate,
    /// Too many records of the account are queued.
    Queue,
    /// The log could not be written.
    Writer,
}

impl SuppressionCause {
    const ALL: [Self; 3] = [Self::Rate, Self::Queue, Self::Writer];

    fn as_str(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Queue => "queue",
            Self::Writer => "writer",
        }
    }
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByCause {
    cause: &'static str,
}

/// Counters and gauges of one sidecar.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    sessions: Gauge,
    keys: Gauge,
    attached: Counter,
    refused_requests: Family<ByReason, Counter>,
    refused_connections: Counter,
    audit_suppressed: Family<ByCause, Counter>,
}

impl Metrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        for reason in Reason::ALL.iter().map(|reason| reason.as_str()) {
            let _ = self.refused_requests.get_or_create(&ByReason { reason });
        }
        for cause in SuppressionCause::ALL.map(SuppressionCause::as_str) {
            let _ = self.audit_suppressed.get_or_create(&ByCause { cause });
        }
        let registry = registry.sub_registry_with_prefix(PREFIX);
        registry.register("sessions", "Connections of participants", self.sessions.clone());
        registry.register("keys", "Device keys", self.keys.clone());
        registry.register("attached", "Descriptors of a link handed to a participant", self.attached.clone());
        registry.register(
            "refused_requests",
            "Requests and connections refused",
            self.refused_requests.clone(),
        );
        registry.register(
            "refused_connections",
            "Connections refused at the connection limit",
            self.refused_connections.clone(),
        );
        registry.register(
            "audit_suppressed",
            "Records missing in the audit log, by cause",
            self.audit_suppressed.clone(),
        );
    }

    pub(crate) fn observe(&self, sessions: usize, broker: Stats) {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.sessions.set(gauge(sessions));
        self.keys.set(gauge(broker.keys));
    }

    pub(crate) fn attached(&self) {
        self.attached.inc();
    }

    pub(crate) fn refuse_request(&self, reason: Reason) {
        self.refused_requests.get_or_create(&ByReason { reason: reason.as_str() }).inc();
    }

    pub(crate) fn audit_suppressed(&self, cause: SuppressionCause) {
        self.audit_suppressed.get_or_create(&ByCause { cause: cause.as_str() }).inc();
    }

    pub(crate) fn refused_connection(&self) {
        self.refused_connections.inc();
    }
}

/// Values that are read from the shared memory of the links at each scrape, and at no other time. A series exists as
/// long as the thing that it counts: at most one for each seat, direction and pool of each link.
#[derive(Clone, Debug)]
pub(crate) struct LinksMetrics(pub(crate) Arc<Links>);

impl LinksMetrics {
    pub(crate) fn register(self, registry: &mut Registry) {
        registry.sub_registry_with_prefix(PREFIX).register_collector(Box::new(self));
    }
}

/// The label of a link, and one more.
type Labels<'a> = [(&'static str, &'a str); 2];

/// One value for each label set, under one name.
fn family(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    kind: MetricType,
    fill: impl FnOnce(&mut Values<'_>) -> fmt::Result,
) -> fmt::Result {
    fill(&mut Values { metric: encoder.encode_descriptor(name, help, None, kind)?, kind })
}

struct Values<'a> {
    metric: MetricEncoder<'a>,
    kind: MetricType,
}

impl Values<'_> {
    fn one(&mut self, labels: &impl EncodeLabelSet, value: u64) -> fmt::Result {
        let mut series = self.metric.encode_family(labels)?;
        match self.kind {
            MetricType::Counter => series.encode_counter::<NoLabelSet, _, u64>(&value, None),
            _ => series.encode_gauge(&value),
        }
    }
}

impl Collector for LinksMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let links = &self.0;
        let mut seen: Vec<_> =
            links.all_whole().into_iter().map(|(link, kept)| (link, kept.view.snapshot(), kept)).collect();
        let mut timed: Vec<_> =
            seen.iter().filter_map(|(.., kept)| Some((Arc::clone(kept), kept.view.times()?))).collect();
        // What was read of a link that turned out to be damaged is meaningless.
        links.look_for_damage();
        timed.retain(|(kept, _)| kept.view.damage().is_none());
        seen.retain(|(.., kept)| kept.view.damage().is_none());
        let is_seen = |link| seen.iter().any(|(other, ..)| *other == link);
        let encoder = &mut encoder;

        let ready = ("link_ready", "Whether a link is kept: 1, or 0 while the sidecar retries");
        family(encoder, ready, MetricType::Gauge, |values| {
            links
                .indices()
                .try_for_each(|link| values.one(&[("link", links.name(link))], is_seen(link).into()))
        })?;
        let failures = ("link_failures", "Failed attempts to keep a link, and times that it was damaged");
        family(encoder, failures, MetricType::Counter, |values| {
            links
                .indices()
                .try_for_each(|link| values.one(&[("link", links.name(link))], links.failures(link)))
        })?;

        encoder
            .encode_descriptor("links", "Links that are kept", None, MetricType::Gauge)?
            .encode_gauge(&(seen.len() as u64))?;
        let each = |values: &mut Values<'_>, value: &dyn Fn(&KeptLink, &Snapshot) -> u64| {
            seen.iter()
                .try_for_each(|(_, now, kept)| values.one(&[("link", kept.host.name())], value(kept, now)))
        };
        let bytes = ("link_bytes", "Bytes of all segments of a link");
        family(encoder, bytes, MetricType::Gauge, |v| each(v, &|kept, _| kept.host.segment_bytes()))?;
        let participants = ("participants", "Participants of a link");
        family(encoder, participants, MetricType::Gauge, |v| each(v, &|_, now| now.seats.len() as u64))?;
        let wake_ups = ("wake_ups", "Times that a sleeping receiver was woken");
        family(encoder, wake_ups, MetricType::Counter, |v| each(v, &|_, now| now.wake_ups))?;
        let reaped = ("reaped", "Participants that died and whose buffers were recovered");
        family(encoder, reaped, MetricType::Counter, |v| each(v, &|_, now| now.recovered))?;

        let directions = |values: &mut Values<'_>, value: &dyn Fn(&shmesh::inspect::RingView) -> u64| {
            let rings = seen.iter().flat_map(|(_, now, kept)| now.rings.iter().map(move |ring| (kept, ring)));
            rings.into_iter().try_for_each(|(kept, ring)| {
                let labels: Labels<'_> = [("link", kept.host.name()), ("direction", ring.name())];
                values.one(&labels, value(ring))
            })
        };
        let messages = ("messages", "Messages that were sent");
        family(encoder, messages, MetricType::Counter, |v| directions(v, &|ring| ring.sent))?;
        let queued = ("queued", "Messages that wait to be received");
        family(encoder, queued, MetricType::Gauge, |v| directions(v, &|ring| ring.queued.len() as u64))?;

        let requests = (
            "requests",
            "Requests that no server has taken, requests that are pending, and replies that wait",
        );
        family(encoder, requests, MetricType::Gauge, |values| {
            for (_, now, kept) in &seen {
                let Some(requests) = now.requests else { continue };
                for (state, count) in [
                    ("queued", requests.queued),
                    ("pending", requests.pending),
                    ("replies", requests.replies),
                ] {
                    let labels: Labels<'_> = [("link", kept.host.name()), ("state", state)];
                    values.one(&labels, count as u64)?;
                }
            }
            Ok(())
        })?;

        let loans = ("loans", "Buffers that a participant has loaned, or received and not released");
        family(encoder, loans, MetricType::Gauge, |values| {
            for (_, now, kept) in &seen {
                for (seat, count) in loans_by_seat(now) {
                    let labels: Labels<'_> = [("link", kept.host.name()), ("seat", &seat)];
                    values.one(&labels, count)?;
                }
            }
            Ok(())
        })?;
        let readers = |values: &mut Values<'_>, value: &dyn Fn(&shmesh::inspect::ReaderView) -> u64| {
            for (_, now, kept) in &seen {
                for seat in &now.seats {
                    let Some(reader) = &seat.reader else { continue };
                    let number = seat.participant.seat.to_string();
                    let labels: Labels<'_> = [("link", kept.host.name()), ("seat", &number)];
                    values.one(&labels, value(reader))?;
                }
            }
            Ok(())
        };
        let behind =
            ("reader_behind", "Messages of a broadcast ring that a reader has not received, or still holds");
        family(encoder, behind, MetricType::Gauge, |v| readers(v, &|reader| reader.behind))?;
        let lost =
            ("reader_lost", "Messages of a broadcast ring that a reader lost because the writer overtook it");
        family(encoder, lost, MetricType::Counter, |v| readers(v, &|reader| reader.lost))?;

        let tables = |values: &mut Values<'_>, value: &dyn Fn(&shmesh::inspect::TableView) -> usize| {
            let tables =
                seen.iter().flat_map(|(_, now, kept)| now.tables.iter().map(move |table| (kept, table)));
            tables.into_iter().try_for_each(|(kept, table)| {
                let pool = table.pool.map_or("inline", PoolId::name);
                let labels: Labels<'_> = [("link", kept.host.name()), ("pool", pool)];
                values.one(&labels, value(table) as u64)
            })
        };
        let buffers = ("buffers", "Buffers of a pool");
        family(encoder, buffers, MetricType::Gauge, |v| tables(v, &|table| table.len))?;
        let free = ("free_buffers", "Free buffers of a pool");
        family(encoder, free, MetricType::Gauge, |v| tables(v, &shmesh::inspect::TableView::free))?;

        let timed: Vec<_> = timed.iter().map(|(kept, times)| (kept.host.name(), times)).collect();
        let latency = ("link_latency_seconds", "Time from sending to receiving, of sampled messages");
        histograms(encoder, latency, &timed, |times| &times.latency)?;
        let hold = ("link_hold_seconds", "Time from receiving to releasing, of sampled messages in buffers");
        histograms(encoder, hold, &timed, |times| &times.hold)
    }
}

/// One histogram of each link with samples: with one bucket for each power of two in the text form, and four in the native one.
fn histograms(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    timed: &[(&str, &LinkTimes)],
    which: impl Fn(&LinkTimes) -> &TimeHistogram,
) -> fmt::Result {
    /// The power of two of four native buckets for each doubling.
    const SCHEMA: i32 = 2;
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (link, times) in timed {
        let histogram = which(times);
        let buckets: Vec<_> = histogram.buckets().collect();
        let (mut classic, mut four) = (Vec::new(), 0);
        for (i, (bound, count)) in buckets.iter().enumerate() {
            four += count;
            // Bounds that are powers of two.
            if i % (1 << SCHEMA) == 0 {
                classic.push((*bound, std::mem::take(&mut four)));
            }
        }
        classic.push((f64::INFINITY, four));
        let first = buckets.iter().position(|(_, count)| *count > 0).unwrap_or(buckets.len());
        let last = buckets.iter().rposition(|(_, count)| *count > 0).map_or(first, |last| last + 1);
        let mut before = 0;
        let deltas: Vec<_> = buckets[first..last]
            .iter()
            .map(|(_, count)| {
                let delta = count.wrapping_sub(before).cast_signed();
                before = *count;
                delta
            })
            .collect();
        let power = i32::try_from(first).unwrap_or(0) + TimeHistogram::FIRST_POWER;
        // A span without buckets says that the histogram is native, even if it is empty.
        let span = if deltas.is_empty() { (0, 0) } else { (power, u32::try_from(deltas.len()).unwrap_or(0)) };
        let native = NativeHistogram {
            schema: SCHEMA,
            zero_threshold: 0.0,
            zero_count: 0,
            negative: NativeHistogramBuckets { spans: &[], deltas: &[] },
            positive: NativeHistogramBuckets { spans: &[span], deltas: &deltas },
            created: None,
        };
        let (sum, count) = (histogram.sum().as_secs_f64(), histogram.count());
        metric
            .encode_family(&[("link", *link)])?
            .encode_histogram_with_native::<NoLabelSet>(sum, count, &classic, None, native)?;
    }
    Ok(())
}

/// The number of buffers that each seat holds, including those of dead participants until they are recovered.
fn loans_by_seat(now: &Snapshot) -> Vec<(String, u64)> {
    let mut loans = std::collections::BTreeMap::new();
    for seat in &now.seats {
        loans.insert(seat.participant.seat, 0);
    }
    for held in now.tables.iter().flat_map(|table| &table.held) {
        if let BufferState::Loaned(seat) | BufferState::Borrowed(seat) | BufferState::Orphaned(Some(seat)) =
            held.hand
        {
            *loans.entry(seat).or_default() += 1;
        }
    }
    loans.into_iter().map(|(seat, count)| (seat.to_string(), count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shmesh::{LinkOptions, Side};

    #[derive(Debug)]
    struct TimesCollector(LinkTimes);

    impl Collector for TimesCollector {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let timed = [("link", &self.0)];
            histograms(&mut encoder, ("link_latency_seconds", "A time"), &timed, |times| &times.latency)?;
            histograms(&mut encoder, ("link_hold_seconds", "A time"), &timed, |times| &times.hold)
        }
    }

    #[test]
    fn both_forms_of_a_histogram_have_all_times() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let mut config = shmesh::config::LinkConfig::new("link".parse().unwrap());
        config.latency_sample = 1;
        let phy = options.create(&config).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        for slow in [false, true, false] {
            phy.send_inline(1, 0, b"").unwrap();
            if slow {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            drop(mac.receive().unwrap().unwrap());
        }
        let view = shmesh::inspect::View::open(dir.path(), &config.name).unwrap();
        let times = view.times().unwrap();
        let mut registry = Registry::default();
        registry.register_collector(Box::new(TimesCollector(times.clone())));

        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let cumulative = |le: &str| {
            let start = format!("link_latency_seconds_bucket{{le=\"{le}\",link=\"link\"}} ");
            let line = text.lines().find_map(|line| line.strip_prefix(&start));
            line.unwrap_or_else(|| panic!("{le}: {text}")).parse::<u64>().unwrap()
        };
        assert_eq!((cumulative("+Inf"), cumulative("32.0")), (3, 3));
        assert!(cumulative("0.00390625") < 3, "one took 5 ms: {text}");

        let families = prometheus_client::encoding::prometheus_protobuf::encode(&registry).unwrap();
        let histogram = |family: usize| families[family].metric[0].histogram.clone().unwrap();
        let (latency, hold) = (histogram(0), histogram(1));
        assert_eq!((latency.schema, latency.sample_count, latency.positive_span.len()), (2, 3, 1));
        // Deltas of counts: added up once they are the counts, added up twice their sum.
        let mut count = 0;
        let native: Vec<i64> = latency
            .positive_delta
            .iter()
            .map(|delta| {
                count += delta;
                count
            })
            .collect();
        assert_eq!(native.iter().sum::<i64>(), 3);
        let first = f64::from(latency.positive_span[0].offset);
        let bounds =
            (0_u32..).zip(&native).map(|(i, count)| (2.0_f64.powf((first + f64::from(i)) / 4.0), *count));
        let expected = times.latency.buckets().skip_while(|(_, count)| *count == 0);
        for ((bound, count), (expected, times)) in bounds.zip(expected) {
            assert!((bound / expected - 1.0).abs() < 1e-9 && u64::try_from(count) == Ok(times));
        }
        assert_eq!((hold.sample_count, hold.positive_span.len(), hold.positive_span[0].length), (0, 1, 0));
    }
}
