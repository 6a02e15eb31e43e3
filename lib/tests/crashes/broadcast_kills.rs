//! A writer and three readers of a broadcast ring are killed at random instants of real traffic, again and again.
//!
//! Each process writes down, in memory that outlives it, what it has sent or received. A reader that lives gets every message, in
//! order and intact; what it does not get was never sent, because the writer died in the call. A writer goes on as long as it lives,
//! whichever readers die. In the end the next writer finds all buffers.
//!
//! `SHMESH_BROADCAST_KILLS` (300) says how many kills there are, `SHMESH_KILL_SEED` (the time) repeats a run's choices.

#![allow(clippy::disallowed_types, reason = "the ledger is words as the machine has them")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use shmesh::config::{BroadcastConfig, LinkConfig, PoolConfig, PoolId, RingMode, SlowReaders};
use shmesh::{Error, Link, LinkOptions, Message, Side};

use crate::harness::{self, long};
use crate::random::Random;
use crate::shared::Words;
use crate::workers::{self, STALL, Workers, from_env, started_with, until_participants};

pub(crate) const CASES: &[harness::Case] = &[long("broadcast_kills::writer_and_readers", || {
    kills(from_env("SHMESH_BROADCAST_KILLS").unwrap_or(300))
})];

const WORKER: &str = "SHMESH_BROADCAST_WORKER";
const NAME: &str = "broadcast";
/// The first is the writer.
const WORKERS: usize = 4;
const RING_LEN: u32 = 16;
const MSG_LEN: u32 = 32;
const DATA_LEN: u32 = 8;
const HISTORY: u32 = 2;
/// Messages that a reader has in its hands, at most.
const HELD_MAX: usize = 4;

/// The words that each worker reports about itself.
const READY: usize = 0;
/// The writer's messages, or rounds of a reader: it lives.
const PROGRESS: usize = 1;
/// The message that the writer sends, or sent last.
const ATTEMPT: usize = 2;
/// The last message that the writer has sent.
const SENT: usize = 3;
/// The last message that a reader has received, and how many that was.
const LAST: usize = 2;
const TAKEN: usize = 3;
/// Messages that a reader expected and did not get, and their count.
const MISSED: usize = 5;
const MISSED_COUNT: usize = 4;
const MISSED_MAX: usize = 1024;
const WORDS: usize = MISSED + MISSED_MAX;

struct Ledger(Words);

impl Ledger {
    fn open(dir: &Path) -> Self {
        Self(Words::in_file(&dir.join("ledger"), WORKERS * WORDS))
    }

    fn of(&self, worker: usize, word: usize) -> &AtomicU64 {
        &self.0[worker * WORDS + word]
    }

    fn get(&self, worker: usize, word: usize) -> u64 {
        self.of(worker, word).load(SeqCst)
    }

    fn set(&self, worker: usize, word: usize, value: u64) {
        self.of(worker, word).store(value, SeqCst);
    }

    fn add(&self, worker: usize, word: usize) {
        self.of(worker, word).fetch_add(1, SeqCst);
    }
}

fn config() -> LinkConfig {
    let mut config = LinkConfig::new(NAME.parse().expect("a name"));
    config.ring_mode = RingMode::Broadcast;
    config.broadcast = BroadcastConfig { slow: SlowReaders::Wait, history: HISTORY, ..config.broadcast };
    config.ring_len = RING_LEN;
    config.spin_us = 5;
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 128, pool_len: MSG_LEN };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 256, pool_len: DATA_LEN };
    config
}

fn attach(dir: &Path, side: Side) -> Result<Link, Error> {
    let options = LinkOptions::new().dir(dir).timeout(STALL / 3);
    let attach = || match side {
        Side::Primary => options.create(&config()),
        Side::Secondary => options.attach(NAME, side),
    };
    workers::attached(attach, || {})
}

/// The bytes of a message, all of which follow from its number.
fn contents(sequence: u64) -> Vec<u8> {
    let words =
        (0..10).map(|i| if i == 0 { sequence } else { (sequence ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15) });
    words.flat_map(u64::to_le_bytes).collect()
}

/// Sends a message; its number says how it travels.
fn send(link: &Link, sequence: u64) -> Result<(), Error> {
    let bytes = contents(sequence);
    let with_data = match sequence % 3 {
        0 => return link.send_inline(0, 0, &bytes),
        kind => kind == 2,
    };
    let mut loan = if with_data { link.loan_with(PoolId::CpuData)? } else { link.loan()? };
    loan.resize_msg(bytes.len())?.copy_from_slice(&bytes);
    if with_data {
        loan.resize_data(200)?.fill(bytes[9]);
    }
    Ok(loan.send()?)
}

/// The number of a message, all of which is as it was written.
fn check(message: &Message<'_>) -> u64 {
    let sequence = u64::from_le_bytes(*message.msg().first_chunk().expect("at least 8 bytes"));
    assert_eq!(message.msg(), contents(sequence), "{message:?}");
    assert_eq!(message.data().len(), if sequence % 3 == 2 { 200 } else { 0 }, "{message:?}");
    assert!(message.data().iter().all(|&byte| byte == message.msg()[9]), "{message:?}");
    sequence
}

pub(crate) fn is_worker() -> bool {
    std::env::var_os(WORKER).is_some()
}

pub(crate) fn work() -> u8 {
    let arguments = std::env::var(WORKER).expect("what it is to do");
    let ([me, seed], dir) = started_with(&arguments);
    let (me, random) = (usize::try_from(me).expect("small"), Random::new(seed));
    let ledger = Ledger::open(&dir);
    let done = if me == 0 { write(&dir, &ledger, random) } else { read(&dir, &ledger, me, random) };
    let error = done.expect_err("it works for ever");
    eprintln!("worker {me}: {error}");
    1
}

fn write(dir: &Path, ledger: &Ledger, mut random: Random) -> Result<std::convert::Infallible, Error> {
    let link = attach(dir, Side::Primary)?;
    ledger.set(0, READY, 1);
    let mut loans = Vec::new();
    loop {
        for _ in 0..random.below(8) {
            let sequence = ledger.get(0, ATTEMPT) + 1;
            ledger.set(0, ATTEMPT, sequence);
            match send(&link, sequence) {
                Ok(()) => {
                    ledger.set(0, SENT, sequence);
                    ledger.add(0, PROGRESS);
                }
                // It did not leave: the next one gets its number.
                Err(error) if error.is_retryable() => {
                    ledger.set(0, ATTEMPT, sequence - 1);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        link.notify()?;
        // A loan more in the hands, from time to time.
        match random.below(16) {
            0 if loans.len() < 2 => loans.extend(link.loan_with(PoolId::CpuData).ok()),
            1 => loans.clear(),
            _ => {}
        }
        std::thread::yield_now();
    }
}

fn read(
    dir: &Path,
    ledger: &Ledger,
    me: usize,
    mut random: Random,
) -> Result<std::convert::Infallible, Error> {
    let link = attach(dir, Side::Secondary)?;
    // Whatever is sent from now on comes.
    let mut next = ledger.get(0, ATTEMPT) + 1;
    let mut last = 0;
    let mut held: Vec<(u64, Message<'_>)> = Vec::new();
    ledger.set(me, READY, 1);
    loop {
        ledger.add(me, PROGRESS);
        link.wait(Some(Duration::from_millis(100)))?;
        while let Some(message) = link.receive()? {
            let sequence = check(&message);
            assert!(sequence > last, "{sequence} after {last}");
            for missed in next..sequence {
                let count = ledger.get(me, MISSED_COUNT);
                ledger.set(me, MISSED + usize::try_from(count).expect("small"), missed);
                ledger.set(me, MISSED_COUNT, count + 1);
            }
            last = sequence;
            // What came before may be of the history.
            next = next.max(sequence + 1);
            ledger.set(me, LAST, sequence);
            ledger.add(me, TAKEN);
            held.push((sequence, message));
            while held.len() > HELD_MAX || random.below(2) == 0 && !held.is_empty() {
                let i = usize::try_from(random.below(held.len() as u64)).expect("small");
                let (sequence, message) = held.swap_remove(i);
                assert_eq!(check(&message), sequence, "it was overwritten in the hands of a reader");
            }
        }
        // A reader that sleeps with messages in its hands holds the writer up.
        held.clear();
    }
}

/// Processes, and what their deaths leave open.
struct Field {
    dir: tempfile::TempDir,
    ledger: Ledger,
    workers: Workers,
    random: Random,
    /// Messages whose writers died in the call.
    uncertain: BTreeSet<u64>,
}

impl Field {
    fn spawn(&mut self, worker: usize) {
        self.ledger.set(worker, READY, 0);
        let arguments = format!("{worker} {} {}", self.random.next(), self.dir.path().display());
        self.workers.spawn(worker, WORKER, arguments);
    }

    fn kill(&mut self, worker: usize) {
        if self.workers.kill(worker) && worker == 0 {
            let attempt = self.ledger.get(0, ATTEMPT);
            if attempt > self.ledger.get(0, SENT) {
                self.uncertain.insert(attempt);
            }
        }
    }

    /// All that live make progress: a writer sends, whichever readers have died.
    fn watch(&mut self) {
        self.workers.watch(|worker| self.ledger.get(worker, PROGRESS));
    }

    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Ledger) -> bool) {
        let started = Instant::now();
        while !is_so(&self.ledger) {
            self.watch();
            assert!(started.elapsed() < 2 * STALL, "{what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn kills(kills: u64) {
    let seed = workers::seed();
    println!("  SHMESH_KILL_SEED={seed}, {kills} kills");
    let dir = workers::directory();
    let mut field = Field {
        ledger: Ledger::open(dir.path()),
        dir,
        workers: Workers::new(WORKERS),
        random: Random::new(seed),
        uncertain: BTreeSet::new(),
    };
    let started = Instant::now();
    (0..WORKERS).for_each(|worker| field.spawn(worker));
    let ready = |ledger: &Ledger| (0..WORKERS).all(|worker| ledger.get(worker, READY) != 0);
    field.until("all are attached", ready);
    let mut early = 0;
    for kill in 0..kills {
        // The writer each second time.
        let victim =
            if kill % 2 == 0 { 0 } else { 1 + usize::try_from(kill / 2).expect("small") % (WORKERS - 1) };
        // Mostly in traffic, at times while one attaches.
        let while_attaching = field.random.below(5) == 0;
        if while_attaching {
            early += 1;
        } else {
            field.until("all are attached", ready);
            // The readers that live get what this writer sends, beside the dead.
            let sent = field.ledger.get(0, SENT) + 2 * u64::from(RING_LEN);
            field.until("the writer sends", |ledger| ledger.get(0, SENT) >= sent);
        }
        let until = Instant::now() + Duration::from_micros(field.random.below(6_000));
        while Instant::now() < until {
            std::thread::sleep(Duration::from_micros(100));
        }
        field.watch();
        field.kill(victim);
        if field.random.below(10) == 0 {
            let second = usize::try_from(field.random.below(WORKERS as u64)).expect("small");
            field.kill(second);
            if second != victim {
                field.spawn(second);
            }
        }
        field.spawn(victim);
    }
    assert!(field.workers.killed >= kills, "{} of {kills} were killed", field.workers.killed);
    field.until("all are attached", ready);
    finish(&mut field);
    report(&field, early, started.elapsed());
}

/// The next writer finds the readers that live, all buffers, and no more participants than there are.
fn finish(field: &mut Field) {
    field.kill(0);
    let writer = attach(field.dir.path(), Side::Primary).expect("take the writer's place");
    // The last messages are in no buffer, for newcomers get them.
    let first = field.ledger.get(0, ATTEMPT) + 1;
    let mut end = first + 10 * u64::from(RING_LEN);
    let mut sequence = first;
    while sequence <= end {
        match send(&writer, sequence) {
            Ok(()) => sequence += 1,
            Err(error) if error.is_retryable() => {
                writer.notify().expect("notify");
                field.watch();
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(error) => panic!("{error}"),
        }
    }
    for _ in 0..HISTORY {
        end = (end / 3 + 1) * 3;
        let send = || writer.send_inline(0, 0, &contents(end)).is_ok();
        field.until("there is room for the last ones", |_| send());
    }
    writer.notify().expect("notify");
    field.until("all readers have everything", |ledger| {
        (1..WORKERS).all(|reader| ledger.get(reader, LAST) == end)
    });
    for reader in 1..WORKERS {
        field.kill(reader);
    }
    // Numbers that were left out.
    field.uncertain.extend(sequence..=end);
    writer.recover().expect("recover");
    for (pool, len) in [(None, MSG_LEN), (Some(PoolId::CpuData), DATA_LEN)] {
        let loan = || pool.map_or_else(|| writer.loan(), |pool| writer.loan_with(pool));
        let loans: Vec<_> = std::iter::from_fn(|| loan().ok()).collect();
        assert_eq!(loans.len(), len as usize, "leaked: {pool:?}");
    }
    until_participants(&writer, 1);
    let reader = attach(field.dir.path(), Side::Secondary).expect("attach once more");
    send(&writer, end + 1).expect("room");
    let got: Vec<_> =
        std::iter::from_fn(|| reader.receive().expect("no damage")).map(|m| check(&m)).collect();
    assert_eq!(got, [end - 3, end, end + 1], "the history, and what came after");
}

fn report(field: &Field, early: u64, time: Duration) {
    let (mut taken, mut missed) = (0, 0);
    for reader in 1..WORKERS {
        taken += field.ledger.get(reader, TAKEN);
        let count = usize::try_from(field.ledger.get(reader, MISSED_COUNT)).expect("small");
        missed += count;
        for i in 0..count {
            let sequence = field.ledger.get(reader, MISSED + i);
            assert!(
                field.uncertain.contains(&sequence),
                "reader {reader} did not get {sequence}, which was sent"
            );
        }
    }
    println!(
        "  {} kills ({early} while attaching) in {:.1} s; {} messages, received {taken} times; {} writers died in the call, \
         readers that lived did without {missed}",
        field.workers.killed,
        time.as_secs_f64(),
        field.ledger.get(0, ATTEMPT),
        field.uncertain.len(),
    );
    assert!(taken > 0, "nothing arrived");
}
