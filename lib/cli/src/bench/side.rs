//! One side of a benchmark, in a process of its own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use shmesh::config::{LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::{INLINE_MAX_BYTES, Link, LinkOptions, Loan, Message, Side};
use shmesh_sys::poll::{self, Watch};

use super::measure::{Dist, Rx, Tx, consume, echo, ping, produce};
use super::{floor, payload};
use crate::child::{die_with_parent, say};

/// How a message travels.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) enum PayloadForm {
    /// Inside the ring: up to 112 bytes
    Inline,
    /// In a MSG buffer
    Pooled,
    /// 8 bytes in a MSG buffer, the payload in a DATA buffer
    Data,
}

/// How a receiver waits.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) enum WaitMode {
    /// `receive()` again and again
    Poll,
    /// `wait()`, which spins for a while and then sleeps; senders notify
    Spin,
    /// `wait()` with `spin_us: 0`: it sleeps unless the answer comes within a few polls; senders notify
    Futex,
    /// poll(2) on the link's descriptor, as an event loop does: it sleeps each time; senders notify
    Fd,
}

/// How many producers and consumers a ring has.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) enum RingModeArg {
    /// One producer and one consumer
    Spsc,
    /// Any number of each
    Mpmc,
    /// One writer, and as many readers as --readers says, each of which gets every message
    Broadcast,
}

/// The quantity that a test measures.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) enum Metric {
    /// A round trip of one message
    Rtt,
    /// A stream in one direction
    Oneway,
}

/// One test, as passed to each of its sides.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SideSpec {
    pub(super) dir: PathBuf,
    pub(super) name: String,
    pub(super) metric: Metric,
    pub(super) form: PayloadForm,
    pub(super) bytes: usize,
    pub(super) mode: RingModeArg,
    pub(super) wait: WaitMode,
    pub(super) batch: usize,
    /// Processes of the secondary side; several only with a broadcast ring.
    pub(super) readers: usize,
    /// Whether readers share cores: then a reader without a message yields its core to another.
    pub(super) shares_core: bool,
    pub(super) seconds: f64,
    pub(super) core: usize,
    pub(super) primary: bool,
}

/// From this size on, a message is bulk: percentiles are over 16 messages, and 16 are in flight.
const BULK_BYTES: usize = 16 << 10;

impl SideSpec {
    pub(super) fn is_bulk(&self) -> bool {
        self.bytes >= BULK_BYTES
    }

    /// Messages per percentile, and slots of the ring, as in `lib/comparison`.
    fn depth(&self) -> (u64, u32) {
        if self.is_bulk() { (16, 16) } else { (1024, 1024) }
    }

    fn config(&self) -> Result<LinkConfig> {
        let mut config = LinkConfig::new(self.name.parse()?);
        let (_, ring_len) = self.depth();
        config.ring_len = ring_len;
        config.ring_mode = mode(self.mode);
        config.spin_us = if self.wait == WaitMode::Futex { 0 } else { config.spin_us };
        let bytes = u32::try_from(self.bytes).context("a payload is too large")?;
        // Twice the ring: buffers that one side has loaned and the other has received, besides the queued ones.
        let pool = |buf_size_bytes| PoolConfig { buf_size_bytes, pool_len: 2 * ring_len };
        config.pools = [PoolConfig::DISABLED; PoolId::COUNT];
        config.pools[PoolId::CpuMsg.index()] =
            pool(if self.form == PayloadForm::Pooled { bytes } else { 64 });
        if self.form == PayloadForm::Data {
            config.pools[PoolId::CpuData.index()] = pool(bytes);
        }
        Ok(config)
    }
}

/// The library's name for the ring mode.
pub(super) fn mode(mode: RingModeArg) -> RingMode {
    match mode {
        RingModeArg::Spsc => RingMode::Spsc,
        RingModeArg::Mpmc => RingMode::Mpmc,
        RingModeArg::Broadcast => RingMode::Broadcast,
    }
}

/// Runs one side and prints its measurements.
pub(super) fn run(spec: &SideSpec) -> Result<()> {
    die_with_parent()?;
    floor::pin(spec.core)?;
    let options = LinkOptions::new().dir(&spec.dir).timeout(Duration::from_secs(10));
    let link = if spec.primary {
        options.create(&spec.config()?)?
    } else {
        options.attach(&spec.name, Side::Secondary)?
    };
    if spec.wait == WaitMode::Fd {
        // From here on, each notification makes the descriptor readable.
        link.fd()?;
    }
    // Each process that attaches sends a message, and the creator waits for all of them.
    if spec.primary {
        for _ in 0..spec.readers {
            while link.receive()?.is_none() {
                std::thread::yield_now();
            }
        }
    } else {
        link.send_inline(0, 0, &[])?;
    }
    let dist = match spec.form {
        PayloadForm::Inline => waiting::<{ INLINE }>(&link, spec),
        PayloadForm::Pooled => waiting::<{ POOLED }>(&link, spec),
        PayloadForm::Data => waiting::<{ DATA }>(&link, spec),
    }?;
    drop(link);
    say(&dist)
}

type InlineBytes = [u8; INLINE_MAX_BYTES];

const INLINE: u8 = 0;
const POOLED: u8 = 1;
const DATA: u8 = 2;

const POLL: u8 = 0;
const WAIT: u8 = 1;
const FD: u8 = 2;
const YIELD: u8 = 3;

fn waiting<const FORM: u8>(link: &Link, spec: &SideSpec) -> Result<Option<Dist>> {
    match spec.wait {
        WaitMode::Poll if spec.shares_core && !spec.primary => drive::<FORM, { YIELD }>(link, spec),
        WaitMode::Poll => drive::<FORM, { POLL }>(link, spec),
        WaitMode::Spin | WaitMode::Futex => drive::<FORM, { WAIT }>(link, spec),
        WaitMode::Fd => drive::<FORM, { FD }>(link, spec),
    }
}

/// Waits for a message in the requested way.
#[inline(always)]
fn wait<const HOW: u8>(link: &Link) -> Result<()> {
    match HOW {
        POLL => {}
        YIELD => std::thread::yield_now(),
        WAIT => {
            link.wait(None)?;
        }
        _ => {
            // An interrupted poll returns nothing, and the caller retries.
            let _ = poll::wait_once(&mut [Watch::readable(&link.fd()?)], None);
            link.take_signal()?;
        }
    }
    Ok(())
}

fn drive<const FORM: u8, const HOW: u8>(link: &Link, spec: &SideSpec) -> Result<Option<Dist>> {
    let (seconds, (batch, _)) = (spec.seconds, spec.depth());
    if spec.batch > 1 {
        let mut tx = BatchTx::<FORM, HOW> {
            link,
            bytes: spec.bytes,
            batch: spec.batch,
            buffer: [0; INLINE_MAX_BYTES],
            loans: Vec::new(),
            unnoticed: 0,
        };
        let mut rx = BatchRx::<FORM, HOW> { link, batch: spec.batch, messages: Vec::new() };
        return match spec.primary {
            true => produce(seconds, &mut tx, batch).map(|()| None),
            false => consume(seconds, &mut rx, batch).map(Some),
        };
    }
    let mut tx = OneTx::<FORM, HOW> { link, bytes: spec.bytes, buffer: [0; INLINE_MAX_BYTES] };
    let mut rx = OneRx::<FORM, HOW> { link };
    match (spec.metric, spec.primary) {
        (Metric::Rtt, true) if spec.readers > 1 => {
            ping(seconds, &mut tx, &mut AllAnswers { rx, readers: spec.readers }).map(Some)
        }
        (Metric::Rtt, true) => ping(seconds, &mut tx, &mut rx).map(Some),
        (Metric::Rtt, false) => echo(&mut tx, &mut rx).map(|()| None),
        (Metric::Oneway, true) => produce(seconds, &mut tx, batch).map(|()| None),
        (Metric::Oneway, false) => consume(seconds, &mut rx, batch).map(Some),
    }
}

/// Loans and fills a message; retries while there is no room.
#[inline(always)]
fn loan<const FORM: u8>(link: &Link, bytes: usize, word: u64) -> Result<Option<Loan<'_>>> {
    let loan = if FORM == DATA { link.loan_with(PoolId::CpuData) } else { link.loan() };
    let mut loan = match loan {
        Ok(loan) => loan,
        Err(error) if error.is_retryable() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if FORM == DATA {
        payload::fill(loan.resize_msg(8)?, word);
        payload::fill(loan.resize_data(bytes)?, word);
    } else {
        payload::fill(loan.resize_msg(bytes)?, word);
    }
    Ok(Some(loan))
}

#[inline(always)]
fn send_inline(link: &Link, buffer: &mut InlineBytes, bytes: usize, word: u64) -> Result<()> {
    let Some(message) = buffer.get_mut(..bytes) else {
        bail!("{bytes} bytes are too long for an inline message")
    };
    payload::fill(message, word);
    loop {
        match link.send_inline(1, 0, message) {
            Ok(()) => return Ok(()),
            Err(error) if error.is_retryable() => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[inline(always)]
fn read<const FORM: u8>(message: &Message<'_>) -> Result<u64> {
    let word = payload::read(if FORM == DATA { message.data() } else { message.msg() });
    if FORM == DATA && payload::read(message.msg()) != word {
        bail!("the two parts of a message differ");
    }
    word.context("a payload was damaged in flight")
}

/// Messages sent one by one.
struct OneTx<'a, const FORM: u8, const HOW: u8> {
    link: &'a Link,
    bytes: usize,
    /// The buffer in which inline messages are written.
    buffer: InlineBytes,
}

impl<const FORM: u8, const HOW: u8> Tx for OneTx<'_, FORM, HOW> {
    #[inline(always)]
    fn send(&mut self, word: u64) -> Result<()> {
        if FORM == INLINE {
            send_inline(self.link, &mut self.buffer, self.bytes, word)?;
        } else {
            let mut filled = loop {
                if let Some(loan) = loan::<FORM>(self.link, self.bytes, word)? {
                    break loan;
                }
            };
            while let Err(failed) = filled.send() {
                if !failed.error.is_retryable() {
                    return Err(failed.error.into());
                }
                filled = failed.loan;
            }
        }
        if HOW != POLL && HOW != YIELD {
            self.link.notify()?;
        }
        Ok(())
    }
}

/// Messages received one by one.
struct OneRx<'a, const FORM: u8, const HOW: u8> {
    link: &'a Link,
}

impl<const FORM: u8, const HOW: u8> Rx for OneRx<'_, FORM, HOW> {
    #[inline(always)]
    fn recv(&mut self) -> Result<u64> {
        loop {
            if let Some(message) = self.link.receive()? {
                return read::<FORM>(&message);
            }
            wait::<HOW>(self.link)?;
        }
    }
}

/// The answers of all readers, which must be equal.
struct AllAnswers<'a, const FORM: u8, const HOW: u8> {
    rx: OneRx<'a, FORM, HOW>,
    readers: usize,
}

impl<const FORM: u8, const HOW: u8> Rx for AllAnswers<'_, FORM, HOW> {
    #[inline(always)]
    fn recv(&mut self) -> Result<u64> {
        let word = self.rx.recv()?;
        for _ in 1..self.readers {
            ensure!(self.rx.recv()? == word, "the answers of two readers differ");
        }
        Ok(word)
    }
}

/// Messages sent in batches, each with one notification. Inline messages have no batch call, so only notifications are
/// saved.
struct BatchTx<'a, const FORM: u8, const HOW: u8> {
    link: &'a Link,
    bytes: usize,
    batch: usize,
    buffer: InlineBytes,
    loans: Vec<Loan<'a>>,
    unnoticed: usize,
}

impl<const FORM: u8, const HOW: u8> BatchTx<'_, FORM, HOW> {
    #[inline(always)]
    fn flush(&mut self) -> Result<()> {
        while !self.loans.is_empty() {
            match self.link.send_batch(&mut self.loans) {
                Ok(_) => {}
                Err(error) if error.is_retryable() => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.unnoticed = 0;
        if HOW != POLL && HOW != YIELD {
            self.link.notify()?;
        }
        Ok(())
    }
}

impl<const FORM: u8, const HOW: u8> Tx for BatchTx<'_, FORM, HOW> {
    #[inline(always)]
    fn send(&mut self, word: u64) -> Result<()> {
        if FORM == INLINE {
            send_inline(self.link, &mut self.buffer, self.bytes, word)?;
        } else {
            loop {
                if let Some(loan) = loan::<FORM>(self.link, self.bytes, word)? {
                    self.loans.push(loan);
                    break;
                }
                // The pool is empty: send the loaned messages.
                self.flush()?;
            }
        }
        self.unnoticed += 1;
        if self.unnoticed >= self.batch || word == super::measure::STOP { self.flush() } else { Ok(()) }
    }
}

/// Messages received in batches.
struct BatchRx<'a, const FORM: u8, const HOW: u8> {
    link: &'a Link,
    batch: usize,
    /// Received messages, the oldest last.
    messages: Vec<Message<'a>>,
}

impl<const FORM: u8, const HOW: u8> Rx for BatchRx<'_, FORM, HOW> {
    #[inline(always)]
    fn recv(&mut self) -> Result<u64> {
        loop {
            if let Some(message) = self.messages.pop() {
                return read::<FORM>(&message);
            }
            if self.link.receive_batch(&mut self.messages, self.batch)? > 0 {
                self.messages.reverse();
            } else {
                wait::<HOW>(self.link)?;
            }
        }
    }
}
