//! `shmesh top`: rates, queues, pools and participants of links, refreshed at an interval.

mod sample;
mod screen;

use std::io::{IsTerminal, Write};
use std::num::NonZeroU64;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Context;
use shmesh::config::LinkName;
use shmesh_sys::top::{COLUMNS, COLUMNS_HELP};

use self::sample::{LinkSample, Sample, Sampler};
use crate::args::{Dir, Output, seconds};
use crate::table::Table;

const READING: &str = "\
Links are mapped read-only from their first sample to the sample after their removal. Mapping a link wakes the monitor threads of its
participants in other pid namespaces once; messages are not affected. A link that is created again under its name is another link.";

const EXAMPLES: &str = "\
On a terminal: up and down select a link, whose participants and pools are shown below; s changes the order; q ends. Elsewhere, a table
is printed at each interval.

Examples:
  shmesh top
  shmesh top fronthaul --interval 0.5
  shmesh top --output json --count 10 | jq -r '.links[] | [.name, .messages_per_second.m2s] | @tsv'";

/// The options of `shmesh top`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = format!("{READING}\n\n{COLUMNS_HELP}\n\n{EXAMPLES}"))]
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
    fn sampler(&self) -> Sampler {
        Sampler::new(&self.dir.dir, &self.links)
    }

    fn sample(&self, sampler: &mut Sampler) -> anyhow::Result<Sample> {
        let dir = self.dir.dir.display();
        sampler.sample().with_context(|| format!("cannot read the IPC directory {dir}"))
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
    let mut sampler = args.sampler();
    let mut before = args.sample(&mut sampler)?;
    for intervals in 1.. {
        sleep(args.interval());
        let now = args.sample(&mut sampler)?;
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
    let mut table = Table::new(&COLUMNS);
    for link in &now.links {
        table.row(link.row(&now.rates(link, Some(before))).cells());
    }
    table.print(0, out)?;
    for LinkSample { seen, .. } in &now.links {
        if let Err(error) = seen {
            writeln!(out, "{error}")?;
        }
    }
    Ok(writeln!(out)?)
}
