//! `shmesh top`: rates, queues, pools and participants of links, refreshed at an interval.

mod sample;
mod screen;

use std::io::{IsTerminal, Write};
use std::num::NonZeroU64;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Context;
use shmesh::Side;
use shmesh::config::LinkName;

use self::sample::{LinkSample, Rates, Sample};
use crate::args::{Dir, Output, seconds};
use crate::human;
use crate::table::Table;

const EXAMPLES: &str = "\
Links are mapped read-only for the moment of a sample. Each sample wakes the monitor threads of participants in other pid namespaces
once; messages are not affected.

M2S/S and S2M/S are messages per second, primary to secondary and back. QUEUED counts messages that are sent and not received, in both
directions; for a broadcast ring, those that the slowest reader has not received. POOL is the pool with the largest share of used
buffers. ASLEEP counts participants that sleep until a message arrives, and WOKEN/S the system calls that wake them. P50 and P99 are the
median and the 99th percentile of the time from sending to receiving in the interval, of links with `latency: {sample: 64}`. A link that
was just created, and one in NVIPC's layout, has no rates.

On a terminal: up and down select a link, whose participants and pools are shown below; s changes the order; q ends. Elsewhere, a table
is printed at each interval.

Examples:
  shmesh top
  shmesh top fronthaul --interval 0.5
  shmesh top --output json --count 10 | jq -r '.links[] | [.name, .messages_per_second.m2s] | @tsv'";

/// The options of `shmesh top`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of links; all links of the directory if there are none
    #[arg(value_name = "LINK")]
    links: Vec<LinkName>,
    #[command(flatten)]
    dir: Dir,
    /// Seconds between two samples
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: f64,
    /// End after N intervals
    #[arg(long, value_name = "N")]
    count: Option<NonZeroU64>,
    /// Output format: text, or one line of JSON for each interval
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    output: Output,
}

impl Args {
    fn sample(&self) -> anyhow::Result<Sample> {
        let dir = &self.dir.dir;
        Sample::take(dir, &self.links)
            .with_context(|| format!("cannot read the IPC directory {}", dir.display()))
    }

    fn interval(&self) -> Duration {
        Duration::from_secs_f64(self.interval)
    }

    /// Whether `intervals` are as many as were asked for.
    fn is_enough(&self, intervals: u64) -> bool {
        self.count.is_some_and(|count| intervals >= count.get())
    }
}

/// Shows the links until it is ended, or as often as the options say.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.output == Output::Text && std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
        return screen::run(args);
    }
    let mut before = args.sample()?;
    for intervals in 1.. {
        sleep(args.interval());
        let now = args.sample()?;
        match args.output {
            Output::Text => text(args, &now, &before, out)?,
            Output::Json => writeln!(out, "{}", now.json(Some(&before)))?,
        }
        out.flush()?;
        if args.is_enough(intervals) {
            break;
        }
        before = now;
    }
    Ok(())
}

fn text(args: &Args, now: &Sample, before: &Sample, out: &mut dyn Write) -> anyhow::Result<()> {
    if now.links.is_empty() {
        return Ok(writeln!(out, "no links in {}", args.dir.dir.display())?);
    }
    let mut table = Table::new(&HEADS);
    for link in &now.links {
        table.row(row(link, &now.rates(link, Some(before))));
    }
    table.print(0, out)?;
    for LinkSample { seen, .. } in &now.links {
        if let Err(error) = seen {
            writeln!(out, "{error}")?;
        }
    }
    Ok(writeln!(out)?)
}

/// The columns of the table of links.
const HEADS: [&str; 12] = [
    "LINK",
    "RING",
    "PRIMARY",
    "SECONDARY",
    ">M2S/S",
    ">S2M/S",
    ">QUEUED",
    "POOL",
    ">ASLEEP",
    ">WOKEN/S",
    ">P50",
    ">P99",
];

/// The row of a link in the table.
fn row(link: &LinkSample, rates: &Rates) -> [String; 12] {
    let name = link.name.to_string();
    let Ok(state) = &link.seen else {
        let mut row = [const { String::new() }; 12];
        row[0] = name;
        row[1] = "unusable".to_owned();
        return row;
    };
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), human::rate);
    let [p50, p99] = rates
        .latency
        .map_or_else(|| ["-", "-"].map(str::to_owned), |times| times.map(|time| human::nanos(time * 1e9)));
    let pool = state.fullest_pool().map(|pool| format!("{} {}%", pool.name, pool.percent()));
    [
        name,
        state.mode.to_owned(),
        state.side(Side::Primary),
        state.side(Side::Secondary),
        rate(rates.messages[0]),
        rate(rates.messages[1]),
        state.rings.iter().map(|ring| ring.queued).sum::<usize>().to_string(),
        pool.unwrap_or_default(),
        state.asleep().to_string(),
        rate(rates.wake_ups),
        p50,
        p99,
    ]
}
