//! `shmesh capture`: records the messages of a link in a pcapng file.

mod pcapng;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use shmesh::Side;
use shmesh::config::{Backing, LinkName};
use shmesh::inspect::{Filter, LostCounts, Tap, View};
use shmesh_sys::quantity::Bytes;

use crate::args::{Dir, seconds};

/// How often an idle capture checks whether another link has taken the name.
const SUCCESSOR: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
The capture is passive: it maps the link read-only, takes no seat, and participants neither notice nor wait for it. Messages that
it was too slow to see are counted and reported at the end. Timestamps are taken at the observation. It works on a link in use
and after a crash.

A released buffer is soon reused, so on a busy link small messages that travel in the ring are captured best. To capture more, use
--interval-us 0, a longer ring, a small --limit-bytes, and a dedicated core.

To view the file in Wireshark, copy lib/cli/wireshark/shmesh.lua from the sources into its plugin folder.

Examples:
  shmesh capture fronthaul -o fronthaul.pcapng
  shmesh capture fronthaul -o slots.pcapng --msg-id 0x80 --msg-id 0x81 --cell-id 0 --seconds 10
  shmesh capture fronthaul -o - --from secondary | tshark -r - -X lua_script:shmesh.lua
  shmesh capture fronthaul -o before-the-crash.pcapng --history --count 1000";

/// The options of `shmesh capture`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the link
    link: LinkName,
    /// Output file; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    dir: Dir,
    /// Only messages with this id, decimal or 0x; may be given more than once
    #[arg(long, value_name = "ID", value_parser = number)]
    msg_id: Vec<i32>,
    /// Only messages about this cell; may be given more than once
    #[arg(long, value_name = "ID", value_parser = number, allow_negative_numbers = true)]
    cell_id: Vec<i32>,
    /// Only messages that this side sends
    #[arg(long, value_enum, value_name = "SIDE")]
    from: Option<From>,
    /// Also messages that were already received, if they are still in memory
    #[arg(long)]
    history: bool,
    /// Maximum bytes to record per part; both parts together are limited to 262112 by Wireshark
    #[arg(long, value_name = "BYTES", default_value = "65536")]
    limit_bytes: Bytes,
    /// Stop after this many messages
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Stop after this many seconds; default: run until Ctrl-C
    #[arg(long, value_name = "S", value_parser = seconds)]
    seconds: Option<f64>,
    /// Microseconds between two polls of an idle link; 0 polls continuously and occupies a core
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    interval_us: u64,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum From {
    /// The primary: L1, trainer
    Primary,
    /// The secondary: L2, loader
    Secondary,
}

fn number(text: &str) -> Result<i32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).map(u32::cast_signed),
        None => text.parse(),
    };
    parsed.map_err(|_| "must be a number of up to 32 bits, such as 128 or 0x80".to_owned())
}

/// Records until a signal or a limit ends it.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<()> {
    if let Some(theirs) = crate::nvipc::seen(&args.dir.dir, &args.link) {
        anyhow::bail!(
            "{}, whose rings cannot be read without removing messages: start the tap in one of its processes (nvipc_fw_start), or \
             look at what is queued with `shmesh dump {}`",
            crate::nvipc::not_here(&args.link, &theirs),
            args.link
        );
    }
    let told = crate::talk::signals()?;
    let mut watched = CapturedLink::new(args)?;
    let seen = if args.output == Path::new("-") {
        record(args, &mut watched, &told, io::stdout().lock())?
    } else {
        let path = args.output.display();
        let file = File::create(&args.output).with_context(|| format!("cannot write {path}"))?;
        record(args, &mut watched, &told, file).with_context(|| format!("cannot write {path}"))?
    };
    let summary = told_at_the_end(seen, watched.lost(), watched.successors);
    if args.output == Path::new("-") {
        eprintln!("{summary}")
    } else {
        writeln!(out, "{summary}")?
    }
    Ok(())
}

/// The captured link, including earlier links of the same name.
struct CapturedLink {
    tap: Tap,
    epoch: u64,
    backing: Backing,
    looked: Instant,
    /// Lost messages of earlier links of the same name.
    lost: LostCounts,
    successors: u64,
}

impl CapturedLink {
    fn new(args: &Args) -> shmesh::Result<Self> {
        let view = View::open(&args.dir.dir, &args.link)?;
        let (epoch, backing) = (view.epoch(), view.backing());
        let from = args.from.map(|from| if from == From::Primary { Side::Primary } else { Side::Secondary });
        let filter = Filter { msg_ids: args.msg_id.clone(), cell_ids: args.cell_id.clone(), from };
        let tap =
            Tap::new(view, filter).limit_bytes(usize::try_from(args.limit_bytes.0).unwrap_or(usize::MAX));
        let tap = if args.history { tap.with_history() } else { tap };
        Ok(Self { tap, epoch, backing, looked: Instant::now(), lost: LostCounts::default(), successors: 0 })
    }

    fn lost(&self) -> LostCounts {
        let (before, now) = (self.lost, self.tap.lost());
        LostCounts {
            overwritten: before.overwritten.saturating_add(now.overwritten),
            reused: before.reused.saturating_add(now.reused),
            data: before.data.saturating_add(now.data),
            damaged: before.damaged.saturating_add(now.damaged),
            restarts: before.restarts.saturating_add(now.restarts),
        }
    }

    /// Continues with the link that was created after this one was removed, from its first message on.
    fn follow(&mut self, args: &Args) {
        // A memfd link would have to be requested from its host, which a passive capture does not do.
        if self.backing != Backing::Named || self.looked.elapsed() < SUCCESSOR {
            return;
        }
        self.looked = Instant::now();
        // Removed and not created again, or not completely: keep the current view.
        let Ok(next) = Self::new(args) else { return };
        if next.epoch != self.epoch {
            let (lost, successors) = (self.lost(), self.successors + 1);
            *self = Self { tap: next.tap.with_history(), lost, successors, ..next };
        }
    }
}

fn record(args: &Args, watched: &mut CapturedLink, told: &Receiver<()>, to: impl Write) -> io::Result<u64> {
    let mut file = pcapng::PcapngWriter::new(
        BufWriter::with_capacity(1 << 20, to),
        args.link.as_str(),
        args.limit_bytes == Bytes(0),
    )?;
    file.flush()?;
    let end = args.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let wanted = args.count.unwrap_or(u64::MAX);
    let mut seen = 0;
    let mut failed = None;
    loop {
        let before = seen;
        watched.tap.poll(|message| {
            if seen < wanted && failed.is_none() {
                seen += 1;
                failed = file.message(message).err();
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let over = seen >= wanted || end.is_some_and(|end| Instant::now() >= end);
        if over || told.try_recv().is_ok() {
            break;
        }
        if seen == before {
            file.flush()?;
            watched.follow(args);
            if args.interval_us > 0 {
                std::thread::sleep(Duration::from_micros(args.interval_us));
            }
        }
    }
    file.finish(seen, watched.lost())?;
    Ok(seen)
}

fn told_at_the_end(seen: u64, lost: LostCounts, successors: u64) -> String {
    let LostCounts { overwritten, reused, data, damaged, restarts } = lost;
    let anew = match successors {
        0 => String::new(),
        _ => format!("; the link was created again {successors} times"),
    };
    format!(
        "recorded {seen} messages; too late for {overwritten} in the ring and {reused} in their buffers, {data} without their \
         DATA part, {damaged} damaged, {restarts} new starts{anew}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_decimal_or_hexadecimal() {
        assert_eq!(number("128"), Ok(128));
        assert_eq!(number("0x80"), Ok(128));
        assert_eq!(number("-1"), Ok(-1));
        assert_eq!(number("0xffffffff"), Ok(-1));
        assert!(number("0x").is_err() && number("eighty").is_err() && number("4294967296").is_err());
    }
}
