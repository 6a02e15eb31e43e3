//! `shmesh talk`: one side of an existing link, to try out two pods, and for tests of a cluster.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use shmesh::config::LinkName;
use shmesh::device::{BareTgid, DeviceKey, ExportFlags, HostMemory, Session};
use shmesh::{Link, LinkOptions, Side};
use shmesh_sys::signal::{Awaited, Signal};

use crate::args::{Dir, seconds};

const EXAMPLES: &str = "\
Sends numbered messages and counts the other side's. Run one process per side, in two containers or two pods. Lost and
duplicate messages are reported, and the exit status is then 1. A restarted process starts a new count.

With --region the primary exports memory as a fake device, admits every process that asks, and hands out the key; the secondary
imports and reads it. This needs a sidecar. With --ask-for the secondary has another process admitted and tries the key
itself: it succeeds only if it is refused. With --service-account the primary admits a service account instead of processes,
and --refused succeeds in the secondary only if it is refused.

Examples:
  shmesh talk fronthaul --side primary
  shmesh talk fronthaul --side secondary --seconds 10
  shmesh talk fronthaul --side primary --region
  shmesh talk fronthaul --side primary --region --service-account radio/mac

The command waits for the link and runs until SIGTERM or SIGINT.";

/// Message id of numbered messages.
const COUNT: i32 = 1;
/// Message id of a request for the region, with the process of the secondary.
const WANTS: i32 = 2;
/// Message id of the region's key, after the process id that it is for.
const KEY: i32 = 3;
/// Time between two lines of output.
const LINE: Duration = Duration::from_secs(5);
/// Time until the first line of output.
const FIRST_LINE: Duration = Duration::from_secs(1);
/// Size of the region in bytes.
const REGION: u64 = 1 << 20;

/// The options of `shmesh talk`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the link
    #[arg(value_name = "LINK")]
    link: LinkName,
    /// Side of the link to attach to
    #[arg(long, value_name = "SIDE")]
    side: SideName,
    /// Milliseconds between two messages
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    every_ms: u32,
    /// Exit after this many seconds, with failure if nothing was received; default: run until a signal
    #[arg(long, value_name = "N", value_parser = seconds)]
    seconds: Option<f64>,
    /// Seconds to wait for the link
    #[arg(long, value_name = "N", default_value_t = 60.0, value_parser = seconds)]
    wait_seconds: f64,
    /// For tests and demonstrations: export ordinary memory as if it were a device's (primary), or import and read it (secondary)
    #[arg(long)]
    region: bool,
    /// For tests, on the secondary with --region: have this process of the node admitted instead, and expect a refusal
    #[arg(long, value_name = "PID", requires = "region", value_parser = clap::value_parser!(i32).range(1..))]
    ask_for: Option<i32>,
    /// For tests, on the primary with --region: admit this service account, and no process that asks
    #[arg(long, value_name = "NAMESPACE/NAME", requires = "region")]
    service_account: Option<String>,
    /// For tests, on the secondary with --region: expect a refusal
    #[arg(long, requires = "region")]
    refused: bool,
    #[command(flatten)]
    dir: Dir,
}

/// A side, as given on the command line.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum SideName {
    /// The side that creates the link
    Primary,
    /// The side that attaches to it
    Secondary,
}

/// Exchanges messages until a signal or the end of the time.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<()> {
    let told = signals()?;
    let side = if args.side == SideName::Primary { Side::Primary } else { Side::Secondary };
    let options = LinkOptions::new().dir(&args.dir.dir).timeout(Duration::from_secs_f64(args.wait_seconds));
    let link = options.attach(args.link.as_str(), side)?;
    writeln!(out, "attached to {} as {side:?}, seat {}", link.name(), link.seat().value())?;
    out.flush()?;
    let lending = args.region.then(|| RegionExchange::new(args)).transpose()?;
    let end = args.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let mut talk = Talk { link: &link, me: incarnation(), sent: 0, heard: Heard::default(), lending };
    talk.go_on(args, &told, end, out)?;
    let Heard { received, wrong, .. } = talk.heard;
    writeln!(out, "ended: sent {}, received {received}, lost or duplicate {wrong}", talk.sent)?;
    if wrong > 0 {
        bail!("{wrong} messages were lost or duplicated");
    }
    if end.is_some() && received == 0 {
        bail!("no message was received: does `shmesh talk {}` run on the other side?", args.link);
    }
    Ok(())
}

/// A number that identifies this run of the sender: a restarted sender has another one.
fn incarnation() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos() & u128::from(u64::MAX)).unwrap_or(0) ^ u64::from(std::process::id())
}

/// Waits for signals explicitly: the first process of a container gets no signals that it does not handle.
pub(crate) fn signals() -> Result<Receiver<()>> {
    let asked = Awaited::block(&[Signal::Interrupt, Signal::Terminate]).context("cannot block signals")?;
    let (ended, is_ended) = channel();
    let wait = move || {
        let _ = asked.wait().map(|_| ended.send(()));
        // A second signal ends the process even if it is blocked elsewhere, such as on the reader of a pipe.
        let _ = asked.wait().map(|signal| std::process::exit(128 + signal));
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread")?;
    Ok(is_ended)
}

/// The messages received from each sender.
#[derive(Debug, Default)]
struct Heard {
    next: BTreeMap<u64, u64>,
    received: u64,
    wrong: u64,
}

impl Heard {
    fn note(&mut self, from: u64, number: u64) {
        // Messages from before this process attached do not count.
        let next = self.next.entry(from).or_insert(number);
        self.wrong += next.abs_diff(number);
        *next = number + 1;
        self.received += 1;
    }
}

struct Talk<'a> {
    link: &'a Link,
    me: u64,
    sent: u64,
    heard: Heard,
    lending: Option<RegionExchange>,
}

impl Talk<'_> {
    fn go_on(
        &mut self,
        args: &Args,
        told: &Receiver<()>,
        end: Option<Instant>,
        out: &mut dyn Write,
    ) -> Result<()> {
        let every = Duration::from_millis(args.every_ms.into());
        let (mut next, mut line) = (Instant::now(), Instant::now() + FIRST_LINE);
        let is_over = |talk: &Self| talk.lending.as_ref().is_some_and(|lending| lending.is_refused);
        let is_time = || end.is_none_or(|end| Instant::now() < end);
        while told.try_recv() == Err(TryRecvError::Empty) && is_time() && !is_over(self) {
            let now = Instant::now();
            if now >= next {
                self.send()?;
                next = now + every;
            }
            if now >= line {
                let Heard { received, wrong, .. } = self.heard;
                writeln!(out, "sent {}, received {received}, lost or duplicate {wrong}", self.sent)?;
                out.flush()?;
                line = now + LINE;
            }
            self.link.wait(Some(next.saturating_duration_since(now)))?;
            while self.receive(out)?.is_continue() {}
        }
        Ok(())
    }

    /// Sends the next number. If there is no room, the same number is sent the next time, so nothing is lost while the
    /// other side is away.
    fn send(&mut self) -> Result<()> {
        if let Some(lending) = &mut self.lending {
            lending.ask(self.link)?;
        }
        let bytes = [self.me.to_le_bytes(), self.sent.to_le_bytes()].concat();
        match self.link.send_inline(COUNT, 0, &bytes) {
            Ok(()) => {
                self.sent += 1;
                Ok(self.link.notify()?)
            }
            Err(error) if matches!(error.kind(), shmesh::ErrorKind::Full { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn receive(&mut self, out: &mut dyn Write) -> Result<ControlFlow<()>> {
        let Some(message) = self.link.receive()? else { return Ok(ControlFlow::Break(())) };
        let numbers = |at: usize| Some(u64::from_le_bytes(message.msg().get(at..at + 8)?.try_into().ok()?));
        match (message.msg_id(), &mut self.lending) {
            (COUNT, _) => {
                if let (Some(from), Some(number)) = (numbers(0), numbers(8)) {
                    self.heard.note(from, number);
                }
            }
            (WANTS, Some(lending)) => {
                let Some(tgid) = numbers(0) else { return Ok(ControlFlow::Continue(())) };
                drop(message);
                lending.lend(self.link, tgid, out)?;
            }
            (KEY, Some(lending)) => {
                // A key for an earlier process is ignored.
                let is_asked = numbers(0).is_some_and(|who| lending.asked == Some(who));
                let key = message.msg().get(8..).filter(|_| is_asked).and_then(DeviceKey::from_wild);
                drop(message);
                lending.read(key, out)?;
            }
            // A message of another program, or of `shmesh talk` with other flags.
            _ => {}
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// The exchange of a memory region: one side exports it, the other reads it.
struct RegionExchange {
    session: Session<HostMemory>,
    key: Option<DeviceKey>,
    /// Whether the secondary still asks for the key.
    wants: bool,
    /// The process to admit instead of this one.
    ask_for: Option<i32>,
    /// Whether a service account is admitted, and no process.
    is_for_account: bool,
    /// Whether the import must be refused.
    must_be_refused: bool,
    /// The process that the key was requested for.
    asked: Option<u64>,
    /// Whether the import was refused, as expected.
    is_refused: bool,
}

fn byte(at: usize) -> u8 {
    u8::try_from(at % 251).unwrap_or(0)
}

impl RegionExchange {
    fn new(args: &Args) -> Result<Self> {
        let mut session = Session::connect(&args.dir.dir, args.link.as_str())?;
        if args.side == SideName::Secondary {
            return Ok(Self {
                session,
                key: None,
                wants: true,
                ask_for: args.ask_for,
                is_for_account: false,
                must_be_refused: args.refused || args.ask_for.is_some(),
                asked: None,
                is_refused: false,
            });
        }
        let memory = HostMemory::new(REGION)?;
        let bytes: Vec<u8> = (0..usize::try_from(REGION)?).map(byte).collect();
        memory.write_at(0, &bytes)?;
        let key = session.export_key(memory, ExportFlags::DEFAULT)?;
        if let Some(account) = &args.service_account {
            session.admit(&key, &[], &[account])?;
        }
        Ok(Self {
            session,
            key: Some(key),
            wants: false,
            ask_for: None,
            is_for_account: args.service_account.is_some(),
            must_be_refused: false,
            asked: None,
            is_refused: false,
        })
    }

    fn ask(&mut self, link: &Link) -> Result<()> {
        if !self.wants {
            return Ok(());
        }
        let who = match self.ask_for {
            Some(other) => other,
            None => self.session.bare_tgid()?.0,
        };
        let who = u64::try_from(who).unwrap_or(0);
        self.asked = Some(who);
        match link.send_inline(WANTS, 0, &who.to_le_bytes()) {
            Ok(()) => Ok(()),
            Err(error) if matches!(error.kind(), shmesh::ErrorKind::Full { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn lend(&mut self, link: &Link, tgid: u64, out: &mut dyn Write) -> Result<()> {
        let Some(key) = &self.key else { return Ok(()) };
        let Ok(tgid) = i32::try_from(tgid) else { return Ok(()) };
        if !self.is_for_account {
            self.session.set_import_pid(key, &[BareTgid(tgid)])?;
        }
        let mut loan = link.loan()?;
        let answer = [&u64::from(tgid.unsigned_abs()).to_le_bytes(), &key.as_bytes()[..]].concat();
        loan.resize_msg(answer.len())?.copy_from_slice(&answer);
        loan.with_msg_id(KEY).send().map_err(shmesh::Error::from)?;
        link.notify()?;
        if self.is_for_account {
            writeln!(out, "sent the key of {REGION} bytes to process {tgid}")?;
        } else {
            writeln!(out, "admitted process {tgid} to {REGION} bytes")?;
        }
        Ok(out.flush()?)
    }

    fn read(&mut self, key: Option<DeviceKey>, out: &mut dyn Write) -> Result<()> {
        let Some(key) = key.filter(|_| self.wants) else { return Ok(()) };
        let whose = match self.ask_for {
            Some(other) => format!("for process {other}"),
            None => "not for this process".to_owned(),
        };
        let memory = match (self.session.import_by_key(&key), self.must_be_refused) {
            (Err(error), true) if matches!(error.kind(), shmesh::ErrorKind::Denied { .. }) => {
                (self.wants, self.is_refused) = (false, true);
                writeln!(out, "refused: the key is {whose}")?;
                return Ok(out.flush()?);
            }
            (Ok(_), true) => bail!("the import succeeded, although the key is {whose}"),
            (imported, _) => imported?,
        };
        let mut bytes = vec![0; usize::try_from(REGION)?];
        memory.read_at(0, &mut bytes)?;
        if let Some(at) = bytes.iter().enumerate().position(|(at, found)| *found != byte(at)) {
            bail!("the imported region differs from the exported one at byte {at}");
        }
        drop(memory);
        self.session.close(&key)?;
        self.wants = false;
        writeln!(out, "read {REGION} bytes of the other side's region; all are as written")?;
        Ok(out.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_duplicate_messages_are_counted_per_sender() {
        let mut heard = Heard::default();
        for (from, number) in [(1, 7), (1, 8), (2, 0), (1, 11), (2, 0), (2, 1)] {
            heard.note(from, number);
        }
        assert_eq!((heard.received, heard.wrong), (6, 3));
    }
}
