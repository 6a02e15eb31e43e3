//! What came out: the accounts of both sides against the ledger of the dead.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;
use serde_json::json;

use super::Crash;
use super::side::{Done, Trips};
use crate::human;
use crate::table::Table;

/// Everything that was seen.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DemoReport {
    pub(super) link: String,
    pub(super) trips: Vec<Trips>,
    pub(super) crash: Crash,
    pub(super) survivor: Done,
    pub(super) successor: Done,
    pub(super) left_behind: Vec<String>,
    pub(super) kept: bool,
}

impl DemoReport {
    /// What is wrong; nothing, if all is well. Bytes, numbers and order were checked by the receivers, who end with an
    /// error; what is left is who had which message.
    ///
    /// The dead one wrote its ledger behind each step, so the ledger may be one message behind.
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
                must(first.first == 0, "the survivor missed the beginning of the first stream".to_owned());
                must(
                    one_more(crash.sent, first.end),
                    format!("the dead sent {} messages, the survivor received {}", crash.sent, first.end),
                );
                must(
                    second.announced == Some(second.end) && second.end == self.successor.sent,
                    format!(
                        "the successor sent {} messages, the survivor received {}",
                        self.successor.sent, second.end
                    ),
                );
            }
            other => must(false, format!("the survivor heard of {} processes, not of two", other.len())),
        }
        match &self.successor.came[..] {
            [came] => {
                must(
                    one_more(crash.taken, came.first),
                    format!(
                        "the dead took {} messages, its successor began with number {}",
                        crash.taken, came.first
                    ),
                );
                must(
                    came.announced == Some(came.end) && came.end == self.survivor.sent,
                    format!(
                        "the survivor sent {} messages, the last to arrive was {}",
                        self.survivor.sent, came.end
                    ),
                );
            }
            other => must(false, format!("the successor heard of {} processes, not of one", other.len())),
        }
        must(
            crash.held.is_none() || crash.recovered_ms.is_some(),
            "what the dead held was not given back within five seconds".to_owned(),
        );
        must(
            self.kept || self.left_behind.is_empty(),
            format!("files were left behind: {}", self.left_behind.join(", ")),
        );
        wrong
    }

    /// Messages that were received and checked, round trips aside.
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
        writeln!(out, "\nverified: {checked} messages, every byte, in order; none lost, none doubled")?;
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
    // What the dead one received, only its ledger knows, and that has no bytes.
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
    // Else the slower first half would be a riddle.
    Ok(writeln!(out, "  (until its crash, the {dead} notes each message in a ledger: a system call each)")?)
}

fn story(outcome: &DemoReport, out: &mut dyn Write) -> Result<()> {
    let crash = &outcome.crash;
    let (sent, taken) = (human::count(crash.sent), human::count(crash.taken));
    writeln!(
        out,
        "\n  killed     {} process {}, having sent {sent} messages and taken {taken}",
        crash.side, crash.pid
    )?;
    if let Some(held) = crash.held {
        let (loans, messages) = (
            human::plural(held.loaned as u64, "loan"),
            human::plural(held.borrowed as u64, "received message"),
        );
        let data = human::plural(held.data as u64, "DATA buffer");
        let queued = human::plural(held.queued as u64, "message");
        writeln!(out, "  it held    {loans} and {messages}, with {data}; {queued} of it waited in the ring")?;
    }
    if let Some(ms) = crash.recovered_ms {
        writeln!(
            out,
            "  recovered  all of that after {}, and what had been sent stayed sent",
            human::nanos(ms * 1e6)
        )?;
    }
    let (attached, first) = (human::nanos(crash.attached_ms * 1e6), human::nanos(crash.first_ms * 1e6));
    let successor = crash.successor;
    writeln!(
        out,
        "  restarted  process {successor} was attached {attached} after its start, and received after {first}"
    )?;
    if let Some(came) = outcome.successor.came.first() {
        let first = human::count(came.first);
        writeln!(
            out,
            "             its first message was number {first}, the one after those that the dead one took"
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
        let survivor =
            Done { sent: 90, came: vec![came(1, 0, 101, None), came(2, 0, 7, Some(7))], recovered: [0; 3] };
        let successor = Done { sent: 7, came: vec![came(1, 50, 90, Some(90))], recovered: [0; 3] };
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
