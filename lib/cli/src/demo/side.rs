//! One side of the demo, in a process of its own.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use shmesh::config::{LinkConfig, LinkName};
use shmesh::{Link, LinkOptions, Message, Side};

use super::pattern::{FINISHED, Forms, MessageForm, PreparedMessage, Stamp, check, prepare, stamp_of};
use crate::Refusal;
use crate::child::{die_with_parent, say};

/// The task of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SideSpec {
    pub(super) dir: PathBuf,
    pub(super) name: String,
    /// The configuration file, and the name of a link in it.
    pub(super) config: Option<(PathBuf, Option<String>)>,
    pub(super) primary: bool,
    /// 1 for the first process of this side, 2 for its successor after the crash.
    pub(super) generation: u16,
    /// How long to time each kind of round trip; `None` to start the stream at once.
    pub(super) trip_seconds: Option<f64>,
    pub(super) stream_seconds: f64,
    /// Write the ledger to standard input.
    pub(super) ledger: bool,
    /// Leave messages in the link and exit without detaching, as after a crash.
    pub(super) abandon: bool,
}

/// A report of a side to the demo.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum SideReport {
    /// The side has attached to the link.
    Attached,
    /// Round trips, as the primary timed them.
    Trips(Vec<Trips>),
    /// The stream of messages begins.
    Streaming,
    /// The first message was received.
    First,
    /// The stream is over.
    Done(SideResult),
}

/// Round trips of one form.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Trips {
    pub(super) what: String,
    pub(super) trips: u64,
    pub(super) p50_ns: f64,
    pub(super) p99_ns: f64,
    pub(super) p999_ns: f64,
}

/// The messages received from one process of the other side.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Came {
    pub(super) generation: u16,
    /// Number of the first message; earlier ones were received by another process.
    pub(super) first: u64,
    /// One more than the number of the last message.
    pub(super) end: u64,
    pub(super) bytes: u64,
    /// Seconds from the first to the last message.
    pub(super) seconds: f64,
    /// The number of messages that the sender announced at its end, if it lived until then.
    pub(super) announced: Option<u64>,
}

/// The counts of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SideResult {
    pub(super) sent: u64,
    pub(super) came: Vec<Came>,
    /// Recovered by its own calls of `recover()`: participants, messages, DATA buffers.
    pub(super) recovered: [u32; 3],
}

/// The configuration of the link, under the demo's own name.
pub(super) fn config_of(name: &LinkName, file: Option<&(PathBuf, Option<String>)>) -> Result<LinkConfig> {
    let Some((path, wanted)) = file else { return Ok(LinkConfig::new(name.clone())) };
    let loaded = shmesh::config::from_file(path)?;
    let mut links = loaded.links.into_iter();
    let found = match wanted {
        None => links.next(),
        Some(wanted) => links.find(|link| link.name.as_str() == wanted),
    };
    let missing = || format!("{} has no link {}", path.display(), wanted.as_deref().unwrap_or_default());
    let mut config = found.ok_or_else(|| Refusal::Config(missing()))?;
    config.name = name.clone();
    Ok(config)
}

/// Runs a side to its end.
pub(super) fn run(spec: &SideSpec) -> Result<()> {
    die_with_parent()?;
    let name: LinkName = spec.name.parse()?;
    let config = config_of(&name, spec.config.as_ref())?;
    let options = LinkOptions::new().dir(&spec.dir).timeout(Duration::from_secs(10));
    let link = if spec.primary {
        options.create(&config)?
    } else {
        options.attach(name.as_str(), Side::Secondary)?
    };
    say(&SideReport::Attached)?;
    let forms = Forms::of(&config).context("the MSG buffers are smaller than 8 bytes")?;
    let side = Runner { link: &link, forms, notify: config.notify, spec };
    if let Some(seconds) = spec.trip_seconds {
        if spec.primary { say(&SideReport::Trips(side.ping(seconds)?))? } else { side.echo()? }
    }
    say(&SideReport::Streaming)?;
    let done = side.stream()?;
    if spec.abandon {
        side.leave_messages()?;
        say(&SideReport::Done(done))?;
        // Without detaching, as in a crash.
        std::process::exit(0);
    }
    // Detaches before the report: messages that are left then are left for good.
    drop(link);
    say(&SideReport::Done(done))
}

struct Runner<'a> {
    link: &'a Link,
    forms: Forms,
    notify: bool,
    spec: &'a SideSpec,
}

/// Messages sent or taken before the other direction gets a turn.
const BURST: usize = 16;
/// Number of loans and received messages that a side always holds, so that a crash leaves some.
const IN_HAND: usize = 4;
/// Number of messages that a side leaves behind on request, and how long it waits for room for all but the first.
const LEFT: u64 = 6;
const LEAVING: Duration = Duration::from_secs(2);
/// Interval between two calls of `recover()`.
const RECOVER: Duration = Duration::from_millis(20);

impl<'a> Runner<'a> {
    fn wake(&self) -> Result<()> {
        if self.notify { Ok(self.link.notify()?) } else { Ok(()) }
    }

    fn receive(&self) -> Result<Message<'a>> {
        loop {
            if let Some(message) = self.link.receive()? {
                return Ok(message);
            }
            self.link.wait(Some(Duration::from_millis(100)))?;
        }
    }

    /// Sends a prepared message; returns it if there is no room.
    fn send(&self, prepared: PreparedMessage<'a>) -> Result<Option<PreparedMessage<'a>>> {
        match prepared {
            PreparedMessage::Inline(bytes, len) => match self.link.send_inline(1, 0, &bytes[..len]) {
                Ok(()) => Ok(None),
                Err(error) if error.is_retryable() => Ok(Some(PreparedMessage::Inline(bytes, len))),
                Err(error) => Err(error.into()),
            },
            PreparedMessage::Loan(loan) => match loan.send() {
                Ok(()) => Ok(None),
                Err(failed) if failed.error.is_retryable() => Ok(Some(PreparedMessage::Loan(failed.loan))),
                Err(failed) => Err(failed.error.into()),
            },
        }
    }

    fn send_now(&self, stamp: Stamp, form: MessageForm) -> Result<()> {
        let mut prepared = Some(prepare(self.link, stamp, form)?);
        while let Some(unsent) = prepared.take() {
            prepared = self.send(unsent)?;
        }
        self.wake()
    }

    fn ping(&self, seconds: f64) -> Result<Vec<Trips>> {
        let mut rows = Vec::new();
        let mut number = 0;
        for (what, form) in self.forms.timed() {
            let mut trips = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
            let begin = Instant::now();
            let (warm, end) =
                (begin + Duration::from_secs_f64(seconds / 10.0), begin + Duration::from_secs_f64(seconds));
            loop {
                let stamp = Stamp { generation: self.spec.generation, number };
                number += 1;
                let start = Instant::now();
                self.send_now(stamp, form)?;
                let answer = self.receive()?;
                let stop = Instant::now();
                // Checking is not part of the round trip: the same check on the other side is.
                check(&answer, stamp, form).map_err(|what| anyhow!(what))?;
                if start > warm {
                    trips.saturating_record(u64::try_from((stop - start).as_nanos()).unwrap_or(u64::MAX));
                }
                if stop > end {
                    break;
                }
            }
            let at = |quantile| trips.value_at_quantile(quantile) as f64;
            let (p50_ns, p99_ns, p999_ns) = (at(0.5), at(0.99), at(0.999));
            rows.push(Trips { what, trips: trips.len(), p50_ns, p99_ns, p999_ns });
        }
        // Every round trip was answered, so there is room.
        anyhow::ensure!(self.try_finish(number)?, "the ring is full after {number} answered messages");
        Ok(rows)
    }

    fn echo(&self) -> Result<()> {
        let mut number = 0;
        loop {
            let message = self.receive()?;
            if message.msg_id() == FINISHED {
                return Ok(());
            }
            let stamp = stamp_of(&message).context("a message without a stamp")?;
            let form = form_of(&message);
            if stamp.number != number {
                return Err(anyhow!("received message {}, expected {number}", stamp.number));
            }
            check(&message, stamp, form).map_err(|what| anyhow!(what))?;
            drop(message);
            self.send_now(stamp, form)?;
            number += 1;
        }
    }

    /// Sends the number of messages, if there is room. It goes through the ring, so it comes last.
    fn try_finish(&self, number: u64) -> Result<bool> {
        match self.link.send_inline(FINISHED, 0, &number.to_le_bytes()) {
            Ok(()) => self.wake().map(|()| true),
            Err(error) if error.is_retryable() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Leaves six messages in the ring, or as many as there is room for, and holds one received message and one loan.
    ///
    /// The other side may still have the whole stream to receive, with all the buffers; small pools may never have six.
    fn leave_messages(&self) -> Result<()> {
        let begin = Instant::now();
        let mut left = 0;
        while left < LEFT {
            let stamp = Stamp { generation: self.spec.generation, number: left };
            match self.leave(stamp)? {
                true => left += 1,
                false if begin.elapsed() > if left > 0 { LEAVING } else { super::GRACE } => break,
                false => std::thread::sleep(Duration::from_micros(100)),
            }
        }
        let received = self.link.receive()?;
        std::mem::forget((received, self.link.loan().ok()));
        Ok(())
    }

    fn leave(&self, stamp: Stamp) -> Result<bool> {
        let unsent = match prepare(self.link, stamp, self.forms.streamed(stamp)) {
            Ok(prepared) => self.send(prepared)?,
            Err(error) if error.is_retryable() => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        self.wake()?;
        Ok(unsent.is_none())
    }

    /// Sends and receives at once until the time is over and the other side is done too.
    fn stream(&self) -> Result<SideResult> {
        let begin = Instant::now();
        let end = begin + Duration::from_secs_f64(self.spec.stream_seconds);
        let ledger = self.spec.ledger.then(Ledger::new);
        let mut incoming = Inbox { forms: &self.forms, came: Vec::new(), since: begin };
        let (mut prepared, mut in_hand) = (VecDeque::new(), VecDeque::new());
        let (mut number, mut sent, mut finished, mut idle) = (0, 0, false, false);
        let (mut recovered, mut next_recovery) = ([0; 3], begin + RECOVER);
        while !(finished && incoming.is_over()) {
            let mut moved = 0;
            let time_is_over = Instant::now() >= end;
            while !time_is_over && prepared.len() < IN_HAND + BURST {
                let stamp = Stamp { generation: self.spec.generation, number };
                match prepare(self.link, stamp, self.forms.streamed(stamp)) {
                    Ok(message) => prepared.push_back(message),
                    Err(error) if error.is_retryable() => break,
                    Err(error) => return Err(error.into()),
                }
                number += 1;
            }
            let keep = if time_is_over || idle { 0 } else { IN_HAND };
            while prepared.len() > keep {
                let Some(message) = prepared.pop_front() else { break };
                if let Some(unsent) = self.send(message)? {
                    prepared.push_front(unsent);
                    break;
                }
                sent += 1;
                moved += 1;
                ledger.as_ref().map_or(Ok(()), |ledger| ledger.sent(sent))?;
            }
            if time_is_over && prepared.is_empty() && !finished {
                // Do not wait for room: if both rings are full, only receiving frees some, and the buffers of a dead
                // participant are freed only by recovery.
                finished = self.try_finish(sent)?;
            }
            if moved > 0 {
                self.wake()?;
            }
            for _ in 0..BURST {
                // Messages after the last expected one stay queued, for later inspection of the link.
                if incoming.is_over() {
                    break;
                }
                let Some(message) = self.link.receive()? else { break };
                moved += 1;
                let number = incoming.take(&message)?;
                if let (Some(ledger), Some(number)) = (&ledger, number) {
                    ledger.taken(number + 1)?;
                }
                in_hand.push_back(message);
                if in_hand.len() > IN_HAND {
                    in_hand.pop_front();
                }
            }
            idle = moved == 0;
            if idle {
                // The other side may be waiting for the buffers that this side holds.
                in_hand.pop_front();
                self.link.wait(Some(Duration::from_millis(1)))?;
            }
            if Instant::now() >= next_recovery {
                let found = self.link.recover()?;
                recovered[0] += found.participants;
                recovered[1] += found.messages;
                recovered[2] += found.data_buffers;
                next_recovery = Instant::now() + RECOVER;
            }
        }
        Ok(SideResult { sent, came: incoming.came, recovered })
    }
}

/// The form of a received message.
fn form_of(message: &Message<'_>) -> MessageForm {
    match message.data_pool() {
        Some(pool) => MessageForm::Both(message.msg().len(), pool, message.data().len()),
        None if message.is_inline() => MessageForm::Inline(message.msg().len()),
        None => MessageForm::Pooled(message.msg().len()),
    }
}

/// Checks received messages: each once, in order, every byte.
struct Inbox<'a> {
    forms: &'a Forms,
    came: Vec<Came>,
    /// Time of the first message of the current generation.
    since: Instant,
}

impl Inbox<'_> {
    fn is_over(&self) -> bool {
        self.came.last().is_some_and(|came| came.announced.is_some())
    }

    /// Checks the next message. Returns its number, or `None` for the last message, which has none.
    fn take(&mut self, message: &Message<'_>) -> Result<Option<u64>> {
        if message.msg_id() == FINISHED {
            let sent = message.msg().first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            let sent = sent.context("a last message without a count")?;
            // A participant that attaches after the end receives only the closing message.
            if self.came.is_empty() {
                say(&SideReport::First)?;
                self.came.push(Came { first: sent, end: sent, ..Came::default() });
            }
            if let Some(came) = self.came.last_mut() {
                came.announced = Some(sent);
            }
            return Ok(None);
        }
        let stamp = stamp_of(message).context("a message without a stamp")?;
        let form = self.forms.streamed(stamp);
        check(message, stamp, form).map_err(|what| anyhow!(what))?;
        match self.came.last_mut() {
            Some(came) if came.generation == stamp.generation => {
                if stamp.number != came.end {
                    let what = if stamp.number < came.end { "doubled" } else { "lost" };
                    return Err(anyhow!(
                        "a message was {what}: received number {}, expected {}",
                        stamp.number,
                        came.end
                    ));
                }
                came.end += 1;
                came.bytes += form.bytes();
                came.seconds = self.since.elapsed().as_secs_f64();
            }
            last => {
                // A replacement process starts at 0; an earlier receiver may have received its first messages.
                if last.is_some_and(|last| stamp.generation <= last.generation || stamp.number != 0) {
                    return Err(anyhow!(
                        "message {} of generation {} is out of place",
                        stamp.number,
                        stamp.generation
                    ));
                }
                if self.came.is_empty() {
                    say(&SideReport::First)?;
                }
                self.since = Instant::now();
                self.came.push(Came {
                    generation: stamp.generation,
                    first: stamp.number,
                    end: stamp.number + 1,
                    bytes: form.bytes(),
                    ..Came::default()
                });
            }
        }
        Ok(Some(stamp.number))
    }
}

/// Counts how far a side is, written after each step, so that they survive when it is killed.
struct Ledger(std::io::Stdin);

impl Ledger {
    fn new() -> Self {
        Self(std::io::stdin())
    }

    fn note(&self, at: i64, count: u64) -> Result<()> {
        shmesh_sys::file::write_at(&self.0, &count.to_le_bytes(), at).context("cannot write the ledger")
    }

    fn sent(&self, count: u64) -> Result<()> {
        self.note(0, count)
    }

    fn taken(&self, count: u64) -> Result<()> {
        self.note(8, count)
    }
}
