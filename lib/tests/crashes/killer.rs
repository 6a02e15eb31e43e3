//! Real processes exchange messages on both sides of a link and are killed at random instants, again and again.
//!
//! Each worker writes down, in memory that outlives it, what it is going to send, what it has sent, when it is
//! inside a receiving call, and what it received. So afterwards every message is accounted for: received exactly
//! once, or lost in the hands of a receiver that died in its call; never twice, in order, intact. In the end one
//! process recovers what is left, and all buffers, slots and seats must be there.
//!
//! `SHMESH_KILLS` (1000) says how many kills the long cases have together, `SHMESH_KILL_SEED` (the time) repeats a run's choices.

#![allow(
    clippy::cast_possible_truncation,
    clippy::needless_range_loop,
    reason = "small numbers; two sides side by side"
)]
#![allow(clippy::disallowed_types, reason = "the ledger is words as the machine has them")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use crate::harness::{self, long, quick};
use crate::random::Random;
use crate::shared::Words;
use crate::workers::{self, Workers, from_env, started_with, until_participants};
use nix::sys::signal::Signal;
use shmesh::config::{Backing, LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::{Error, ErrorKind, Link, LinkOptions, Loan, Message, Side};

const NAME: &str = "killed";
const WORKER: &str = "SHMESH_KILLER_WORKER";
/// Workers of one link: the first is the primary.
const WORKERS_MAX: usize = 3;
const RING_LEN: u32 = 16;
const MSG_LEN: u32 = 64;
const DATA_LEN: u32 = 16;
const ROUNDS_BETWEEN_PAUSES: u64 = 8;

pub(crate) const CASES: &[harness::Case] = &[
    quick("killer::mpmc_named_polled", || scenario(0, QUICK_KILLS)),
    quick("killer::spsc_named_polled", || scenario(1, QUICK_KILLS)),
    quick("killer::mpmc_named_notified", || scenario(2, QUICK_KILLS)),
    quick("killer::spsc_memfd_notified", || scenario(3, QUICK_KILLS)),
    quick("killer::mpmc_memfd_notified", || scenario(4, QUICK_KILLS)),
    quick("killer::sender_dies_before_it_rings", sender_dies_before_it_rings),
    long("killer::part_of_a_thousand_kills_mpmc_named_polled", || scenario(0, thousandths(300))),
    long("killer::part_of_a_thousand_kills_spsc_named_polled", || scenario(1, thousandths(300))),
    long("killer::part_of_a_thousand_kills_mpmc_named_notified", || scenario(2, thousandths(100))),
    long("killer::part_of_a_thousand_kills_spsc_memfd_notified", || scenario(3, thousandths(200))),
    long("killer::part_of_a_thousand_kills_mpmc_memfd_notified", || scenario(4, thousandths(100))),
];

const QUICK_KILLS: u64 = 20;
/// In so many kills messages arrive.
const KILLS_WITH_TRAFFIC: u64 = 50;

/// This part of all kills of a long run: the five kinds of links share them.
fn thousandths(part: u64) -> u64 {
    from_env("SHMESH_KILLS").unwrap_or(1_000) * part / 1_000
}

/// The worker that this process is, if it is one.
pub(crate) fn worker() -> Option<Worker> {
    std::env::var(WORKER).ok().map(|worker| Worker::start(&worker))
}

/// Kinds of links, and how many workers each has.
const SCENARIOS: [(RingMode, Backing, bool, usize); 5] = [
    (RingMode::Mpmc, Backing::Named, false, 3),
    (RingMode::Spsc, Backing::Named, false, 2),
    (RingMode::Mpmc, Backing::Named, true, 3),
    (RingMode::Spsc, Backing::Memfd, true, 2),
    (RingMode::Mpmc, Backing::Memfd, true, 3),
];

fn config(scenario: usize) -> LinkConfig {
    let (mode, backing, notify, _) = SCENARIOS[scenario];
    let mut config = LinkConfig::new(NAME.parse().expect("a name"));
    config.ring_mode = mode;
    config.ring_len = RING_LEN;
    config.latency_sample = 2;
    config.backing = backing;
    config.notify = notify;
    config.spin_us = 5;
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 128, pool_len: MSG_LEN };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 256, pool_len: DATA_LEN };
    config
}

/// The words that each worker reports about itself.
const ATTEMPT: usize = 0;
const SENT: usize = 1;
/// How many messages the receiving call may take that is under way.
const IN_CALL: usize = 2;
const BEATS: usize = 3;
const READY: usize = 4;
const LATE_WAKES: usize = 5;
const RETRIES: usize = 6;
const TAKEN: usize = 7;
const WORDS_PER_WORKER: usize = 16;
/// The words by which the parent commands all workers.
const STOP_SENDING: usize = WORKERS_MAX * WORDS_PER_WORKER;
/// Each worker is to die after sending, before it rings.
const SILENT_DEATH: usize = STOP_SENDING + 1;
const COUNTERS: usize = STOP_SENDING + 16;
/// Messages of one worker; how often each was received is one byte.
const MESSAGES_MAX: u64 = 1 << 22;

/// The book that outlives the workers.
struct Ledger(Words);

impl Ledger {
    fn open(path: &Path) -> Self {
        let counters = usize::try_from(MESSAGES_MAX / 8).expect("a size") * WORKERS_MAX;
        Self(Words::in_file(path, COUNTERS + counters))
    }

    fn of(&self, worker: usize, word: usize) -> &std::sync::atomic::AtomicU64 {
        &self.0[worker * WORDS_PER_WORKER + word]
    }

    fn place(worker: usize, sequence: u64) -> (usize, u32) {
        let sequence = usize::try_from(sequence).expect("a count");
        (
            COUNTERS + worker * usize::try_from(MESSAGES_MAX / 8).expect("a size") + sequence / 8,
            (sequence % 8) as u32 * 8,
        )
    }

    fn received(&self, worker: usize, sequence: u64) {
        let (word, shift) = Self::place(worker, sequence);
        self.0[word].fetch_add(1 << shift, SeqCst);
    }

    fn times_received(&self, worker: usize, sequence: u64) -> u64 {
        let (word, shift) = Self::place(worker, sequence);
        self.0[word].load(SeqCst) >> shift & 0xff
    }
}

/// One process under fire.
pub(crate) struct Worker {
    scenario: usize,
    me: usize,
    side: Side,
    dir: PathBuf,
    ledger: Ledger,
    random: Random,
    /// The last sequence number seen of each sender: they only grow.
    last: [u64; WORKERS_MAX],
}

fn side_of(worker: usize) -> Side {
    if worker == 0 { Side::Primary } else { Side::Secondary }
}

/// `sequence 44 | sender 4 | kind 2`, a checksum, and bytes that follow from them.
fn contents(sender: usize, sequence: u64) -> [u8; 32] {
    let first = sequence << 8 | sender as u64;
    let mut bytes = [0; 32];
    for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        let word = if i == 0 {
            first
        } else {
            (first ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
        };
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

impl Worker {
    fn start(arguments: &str) -> Self {
        let ([scenario, me, seed], dir) = started_with(arguments);
        let (scenario, me) = (usize::try_from(scenario).expect("small"), usize::try_from(me).expect("small"));
        Self {
            scenario,
            me,
            side: side_of(me),
            ledger: Ledger::open(&dir.join("ledger")),
            dir,
            random: Random::new(seed),
            last: [0; WORKERS_MAX],
        }
    }

    pub(crate) fn run(mut self) -> u8 {
        match self.work() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("worker {}: {error}", self.me);
                1
            }
        }
    }

    fn beat(&self) {
        self.ledger.of(self.me, BEATS).fetch_add(1, Relaxed);
    }

    fn attach(&self) -> Result<Link, Error> {
        let options = LinkOptions::new().dir(&self.dir).timeout(Duration::from_secs(30));
        let attach = || match self.side {
            Side::Primary => options.create(&config(self.scenario)),
            Side::Secondary => options.attach(NAME, Side::Secondary),
        };
        workers::attached(attach, || {
            self.ledger.of(self.me, RETRIES).fetch_add(1, Relaxed);
        })
    }

    fn work(&mut self) -> Result<(), Error> {
        let link = self.attach()?;
        if self.ledger.0[SILENT_DEATH].load(SeqCst) != 0 {
            // The other side sleeps by now.
            std::thread::sleep(Duration::from_millis(100));
            link.send_inline(0, 0, b"unheard")?;
            let _ = nix::sys::signal::raise(Signal::SIGKILL);
        }
        self.ledger.of(self.me, READY).store(1, SeqCst);
        let notified = SCENARIOS[self.scenario].2;
        let (mut held, mut loans) = (Vec::new(), Vec::new());
        for round in 0_u64.. {
            self.beat();
            for _ in 0..self.random.below(4) {
                self.send(&link, &mut loans)?;
            }
            if notified {
                link.notify()?;
                if self.random.below(4) == 0 {
                    self.sleep(&link)?;
                }
            }
            self.receive(&link, &mut held)?;
            if self.random.below(8) == 0 || held.len() > 4 {
                held.clear();
            }
            if self.random.below(16) == 0 {
                loans.clear();
            }
            // Both cores have other work too.
            if round % ROUNDS_BETWEEN_PAUSES == 0 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn send<'a>(&mut self, link: &'a Link, loans: &mut Vec<Loan<'a>>) -> Result<(), Error> {
        if self.ledger.0[STOP_SENDING].load(Relaxed) != 0 {
            return Ok(());
        }
        let sequence = self.ledger.of(self.me, ATTEMPT).load(Relaxed) + 1;
        if sequence >= MESSAGES_MAX {
            return Ok(());
        }
        let bytes = contents(self.me, sequence);
        // A loan more in the hands, from time to time.
        if self.random.below(8) == 0 && loans.len() < 3 {
            match link.loan_with(PoolId::CpuData) {
                Err(error) if !error.is_retryable() => return Err(error),
                loan => loans.extend(loan),
            }
        }
        let done = match self.random.below(3) {
            0 => {
                self.ledger.of(self.me, ATTEMPT).store(sequence, SeqCst);
                link.send_inline(i32::try_from(self.me).unwrap_or(0), 0, &bytes)
            }
            kind => {
                let loan = if kind == 1 { link.loan() } else { link.loan_with(PoolId::CpuData) };
                loan.and_then(|mut loan| {
                    loan.resize_msg(bytes.len())?.copy_from_slice(&bytes);
                    if kind == 2 {
                        loan.resize_data(200)?.fill(bytes[9]);
                    }
                    self.ledger.of(self.me, ATTEMPT).store(sequence, SeqCst);
                    Ok(loan.send()?)
                })
            }
        };
        match done {
            Ok(()) => self.ledger.of(self.me, SENT).store(sequence, SeqCst),
            // It did not leave: the next one gets its number.
            Err(error) if error.is_retryable() => {
                self.ledger.of(self.me, ATTEMPT).store(sequence - 1, SeqCst);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn sleep(&mut self, link: &Link) -> Result<(), Error> {
        let limit = Duration::from_millis(400);
        let started = Instant::now();
        let woken = link.wait(Some(limit))?;
        // Slept to the end though there was a message for a good part of the time.
        if woken && started.elapsed() > limit / 2 {
            self.ledger.of(self.me, LATE_WAKES).fetch_add(1, Relaxed);
        }
        Ok(())
    }

    fn receive<'a>(&mut self, link: &'a Link, held: &mut Vec<Message<'a>>) -> Result<(), Error> {
        let before = held.len();
        let many = self.random.below(2) == 0;
        self.ledger.of(self.me, IN_CALL).store(if many { 3 } else { 1 }, SeqCst);
        if many {
            link.receive_batch(held, 3)?;
        } else {
            held.extend(link.receive()?);
        }
        for message in &held[before..] {
            let (sender, sequence) = check(message);
            assert!(side_of(sender) != self.side, "a message of the own side");
            assert!(sequence > self.last[sender], "{sequence} of {sender} after {}", self.last[sender]);
            self.last[sender] = sequence;
            self.ledger.received(sender, sequence);
        }
        self.ledger.of(self.me, TAKEN).fetch_add((held.len() - before) as u64, Relaxed);
        self.ledger.of(self.me, IN_CALL).store(0, SeqCst);
        Ok(())
    }
}

/// Sender and sequence number of a message, all of which is as it was written.
fn check(message: &Message<'_>) -> (usize, u64) {
    let first = u64::from_le_bytes(*message.msg().first_chunk().expect("at least 8 bytes"));
    let (sender, sequence) = (usize::try_from(first & 0xff).expect("a byte"), first >> 8);
    assert_eq!(message.msg(), contents(sender, sequence), "{message:?}");
    if message.data_pool().is_some() {
        assert_eq!(message.data().len(), 200, "{message:?}");
        assert!(message.data().iter().all(|&byte| byte == message.msg()[9]), "{message:?}");
    }
    (sender, sequence)
}

/// Processes, and what they may have taken with them.
struct Battlefield {
    scenario: usize,
    dir: tempfile::TempDir,
    ledger: Ledger,
    workers: Workers,
    random: Random,
    /// Messages that died with their receivers, at most, by side.
    in_hands: [u64; 2],
    /// Messages whose senders died in the sending call.
    uncertain: BTreeSet<(usize, u64)>,
}

impl Battlefield {
    fn new(scenario: usize, dir: tempfile::TempDir, workers: usize, seed: u64) -> Self {
        Self {
            scenario,
            ledger: Ledger::open(&dir.path().join("ledger")),
            dir,
            workers: Workers::new(workers),
            random: Random::new(seed),
            in_hands: [0; 2],
            uncertain: BTreeSet::new(),
        }
    }

    fn spawn(&mut self, worker: usize) {
        self.ledger.of(worker, READY).store(0, SeqCst);
        let seed = self.random.next();
        let arguments = format!("{} {worker} {seed} {}", self.scenario, self.dir.path().display());
        self.workers.spawn(worker, WORKER, arguments);
    }

    fn kill(&mut self, worker: usize) {
        if !self.workers.kill(worker) {
            return;
        }
        self.in_hands[usize::from(worker > 0)] += self.ledger.of(worker, IN_CALL).swap(0, SeqCst);
        // What it was sending may have left or not. It is not sent again.
        let attempt = self.ledger.of(worker, ATTEMPT).load(SeqCst);
        if attempt > self.ledger.of(worker, SENT).load(SeqCst) {
            self.uncertain.insert((worker, attempt));
        }
    }

    fn watch(&mut self) {
        self.workers.watch(|worker| self.ledger.of(worker, BEATS).load(Relaxed));
    }

    /// Waits until these workers are attached.
    fn until_ready(&mut self, needed: impl Fn(usize) -> bool) {
        let is_missing =
            |field: &Self, worker| needed(worker) && field.ledger.of(worker, READY).load(SeqCst) == 0;
        while (0..self.workers.count()).any(|worker| is_missing(self, worker)) {
            self.watch();
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn scenario(scenario: usize, kills: u64) {
    let (mode, backing, notify, workers) = SCENARIOS[scenario];
    let seed = workers::seed();
    println!("  {mode:?} {backing:?} notify {notify}: SHMESH_KILL_SEED={seed}, {kills} kills");
    let mut field = Battlefield::new(scenario, workers::directory(), workers, seed);
    let started = Instant::now();
    (0..workers).for_each(|worker| field.spawn(worker));
    field.until_ready(|_| true);

    let (mut early, mut seen_traffic) = (0, 0);
    for kill in 0..kills {
        // Primary and secondaries in turn; both at once from time to time.
        let victim =
            if kill % 2 == 0 { 0 } else { 1 + usize::try_from(kill / 2).expect("small") % (workers - 1) };
        // Mostly in traffic, at times while it attaches.
        let attaching = field.random.below(5) == 0;
        early += u64::from(attaching);
        // A memfd lives only as long as a process has it: then the others must be attached.
        field.until_ready(|worker| !attaching || backing == Backing::Memfd && worker != victim);
        let until =
            Instant::now() + Duration::from_micros(field.random.below(if attaching { 8_000 } else { 4_000 }));
        while Instant::now() < until {
            std::thread::sleep(Duration::from_micros(100));
        }
        field.kill(victim);
        if field.random.below(10) == 0 {
            let second = usize::try_from(field.random.below(workers as u64)).expect("small");
            if backing == Backing::Named {
                field.kill(second);
                if second != victim {
                    field.spawn(second);
                }
            }
        }
        field.watch();
        field.spawn(victim);
        if (kill + 1) % KILLS_WITH_TRAFFIC.min(kills) == 0 {
            let taken: u64 = (0..workers).map(|worker| field.ledger.of(worker, TAKEN).load(Relaxed)).sum();
            assert!(taken > seen_traffic, "no message arrived during up to {KILLS_WITH_TRAFFIC} kills");
            seen_traffic = taken;
        }
    }
    let (time, killed) = (started.elapsed(), field.workers.killed);
    // At times two at once.
    assert!(killed >= kills, "{killed} of {kills} were killed");
    finish(&mut field, mode);
    report(&field, killed, early, time);
}

/// One process alone: what is left must be whole and complete.
fn finish(field: &mut Battlefield, mode: RingMode) {
    field.until_ready(|_| true);
    field.ledger.0[STOP_SENDING].store(1, SeqCst);
    // The survivor takes the place of the primary first: a memfd must pass from hand to hand.
    field.kill(0);
    let options = LinkOptions::new().dir(field.dir.path()).timeout(Duration::from_secs(30));
    let create = || options.create(&config(field.scenario));
    let primary = workers::attached(create, || {}).expect("take the primary's place");
    for worker in 1..field.workers.count() {
        field.kill(worker);
    }
    primary.recover().expect("recover");
    let secondary = options.attach(NAME, Side::Secondary).expect("attach to the other side");
    for (link, side) in [(&primary, Side::Primary), (&secondary, Side::Secondary)] {
        let mut last = [0; WORKERS_MAX];
        for _ in 0..=RING_LEN {
            let Some(message) = link.receive().expect("receive what is left") else { break };
            let (sender, sequence) = check(&message);
            assert!(side_of(sender) != side && sequence > last[sender], "{sequence} of {sender}");
            last[sender] = sequence;
            field.ledger.received(sender, sequence);
        }
        assert!(link.receive().expect("receive").is_none(), "more messages than a ring has");
    }

    for link in [&primary, &secondary] {
        for (pool, len) in [(None, MSG_LEN), (Some(PoolId::CpuData), DATA_LEN)] {
            let mut loans = Vec::new();
            let error = loop {
                match pool.map_or_else(|| link.loan(), |pool| link.loan_with(pool)) {
                    Ok(loan) => loans.push(loan),
                    Err(error) => break error,
                }
            };
            assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
            assert_eq!(loans.len(), len as usize, "leaked: {pool:?}");
        }
    }
    for inline in [true, false] {
        for (from, to) in [(&primary, &secondary), (&secondary, &primary)] {
            let mut sent = 0;
            let error = loop {
                let done = if inline {
                    from.send_inline(0, 0, b"fill")
                } else {
                    from.loan().and_then(|loan| Ok(loan.send()?))
                };
                match done {
                    Ok(()) => sent += 1,
                    Err(error) => break error,
                }
            };
            assert!(matches!(error.kind(), ErrorKind::Full { .. }), "{error}");
            assert_eq!(sent, RING_LEN, "{mode:?}: slots leaked");
            for _ in 0..RING_LEN {
                to.receive().expect("receive").expect("it was sent");
            }
        }
    }
    until_participants(&primary, 2);
}

fn report(field: &Battlefield, kills: u64, early: u64, time: Duration) {
    let (mut sent, mut retries, mut unsent) = (0, 0, 0);
    let mut missing = [0; 2];
    for worker in 0..field.workers.count() {
        let last = field.ledger.of(worker, ATTEMPT).load(SeqCst);
        sent += last;
        for sequence in 1..=last {
            match field.ledger.times_received(worker, sequence) {
                1 => {}
                0 if field.uncertain.contains(&(worker, sequence)) => unsent += 1,
                0 => missing[usize::from(worker == 0)] += 1,
                times => panic!("message {sequence} of {worker} was received {times} times"),
            }
        }
        for sequence in last + 1..last + 10 {
            assert_eq!(field.ledger.times_received(worker, sequence), 0, "never sent, but received");
        }
        retries += field.ledger.of(worker, RETRIES).load(Relaxed);
    }
    let late: u64 =
        (0..field.workers.count()).map(|worker| field.ledger.of(worker, LATE_WAKES).load(Relaxed)).sum();
    println!(
        "  {kills} kills ({early} while attaching) in {:.1} s: {:.0} kills/s, {sent} messages; in the hands of dead \
         receivers {missing:?} of at most {:?}; of {} whose senders died in the call, {unsent} were not sent; {late} late \
         wakes, {retries} retries to attach",
        time.as_secs_f64(),
        kills as f64 / time.as_secs_f64(),
        field.in_hands,
        field.uncertain.len(),
    );
    for side in 0..2 {
        assert!(
            missing[side] <= field.in_hands[side],
            "{} lost, {} explained",
            missing[side],
            field.in_hands[side]
        );
    }
}

/// A receiver sleeps, and the sender dies between making the message visible and ringing.
fn sender_dies_before_it_rings() {
    for index in [2, 3, 4] {
        let dir = workers::directory();
        let primary = LinkOptions::new().dir(dir.path()).create(&config(index)).expect("create");
        let mut field = Battlefield::new(index, dir, 2, 1);
        field.ledger.0[SILENT_DEATH].store(1, SeqCst);
        field.spawn(1);
        let started = Instant::now();
        assert!(primary.wait(Some(Duration::from_secs(120))).expect("wait"), "a message is there");
        let time = started.elapsed();
        assert!(time < Duration::from_secs(60), "scenario {index}: woken after {time:?} only");
        assert_eq!(primary.receive().expect("receive").expect("it was sent").msg(), b"unheard");
    }
}
