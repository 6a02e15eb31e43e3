//! The description of a test, and the report of its results.

use std::fmt::Write as _;

use anyhow::Result;
use serde::Serialize;

use crate::measure::{Ctx, Dist};

/// Which side of the comparison a row is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Group {
    /// A limit of the machine itself.
    Limit,
    /// Another library, or the kernel.
    Peer,
}

/// The unit of work that a test times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    RoundTrip,
    OneWay,
    /// One way with a payload large enough for a rate.
    Bulk,
    Copy,
    Op,
}

/// One test of a limit or peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) group: Group,
    pub(crate) kind: Kind,
    pub(crate) bytes: usize,
    pub(crate) run: fn(&Ctx) -> Result<Dist>,
    processes: u8,
    note: &'static str,
}

impl Case {
    pub(crate) const fn new(
        name: &'static str,
        group: Group,
        kind: Kind,
        bytes: usize,
        run: fn(&Ctx) -> Result<Dist>,
    ) -> Self {
        let processes = if matches!(kind, Kind::Op) { 1 } else { 2 };
        Self { name, group, kind, bytes, run, processes, note: "" }
    }

    /// A test of a peer of shmesh.
    pub(crate) const fn peer(
        name: &'static str,
        kind: Kind,
        bytes: usize,
        run: fn(&Ctx) -> Result<Dist>,
    ) -> Self {
        Self::new(name, Group::Peer, kind, bytes, run)
    }

    pub(crate) const fn one_process(mut self) -> Self {
        self.processes = 1;
        self
    }

    pub(crate) const fn note(mut self, note: &'static str) -> Self {
        self.note = note;
        self
    }

    /// The rows that the repetitions of this test make: for each figure, its median over them.
    pub(crate) fn rows(&self, runs: &[Run]) -> Vec<Row> {
        let same = |ns: f64| ns;
        let micros = |ns: f64| ns / 1e3;
        let rate = |ns: f64| self.bytes as f64 / ns * 1e9 / (1u64 << 30) as f64;
        match self.kind {
            Kind::RoundTrip => vec![self.row("rtt_ns", runs, same)],
            Kind::OneWay => vec![self.row("oneway_ns", runs, same)],
            Kind::Bulk => vec![self.row("us_per_msg", runs, micros), self.row("gib_s", runs, rate)],
            Kind::Copy => vec![self.row("gib_s", runs, rate)],
            Kind::Op => vec![self.row("op_ns", runs, same)],
        }
    }

    fn row(&self, metric: &'static str, runs: &[Run], unit: impl Fn(f64) -> f64) -> Row {
        let sorted = |of: fn(&Dist) -> f64| sorted_all(runs.iter().map(|run| unit(of(&run.dist))));
        let p50 = sorted(|dist| dist.p50);
        Row {
            name: self.name,
            group: self.group,
            metric,
            payload_bytes: self.bytes,
            p50: median(&p50),
            p99: median(&sorted(|dist| dist.p99)),
            p999: median(&sorted(|dist| dist.p999)),
            mean: median(&sorted(|dist| dist.mean)),
            p50_timed: median(&sorted(|dist| dist.p50_timed)),
            p50_min: round(p50[0]),
            p50_max: round(p50[p50.len() - 1]),
            floor_ns: median(&sorted_all(runs.iter().map(|run| run.floor_ns))),
            repeats: runs.len(),
            processes: self.processes,
            note: self.note,
        }
    }
}

/// One repetition of a test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) dist: Dist,
    /// The bare cache line's round trip, taken just before and just after.
    pub(crate) floor_ns: f64,
}

fn sorted_all(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all
}

fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn median(sorted: &[f64]) -> f64 {
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    round((low + high) / 2.0)
}

/// One line of the result. The JSON fields are stable: scripts merge them with `shmesh bench --output json`.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    name: &'static str,
    group: Group,
    /// `rtt_ns`, `oneway_ns`, `us_per_msg`, `gib_s` or `op_ns`.
    metric: &'static str,
    payload_bytes: usize,
    p50: f64,
    p99: f64,
    p999: f64,
    mean: f64,
    /// For `rtt_ns`, the median of the singly timed trips that `p99` and `p999` are of; elsewhere `p50` again.
    p50_timed: f64,
    /// The lowest and highest p50 of the repetitions.
    p50_min: f64,
    p50_max: f64,
    /// The bare cache line's round trip around this test: virtual cores move on their host, and all else moves with it.
    floor_ns: f64,
    repeats: usize,
    processes: u8,
    note: &'static str,
}

/// The rows as an aligned table, limits first.
pub(crate) fn table(rows: &[Row]) -> String {
    let head = [
        "name",
        "metric",
        "bytes",
        "p50",
        "p99",
        "p99.9",
        "mean",
        "p50 timed",
        "p50 min..max",
        "floor",
        "procs",
        "note",
    ];
    let mut lines = vec![head.map(String::from)];
    lines.extend(rows.iter().map(|row| {
        [
            row.name.into(),
            row.metric.into(),
            row.payload_bytes.to_string(),
            short(row.p50),
            short(row.p99),
            short(row.p999),
            short(row.mean),
            short(row.p50_timed),
            format!("{}..{}", short(row.p50_min), short(row.p50_max)),
            short(row.floor_ns),
            row.processes.to_string(),
            row.note.into(),
        ]
    }));
    let widths: Vec<usize> = (0..head.len())
        .map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in lines {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 | 1 => write!(text, "{cell:width$}  "),
                11 => write!(text, "{cell}"),
                _ => write!(text, "{cell:>width$}  "),
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Four significant digits or all before the point.
fn short(value: f64) -> String {
    let digits = match value {
        v if v < 10.0 => 2,
        v if v < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_units() {
        let run = |p50| {
            let dist = Dist { p50, p99: 2.0 * p50, p999: 4.0 * p50, mean: p50, p50_timed: p50 };
            Run { dist, floor_ns: 100.0 }
        };
        let case = Case::new("x", Group::Limit, Kind::Bulk, 1 << 30, |_| unreachable!());
        let rows = case.rows(&[run(3e9), run(1e9), run(2e9)]);
        assert_eq!(
            (rows[0].metric, rows[0].p50, rows[0].p50_min, rows[0].p50_max),
            ("us_per_msg", 2e6, 1e6, 3e6)
        );
        // The rate that 99 % of the batches reach is the low one.
        assert_eq!((rows[1].metric, rows[1].p50, rows[1].p99), ("gib_s", 0.5, 0.25));
    }
}
