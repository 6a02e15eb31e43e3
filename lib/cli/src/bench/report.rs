//! The report: rows as in `lib/comparison`, so that one script reads both.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use super::measure::Dist;
use crate::args::Output;
use crate::human::figure;
use crate::table::Table;

/// The figure that the nanoseconds of a test give.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RowKind {
    RoundTrip,
    OneWay,
    /// One way, with a payload that is large enough for a rate.
    Bulk,
    Op,
}

/// One line of the result. The JSON has the fields of `lib/comparison`, and `ratio`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    group: &'static str,
    metric: &'static str,
    payload_bytes: usize,
    p50: f64,
    p99: f64,
    p999: f64,
    mean: f64,
    p50_timed: f64,
    p50_min: f64,
    p50_max: f64,
    floor_ns: f64,
    repeats: usize,
    processes: usize,
    note: String,
    /// For `rtt_ns`: the median divided by the floor, the round trip of a bare cache line.
    ratio: Option<f64>,
}

/// One repetition: its result, and the floor around it.
pub(super) type Run = (Dist, f64);

fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all
}

fn median(sorted: &[f64]) -> f64 {
    match sorted {
        [] => f64::NAN,
        all => round(f64::midpoint(all[(all.len() - 1) / 2], all[all.len() / 2])),
    }
}

/// The rows of a test: each figure is the median over its repetitions.
pub(super) fn rows(
    name: &str,
    kind: RowKind,
    bytes: usize,
    note: &str,
    processes: usize,
    runs: &[Run],
) -> Vec<Row> {
    let row = |metric, unit: &dyn Fn(f64) -> f64| {
        let of = |figure: fn(&Dist) -> f64| sorted(runs.iter().map(|(dist, _)| unit(figure(dist))));
        let p50 = of(|dist| dist.p50);
        let floor_ns = median(&sorted(runs.iter().map(|(_, floor)| *floor)));
        Row {
            name: name.to_owned(),
            group: "shmesh",
            metric,
            payload_bytes: bytes,
            p50: median(&p50),
            p99: median(&of(|dist| dist.p99)),
            p999: median(&of(|dist| dist.p999)),
            mean: median(&of(|dist| dist.mean)),
            p50_timed: median(&of(|dist| dist.p50_timed)),
            p50_min: p50.first().copied().map_or(f64::NAN, round),
            p50_max: p50.last().copied().map_or(f64::NAN, round),
            floor_ns,
            repeats: runs.len(),
            processes,
            note: note.to_owned(),
            ratio: (metric == "rtt_ns").then(|| round(median(&p50) / floor_ns)),
        }
    };
    let rate = |ns: f64| bytes as f64 / ns * 1e9 / f64::from(1 << 30);
    match kind {
        RowKind::RoundTrip => vec![row("rtt_ns", &|ns| ns)],
        RowKind::OneWay => vec![row("oneway_ns", &|ns| ns)],
        RowKind::Bulk => vec![row("us_per_msg", &|ns| ns / 1e3), row("gib_s", &rate)],
        RowKind::Op => vec![row("op_ns", &|ns| ns)],
    }
}

/// The row of a figure that is counted and not timed.
pub(super) fn single(name: &str, metric: &'static str, value: f64, note: &str) -> Row {
    let same = Dist { p50: value, p99: value, p999: value, mean: value, p50_timed: value };
    let mut row = rows(name, RowKind::Op, 0, note, 1, &[(same, 0.0)]).remove(0);
    row.metric = metric;
    row
}

/// Prints all rows as text or JSON.
pub(super) fn print(rows: &[Row], output: Output, out: &mut dyn Write) -> Result<()> {
    if output == Output::Json {
        serde_json::to_writer_pretty(&mut *out, rows)?;
        return Ok(writeln!(out)?);
    }
    let heads = [
        "name",
        "metric",
        ">bytes",
        ">p50",
        ">p99",
        ">p99.9",
        ">mean",
        ">p50 min..max",
        ">floor",
        ">ratio",
        "note",
    ];
    let mut table = Table::new(&heads);
    for row in rows {
        table.row([
            row.name.clone(),
            row.metric.to_owned(),
            row.payload_bytes.to_string(),
            figure(row.p50),
            figure(row.p99),
            figure(row.p999),
            figure(row.mean),
            format!("{}..{}", figure(row.p50_min), figure(row.p50_max)),
            figure(row.floor_ns),
            row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            row.note.clone(),
        ]);
    }
    Ok(table.print(0, out)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_units_match_the_comparison_crate() {
        let run = |p50| (Dist { p50, p99: 2.0 * p50, p999: 4.0 * p50, mean: p50, p50_timed: p50 }, 100.0);
        let rows = rows("x", RowKind::Bulk, 1 << 30, "", 2, &[run(3e9), run(1e9), run(2e9)]);
        assert_eq!(
            (rows[0].metric, rows[0].p50, rows[0].p50_min, rows[0].p50_max),
            ("us_per_msg", 2e6, 1e6, 3e6)
        );
        // 99 % of the batches reach the lower rate.
        assert_eq!((rows[1].metric, rows[1].p50, rows[1].p99), ("gib_s", 0.5, 0.25));
        let rtt = super::rows("x", RowKind::RoundTrip, 8, "", 2, &[run(150.0)]);
        assert_eq!(rtt[0].ratio, Some(1.5));
    }
}
