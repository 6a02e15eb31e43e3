//! `shmesh demo`: two processes exchange messages, one is killed, and nothing is lost.
//!
//! | file | concept |
//! |---|---|
//! | `mod.rs` | the sequence of events |
//! | `side.rs` | one side of the link, in a process of its own |
//! | `pattern.rs` | the payload of messages, and checking every byte |
//! | `verdict.rs` | the result: the counts of both sides compared with the ledger of the killed process |

mod pattern;
mod side;
mod verdict;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use shmesh::config::LinkName;
use shmesh::inspect::{BufferState, View};

use crate::args::{self, Dir, Output};
use crate::child::{Child, ProcessGroup};
use side::{SideReport, SideResult, SideSpec, Trips};
use verdict::DemoReport;

const EXAMPLES: &str = "\
What happens:
  1  two processes attach to a link and time round trips: in the ring, in a MSG buffer, with a DATA buffer
  2  both send as fast as they can, all forms mixed, and check every byte, every number and the order
  3  half way, one is killed with SIGKILL while it holds loans and received messages
  4  the other continues; the buffers of the dead process are recovered, its sent messages are delivered
  5  a new process attaches in its place and receives the messages queued for the dead process
  6  the counts are compared: every message not received by the dead process arrived exactly once

The link has a unique name and the configuration given by --config. It is removed at the end, also after Ctrl-C.

Examples:
  shmesh demo
  shmesh demo --seconds 2 --kill primary
  shmesh demo --config links.yaml --link fronthaul
  shmesh demo --keep               keep the link as after a crash: inspect it with ls and dump, remove it with rm

Exit status: 0 all messages verified, 1 verification failed, 64 invalid configuration.";

/// The options of `shmesh demo`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// File with the configuration of the link, in shmesh's or NVIPC's YAML; default: built in
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the link in the file; default: the first one
    #[arg(long, value_name = "NAME", requires = "config")]
    link: Option<String>,
    /// Approximate duration in seconds
    #[arg(long, value_name = "S", default_value_t = 6.0, value_parser = args::seconds)]
    seconds: f64,
    /// Side of which a process is killed
    #[arg(long, value_enum, value_name = "SIDE", default_value_t = Victim::Secondary)]
    kill: Victim,
    /// Keep the link at the end, with queued messages and no living participant
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    dir: Dir,
    /// Output format: text or JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    output: Output,
}

/// The side of which a process is killed.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Victim {
    /// The process that created the link and keeps its descriptors
    Primary,
    /// The process that attached to the link
    Secondary,
}

/// One side of the demo.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SideArgs {
    spec: String,
}

/// Runs one side of the demo.
pub(crate) fn side(args: &SideArgs) -> Result<()> {
    side::run(&serde_json::from_str::<SideSpec>(&args.spec)?)
}

/// Buffers that the killed process held, read from shared memory.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct InHand {
    loaned: usize,
    borrowed: usize,
    data: usize,
    queued: usize,
}

/// The crash and the recovery.
#[derive(Clone, Debug, Serialize)]
struct Crash {
    side: String,
    pid: u32,
    /// The ledger of the killed process: messages sent, messages taken.
    sent: u64,
    taken: u64,
    /// Seconds from the beginning of the stream to the crash.
    after_seconds: f64,
    held: Option<InHand>,
    /// Milliseconds from the death until all buffers of the killed process were recovered.
    recovered_ms: Option<f64>,
    /// The process that replaced it, how long it took to attach, and to receive the first message.
    successor: u32,
    attached_ms: f64,
    first_ms: f64,
}

/// Time limit for each step beyond its planned duration.
const GRACE: Duration = Duration::from_secs(60);
/// Share of the whole time for each of three kinds of round trips.
const TRIPS_SHARE: f64 = 0.08;
const STREAM_SHARE: f64 = 0.7;

/// Runs the demo and prints its verdict.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let session = ProcessGroup::begin()?;
    let name: LinkName = format!("demo-{}", std::process::id()).parse()?;
    let config =
        side::config_of(&name, args.config.as_ref().map(|path| (path.clone(), args.link.clone())).as_ref())?;
    config.validate()?;
    session.owns_link(&args.dir.dir, &name);
    let bar = progress(args.seconds);

    let stage = Demo { args, session: &session, name: &name, bar: &bar, begin: Instant::now() };
    let outcome = stage.play()?;
    bar.finish_and_clear();
    if args.keep {
        session.keeps_links();
    }
    let found = outcome.verify();
    match args.output {
        Output::Text => verdict::text(&outcome, &found, out)?,
        Output::Json => verdict::json(&outcome, &found, out)?,
    }
    if args.keep && args.output == Output::Text {
        writeln!(
            out,
            "\nthe link is kept: try `shmesh ls`, `shmesh dump {name} --payload 32`, `shmesh rm {name}`"
        )?;
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A progress bar on a terminal; hidden if standard error is redirected.
fn progress(seconds: f64) -> ProgressBar {
    let bar = ProgressBar::new(millis(Duration::from_secs_f64(seconds)));
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {msg}") {
        bar.set_style(style);
    }
    bar
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The state of a running demo.
struct Demo<'a> {
    args: &'a Args,
    session: &'a ProcessGroup,
    name: &'a LinkName,
    bar: &'a ProgressBar,
    begin: Instant,
}

/// Waits for one kind of report and refuses others.
macro_rules! expect {
    ($stage:expr, $child:expr, $pattern:pat => $value:expr) => {
        match $stage.hear($child)? {
            $pattern => $value,
            other => anyhow::bail!("unexpected report of a side: {other:?}"),
        }
    };
}

impl Demo<'_> {
    fn tick(&self) {
        self.bar.set_position(millis(self.begin.elapsed()));
    }

    fn hear(&self, child: &Child) -> Result<SideReport> {
        let limit = Duration::from_secs_f64(self.args.seconds) + GRACE;
        child.says(self.begin + limit, || self.tick())
    }

    fn spawn(&self, spec: &SideSpec, ledger: Option<&File>) -> Result<Child> {
        let stdin = match ledger {
            Some(file) => Stdio::from(file.try_clone().context("cannot share the ledger")?),
            None => Stdio::null(),
        };
        self.session.spawn("demo-side", spec, stdin)
    }

    fn play(&self) -> Result<DemoReport> {
        let args = self.args;
        let kills_primary = args.kill == Victim::Primary;
        let stream_seconds = args.seconds * STREAM_SHARE;
        let spec = |primary: bool| SideSpec {
            dir: args.dir.dir.clone(),
            name: self.name.to_string(),
            config: args.config.as_ref().map(|path| (path.clone(), args.link.clone())),
            primary,
            generation: 1,
            trip_seconds: Some(args.seconds * TRIPS_SHARE),
            stream_seconds,
            ledger: primary == kills_primary,
            abandon: args.keep,
        };
        let ledger = ledger()?;
        let given = |primary: bool| (primary == kills_primary).then_some(&ledger);

        self.bar.set_message("two processes attach");
        let primary = self.spawn(&spec(true), given(true))?;
        expect!(self, &primary, SideReport::Attached => ());
        let secondary = self.spawn(&spec(false), given(false))?;
        expect!(self, &secondary, SideReport::Attached => ());
        let link = self.describe();

        self.bar.set_message("round trips");
        let trips: Vec<Trips> = expect!(self, &primary, SideReport::Trips(trips) => trips);
        expect!(self, &primary, SideReport::Streaming => ());
        expect!(self, &secondary, SideReport::Streaming => ());
        self.bar.set_message("messages both ways, every byte checked");
        expect!(self, &primary, SideReport::First => ());
        expect!(self, &secondary, SideReport::First => ());
        let stream_begin = Instant::now();
        let half = stream_begin + Duration::from_secs_f64(stream_seconds / 2.0);
        while Instant::now() < half {
            std::thread::sleep(Duration::from_millis(20).min(half.saturating_duration_since(Instant::now())));
            self.tick();
        }

        let (victim, survivor) = if kills_primary { (primary, secondary) } else { (secondary, primary) };
        let again = SideSpec {
            generation: 2,
            trip_seconds: None,
            stream_seconds: stream_seconds / 2.0,
            ledger: false,
            ..spec(kills_primary)
        };
        let (crash, successor) = self.crash(victim, &again, &ledger, stream_begin)?;
        self.bar.set_message("messages flow again");
        let new: SideResult = expect!(self, &successor, SideReport::Done(done) => done);
        let old: SideResult = expect!(self, &survivor, SideReport::Done(done) => done);
        let deadline = Instant::now() + GRACE;
        successor.join(deadline)?;
        survivor.join(deadline)?;
        let left_behind = self.left_behind()?;
        Ok(DemoReport { link, trips, crash, survivor: old, successor: new, left_behind, kept: args.keep })
    }

    /// Kills the victim, waits until its buffers are recovered, and starts its successor.
    fn crash(
        &self,
        mut victim: Child,
        again: &SideSpec,
        ledger: &File,
        began: Instant,
    ) -> Result<(Crash, Child)> {
        self.bar.set_message("one process is killed");
        let pid = victim.pid();
        // It is stopped while the link is inspected, at whatever instruction it was, and never runs again.
        victim.stop()?;
        let after_seconds = began.elapsed().as_secs_f64();
        let held = self.in_hands_of(pid);
        victim.kill();
        let died = Instant::now();
        drop(victim);
        let mut recovered_ms = None;
        while held.is_some() && recovered_ms.is_none() && died.elapsed() < Duration::from_secs(5) {
            match self.in_hands_of(pid) {
                None => recovered_ms = Some(died.elapsed().as_secs_f64() * 1e3),
                Some(_) => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        let (sent, taken) = accounts(ledger)?;
        self.bar.set_message("another process takes its place");
        let start = Instant::now();
        let successor = self.spawn(again, None)?;
        expect!(self, &successor, SideReport::Attached => ());
        let attached_ms = start.elapsed().as_secs_f64() * 1e3;
        expect!(self, &successor, SideReport::Streaming => ());
        expect!(self, &successor, SideReport::First => ());
        let first_ms = start.elapsed().as_secs_f64() * 1e3;
        let side = if again.primary { "primary" } else { "secondary" }.to_owned();
        let successor_pid = successor.pid();
        let crash = Crash {
            side,
            pid,
            sent,
            taken,
            after_seconds,
            held,
            recovered_ms,
            successor: successor_pid,
            attached_ms,
            first_ms,
        };
        Ok((crash, successor))
    }

    /// The buffers that a process holds. `None` if it has no seat any more, or the link cannot be inspected.
    fn in_hands_of(&self, pid: u32) -> Option<InHand> {
        let snapshot = View::open(&self.args.dir.dir, self.name).ok()?.snapshot();
        let seat = snapshot.seats.iter().find(|seat| seat.participant.word.pid() == pid)?.participant.seat;
        let mut held = InHand::default();
        for table in &snapshot.tables {
            let is_data = table.pool.is_some_and(|pool| pool != shmesh::config::PoolId::CpuMsg);
            let of = |wanted: BufferState| table.count(|hand| hand == wanted);
            let unsent = of(BufferState::Loaned(seat))
                + of(BufferState::Borrowed(seat))
                + of(BufferState::Orphaned(Some(seat)));
            if is_data {
                held.data += unsent;
            } else {
                held.loaned += of(BufferState::Loaned(seat));
                held.borrowed += of(BufferState::Borrowed(seat));
                held.queued += of(BufferState::Queued(seat));
            }
        }
        Some(held)
    }

    /// Describes the link in one line.
    fn describe(&self) -> String {
        let dir = self.args.dir.dir.display();
        match View::open(&self.args.dir.dir, self.name) {
            Err(_) => format!("link {} in {dir}", self.name),
            Ok(view) => {
                let pools = view.pools();
                let pools = pools.iter().map(|pool| {
                    format!(
                        "{} {} x {}",
                        pool.pool,
                        pool.pool_len,
                        crate::human::bytes(pool.buf_size_bytes.into())
                    )
                });
                let pools = pools.collect::<Vec<_>>().join(", ");
                let (mode, len) = (crate::ls::mode(&view), view.ring_len());
                let bytes = crate::human::bytes(view.bytes());
                format!("link {} in {dir}: ring {mode} {len}, {pools}; {bytes}", self.name)
            }
        }
    }

    /// Files of the link that still exist.
    fn left_behind(&self) -> Result<Vec<String>> {
        let (dir, name) = (&self.args.dir.dir, self.name.as_str());
        let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names
            .filter(|file| file.strip_prefix(name).is_some_and(|rest| rest.starts_with(['_', '.'])))
            .collect())
    }
}

/// A memfd with two counts, which outlives the process that writes them.
fn ledger() -> Result<File> {
    let file = shmesh_sys::file::memfd("shmesh-demo-ledger", false).context("cannot make a memfd")?;
    file.set_len(16).context("cannot size a memfd")?;
    Ok(file)
}

fn accounts(ledger: &File) -> Result<(u64, u64)> {
    use std::os::unix::fs::FileExt;
    let mut words = [[0; 8]; 2];
    for (word, at) in words.iter_mut().zip([0, 8]) {
        ledger.read_exact_at(word, at).context("cannot read the ledger")?;
    }
    Ok((u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])))
}
