//! The result of the demo: the counts of both sides compared with the ledger of the killed process.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;
use serde_json::json;

use super::Crash;
use super::side::{SideResult, Trips};
use crate::human;
use crate::table::Table;

/// All counts and times of a demo.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DemoReport {
    pub(super) link: String,
    pub(super) trips: Vec<Trips>,
    pub(super) crash: Crash,
    pub(super) survivor: SideResult,
    pub(super) successor: SideResult,
    pub(super) left_behind: Vec<String>,
    pub(super) kept: bool,
}

impl DemoReport {
    /// The contradictions that were found; empty if there are none. Bytes, numbers and order were checked by the
    /// receivers, which fail on errors; this compares which process received which message.
    ///
    /// The killed process wrote its ledger after each step, so the ledger may be one message behind.
    pub(super) fn verify(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut must = |holds: bool, what: String| {
            if !holds {
                wrong.push(what);
            }
        };
        let one_more = |noted: u64, found: u64| found == noted || found == noted + 1;
        let crash = &self.crash;

        match &self.survivor.came[..] {
            [first, second] => {
                must(
                    first.first == 0,
                    "the surviving process missed the beginning of the first stream".to_owned(),
                );
                must(
                    one_more(crash.sent, first.end),
                    format!(
                        "the killed process sent {} messages, the surviving one received {}",
                        crash.sent, first.end
                    ),
                );
                must(
                    second.announced == Some(second.end) && second.end == self.successor.sent,
                    format!(
                        "the successor sent {} messages, the surviving process received {}",
                        self.successor.sent, second.end
                    ),
                );
            }
            other => must(
                false,
                format!("the surviving process received messages of {} processes, not of two", other.len()),
            ),
        }
        match &self.successor.came[..] {
            [came] => {
                must(
                    one_more(crash.taken, came.first),
                    format!(
                        "the killed process received {} messages, its successor began with number {}",
                        crash.taken, came.first
                    ),
                );
                must(
                    came.announced == Some(came.end) && came.end == self.survivor.sent,
                    format!(
                        "the surviving process sent {} messages, the last one received was {}",
                        self.survivor.sent, came.end
                    ),
                );
            }
            other => must(
                false,
                format!("the successor received messages of {} processes, not of one", other.len()),
            ),
        }
        must(
            crash.held.is_none() || crash.recovered_ms.is_some(),
            "the buffers of the killed process were not recovered within five seconds".to_owned(),
        );
        must(
            self.kept || self.left_behind.is_empty(),
            format!("files were left behind: {}", self.left_behind.join(", ")),
        );
        wrong
    }

    /// Number of messages that were received and checked, without round trips.
    fn checked(&self) -> u64 {
        let came = self.survivor.came.iter().chain(&self.successor.came);
        came.map(|came| came.end - came.first).sum::<u64>() + self.crash.taken
    }
}

pub(super) fn json(outcome: &DemoReport, wrong: &[String], out: &mut dyn Write) -> Result<()> {
    let verdict = if wrong.is_empty() { "verified" } else { "failed" };
    let mut report = json!({ "verdict": verdict, "wrong": wrong, "messages_checked": outcome.checked() });
    if let (Some(report), serde_json::Value::Object(outcome)) =
        (report.as_object_mut(), serde_json::to_value(outcome)?)
    {
        report.extend(outcome);
    }
    serde_json::to_writer_pretty(&mut *out, &report)?;
    Ok(writeln!(out)?)
}

pub(super) fn text(outcome: &DemoReport, wrong: &[String], out: &mut dyn Write) -> Result<()> {
    writeln!(out, "{}", outcome.link)?;
    let mut table = Table::new(&["round trip", ">trips", ">p50", ">p99", ">p99.9"]);
    for trips in &outcome.trips {
        let at = [trips.p50_ns, trips.p99_ns, trips.p999_ns].map(human::nanos);
        table.row([trips.what.clone(), human::count(trips.trips)].into_iter().chain(at));
    }
    writeln!(out)?;
    table.print(2, out)?;
    streams(outcome, out)?;
    story(outcome, out)?;
    if wrong.is_empty() {
        let checked = human::count(outcome.checked());
        writeln!(out, "\nverified: {checked} messages, every byte, in order; none lost, none duplicated")?;
    }
    for what in wrong {
        writeln!(out, "\nFAILED: {what}")?;
    }
    Ok(())
}

fn streams(outcome: &DemoReport, out: &mut dyn Write) -> Result<()> {
    let crash = &outcome.crash;
    let (dead, other) =
        if crash.side == "primary" { ("primary", "secondary") } else { ("secondary", "primary") };
    let mut table =
        Table::new(&["both ways at once", "direction", ">messages", ">rate", ">payload", ">payload rate"]);
    let mut row = |when: &str, from: &str, to: &str, count: u64, bytes: Option<u64>, seconds: f64| {
        let seconds = seconds.max(1e-9);
        table.row([
            when.to_owned(),
            format!("{from} to {to}"),
            human::count(count),
            human::rate(count as f64 / seconds),
            bytes.map_or_else(|| "-".to_owned(), human::bytes),
            bytes.map_or_else(|| "-".to_owned(), |bytes| human::bytes_per_second(bytes as f64 / seconds)),
        ]);
    };
    // Only its ledger counts the messages that the killed process received, and it does not count bytes.
    row("until the crash", other, dead, crash.taken, None, crash.after_seconds);
    let mut whens = ["", "after it", ""].into_iter();
    for came in &outcome.survivor.came {
        let when = whens.next().unwrap_or_default();
        row(when, dead, other, came.end - came.first, Some(came.bytes), came.seconds);
    }
    for came in &outcome.successor.came {
        row("", other, dead, came.end - came.first, Some(came.bytes), came.seconds);
    }
    writeln!(out)?;
    table.print(2, out)?;
    // Explains why the first half is slower.
    Ok(writeln!(
        out,
        "  (until the crash, the {dead} counts each message in a ledger, which costs a system call each)"
    )?)
}

fn story(outcome: &DemoReport, out: &mut dyn Write) -> Result<()> {
    let crash = &outcome.crash;
    let (sent, taken) = (human::count(crash.sent), human::count(crash.taken));
    writeln!(
        out,
        "\n  killed     {} process {}, after it had sent {sent} messages and received {taken}",
        crash.side, crash.pid
    )?;
    if let Some(held) = crash.held {
        let (loans, messages) = (
            human::plural(held.loaned as u64, "loan"),
            human::plural(held.borrowed as u64, "received message"),
        );
        let data = human::plural(held.data as u64, "DATA buffer");
        let queued = human::plural(held.queued as u64, "message");
        writeln!(out, "  it held    {loans} and {messages}, with {data}; {queued} of it queued in the ring")?;
    }
    if let Some(ms) = crash.recovered_ms {
        writeln!(
            out,
            "  recovered  all of these after {}; its sent messages stayed queued",
            human::nanos(ms * 1e6)
        )?;
    }
    let (attached, first) = (human::nanos(crash.attached_ms * 1e6), human::nanos(crash.first_ms * 1e6));
    let successor = crash.successor;
    writeln!(
        out,
        "  restarted  process {successor} attached {attached} after its start, and received its first message after {first}"
    )?;
    if let Some(came) = outcome.successor.came.first() {
        let first = human::count(came.first);
        writeln!(
            out,
            "             its first message was number {first}, the next one after those that the killed process received"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::side::Came;
    use super::*;

    fn good() -> DemoReport {
        let crash = Crash {
            side: "secondary".to_owned(),
            pid: 1,
            sent: 100,
            taken: 50,
            after_seconds: 1.0,
            held: None,
            recovered_ms: None,
            successor: 2,
            attached_ms: 1.0,
            first_ms: 1.0,
        };
        let came =
            |generation, first, end, announced| Came { generation, first, end, announced, ..Came::default() };
        let survivor = SideResult {
            sent: 90,
            came: vec![came(1, 0, 101, None), came(2, 0, 7, Some(7))],
            recovered: [0; 3],
        };
        let successor = SideResult { sent: 7, came: vec![came(1, 50, 90, Some(90))], recovered: [0; 3] };
        DemoReport {
            link: String::new(),
            trips: vec![],
            crash,
            survivor,
            successor,
            left_behind: vec![],
            kept: false,
        }
    }

    #[test]
    fn accounts_that_disagree_are_reported() {
        assert_eq!(good().verify(), Vec::<String>::new());
        let wrong = |change: fn(&mut DemoReport)| {
            let mut outcome = good();
            change(&mut outcome);
            outcome.verify().len()
        };
        assert_eq!(wrong(|o| o.survivor.came[0].end = 99), 1, "one of the dead was lost");
        assert_eq!(wrong(|o| o.survivor.came[0].end = 102), 1, "one that it never sent");
        assert_eq!(wrong(|o| o.survivor.came[1].end = 6), 1);
        assert_eq!(wrong(|o| o.successor.came[0].first = 49), 1, "taken twice");
        assert_eq!(wrong(|o| o.successor.came[0].first = 52), 1, "lost");
        assert_eq!(wrong(|o| o.survivor.sent = 91), 1);
        assert_eq!(wrong(|o| o.left_behind.push("x_shm".into())), 1);
    }
}
