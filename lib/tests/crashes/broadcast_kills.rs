//! A writer and three readers of a broadcast ring are killed at random instants of real traffic, again and again.
//!
//! Messages are numbered by their positions in the ring: a writer begins where the ring says that the last one stopped, which is at
//! the last message that it sent, or at the one in whose call it died. So a reader knows exactly what it misses, and fails if that
//! is not what the policy for slow readers allows:
//!
//! | `slow` | a reader that lives |
//! |---|---|
//! | `wait` | gets every message, in order and intact |
//! | `skip` | gets messages in order and intact; `lost()` counts exactly the others. The writer always has room |
//! | `evict` | gets every message until its calls return `Evicted`, which is not before the limit |
//!
//! With `evict`, a reader stops reading before each fourth kill until it is evicted, by the writer that lives or by its successor.
//! A writer goes on as long as it lives, whichever readers die. In the end the next writer finds all buffers.
//!
//! `SHMESH_BROADCAST_KILLS` (300) says how many kills there are with each policy, `SHMESH_KILL_SEED` (the time) repeats a run's
//! choices.

#![allow(clippy::disallowed_types, reason = "the ledger is words as the machine has them")]

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use shmesh::config::{BroadcastConfig, LinkConfig, PoolConfig, PoolId, RingMode, SlowReaders};
use shmesh::inspect::View;
use shmesh::{Error, ErrorKind, Link, LinkOptions, Message, Side};

use crate::harness::{self, long, quick};
use crate::random::Random;
use crate::shared::Words;
use crate::workers::{self, STALL, Workers, from_env, started_with, until_participants};

pub(crate) const CASES: &[harness::Case] = &[
    quick("broadcast_kills::slow_wait", || kills(0, QUICK_KILLS)),
    quick("broadcast_kills::slow_skip", || kills(1, QUICK_KILLS)),
    quick("broadcast_kills::slow_evict", || kills(2, QUICK_KILLS)),
    long("broadcast_kills::many_with_slow_wait", || kills(0, many())),
    long("broadcast_kills::many_with_slow_skip", || kills(1, many())),
    long("broadcast_kills::many_with_slow_evict", || kills(2, many())),
];

/// As the first word of a worker's arguments.
const POLICIES: [SlowReaders; 3] = [SlowReaders::Wait, SlowReaders::Skip, SlowReaders::Evict];
const QUICK_KILLS: u64 = 5;

fn many() -> u64 {
    from_env("SHMESH_BROADCAST_KILLS").unwrap_or(300)
}

const WORKER: &str = "SHMESH_BROADCAST_WORKER";
const NAME: &str = "broadcast";
/// The first is the writer.
const WORKERS: usize = 4;
const RING_LEN: u32 = 16;
const MSG_LEN: u32 = 32;
/// With `skip`, enough for all that the ring and readers have, also dead ones whose seats are not free yet.
const SKIP_LEN: u32 = 64;
const DATA_LEN: u32 = 8;
const HISTORY: u32 = 2;
const EVICT_AFTER: Duration = Duration::from_millis(20);
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
/// The last message that a reader has received, how many it has received and lost, and how often it was evicted.
const LAST: usize = 2;
const TAKEN: usize = 3;
const LOST: usize = 4;
const EVICTED: usize = 5;
/// Not 0: the reader is to stop reading until it is evicted.
const STOP: usize = 6;
const WORDS: usize = 8;

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

/// Numbers of MSG and DATA buffers.
fn lengths(slow: SlowReaders) -> (u32, u32) {
    if slow == SlowReaders::Skip { (SKIP_LEN, SKIP_LEN) } else { (MSG_LEN, DATA_LEN) }
}

fn config(slow: SlowReaders) -> LinkConfig {
    let mut config = LinkConfig::new(NAME.parse().expect("a name"));
    config.ring_mode = RingMode::Broadcast;
    let evict_after_ms = u32::try_from(EVICT_AFTER.as_millis()).expect("small");
    config.broadcast = BroadcastConfig { slow, history: HISTORY, evict_after_ms };
    config.ring_len = RING_LEN;
    config.latency_sample = 2;
    config.spin_us = 5;
    let (msg, data) = lengths(slow);
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 128, pool_len: msg };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 256, pool_len: data };
    config
}

fn attach(dir: &Path, side: Side, slow: SlowReaders) -> Result<Link, Error> {
    let options = LinkOptions::new().dir(dir).timeout(STALL / 3);
    let attach = || match side {
        Side::Primary => options.create(&config(slow)),
        Side::Secondary => options.attach(NAME, side),
    };
    workers::attached(attach, || {})
}

/// Number of messages that all writers have sent.
fn sent(writer: &Link, dir: &Path) -> u64 {
    // A loan that finds no buffer takes the writer's role: a message of a writer that died before it counted it is counted then.
    let loans: Vec<_> = std::iter::from_fn(|| writer.loan_with(PoolId::CpuData).ok()).collect();
    drop(loans);
    let view = View::open(dir, &NAME.parse().expect("a name")).expect("a link");
    view.snapshot().rings[0].sent
}

/// The bytes of a message, all of which follow from its number.
fn contents(sequence: u64) -> Vec<u8> {
    let words =
        (0..10).map(|i| if i == 0 { sequence } else { (sequence ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15) });
    words.flat_map(u64::to_le_bytes).collect()
}

/// How a message travels: in the slot, in a MSG buffer, or with DATA. From time to time as many as the ring has slots need no buffer.
fn kind(sequence: u64) -> u64 {
    if sequence % (4 * u64::from(RING_LEN)) < u64::from(RING_LEN) { 0 } else { sequence % 3 }
}

fn send(link: &Link, sequence: u64) -> Result<(), Error> {
    let bytes = contents(sequence);
    let with_data = match kind(sequence) {
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

/// The number of a message, if all of it is as it was written.
fn intact(message: &Message<'_>) -> Option<u64> {
    let sequence = u64::from_le_bytes(*message.msg().first_chunk()?);
    let data_len = if kind(sequence) == 2 { 200 } else { 0 };
    let is_intact = message.msg() == contents(sequence)
        && message.data().len() == data_len
        && message.data().iter().all(|&byte| byte == message.msg()[9]);
    is_intact.then_some(sequence)
}

pub(crate) fn is_worker() -> bool {
    std::env::var_os(WORKER).is_some()
}

pub(crate) fn work() -> u8 {
    let arguments = std::env::var(WORKER).expect("what it is to do");
    let ([policy, me, seed], dir) = started_with(&arguments);
    let [policy, me] = [policy, me].map(|number| usize::try_from(number).expect("small"));
    let (slow, mut random, ledger) = (POLICIES[policy], Random::new(seed), Ledger::open(&dir));
    let error = loop {
        let done = match me {
            0 => write(&dir, &ledger, slow, &mut random),
            _ => read(&dir, &ledger, slow, me, &mut random),
        };
        match done.expect_err("it works for ever") {
            error if is_eviction(&error) && me != 0 && slow == SlowReaders::Evict => ledger.add(me, EVICTED),
            error => break error,
        }
    };
    eprintln!("worker {me}: {error}");
    1
}

fn is_eviction(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Evicted { .. })
}

fn write(
    dir: &Path,
    ledger: &Ledger,
    slow: SlowReaders,
    random: &mut Random,
) -> Result<std::convert::Infallible, Error> {
    let link = attach(dir, Side::Primary, slow)?;
    let (sent, known, tried) = (sent(&link, dir), ledger.get(0, SENT), ledger.get(0, ATTEMPT));
    assert!(
        (known..=tried).contains(&sent),
        "{sent} were sent, and the last writer knew of {known} to {tried}"
    );
    ledger.set(0, ATTEMPT, sent);
    ledger.set(0, SENT, sent);
    ledger.set(0, READY, 1);
    let mut loans = Vec::new();
    loop {
        for _ in 0..random.below(8) {
            let sequence = ledger.get(0, SENT) + 1;
            ledger.set(0, ATTEMPT, sequence);
            match send(&link, sequence) {
                Ok(()) => {
                    ledger.set(0, SENT, sequence);
                    ledger.add(0, PROGRESS);
                }
                Err(error) if error.is_retryable() && slow != SlowReaders::Skip => break,
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
    slow: SlowReaders,
    me: usize,
    random: &mut Random,
) -> Result<std::convert::Infallible, Error> {
    let before = ledger.get(0, SENT);
    // When this reader had certainly received everything: the writer waits for it since a later moment.
    let mut up_to_date = Instant::now();
    let link = attach(dir, Side::Secondary, slow)?;
    let attempt = || ledger.get(0, ATTEMPT);
    let first = before.saturating_sub(HISTORY.into())..=attempt();
    let lost_by_others = ledger.get(me, LOST);
    let mut last = None;
    let mut held: Vec<(u64, Message<'_>)> = Vec::new();
    // Only of a reader that was evicted may messages be overwritten. Its calls fail after the limit, not before.
    let told = |result: Result<(), Error>, up_to_date: Instant| {
        if let Err(error) = &result
            && is_eviction(error)
        {
            let waited = up_to_date.elapsed();
            assert!(waited >= EVICT_AFTER, "evicted after {waited:?}");
        }
        result
    };
    let verify = |is_right: bool, what: &dyn Fn() -> String| {
        if !is_right {
            let evicted = link.loan().map(drop).err().filter(|_| slow == SlowReaders::Evict);
            return Err(evicted.filter(is_eviction).unwrap_or_else(|| panic!("reader {me}: {}", what())));
        }
        Ok(())
    };
    ledger.set(me, READY, 1);
    loop {
        ledger.add(me, PROGRESS);
        if ledger.get(me, STOP) != 0 {
            told(link.loan().map(drop), up_to_date).inspect_err(|_| ledger.set(me, STOP, 0))?;
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        told(link.wait(Some(Duration::from_millis(100))).map(drop), up_to_date)?;
        loop {
            let now = Instant::now();
            let received = link.receive();
            let Some(message) = (match received {
                Ok(message) => message,
                Err(error) => return told(Err(error), up_to_date).map(|()| unreachable!()),
            }) else {
                if held.is_empty() {
                    up_to_date = now;
                }
                break;
            };
            let sequence = intact(&message);
            told(verify(sequence.is_some(), &|| format!("damaged: {message:?}")), up_to_date)?;
            let sequence = sequence.unwrap_or_default();
            // `lost` counts all that are between two messages, also before the first one.
            let lost = link.lost();
            let is_next = match last {
                Some((last, lost_before)) => sequence == last + 1 + (lost - lost_before),
                None => sequence.checked_sub(1 + lost).is_some_and(|sent| first.contains(&sent)),
            };
            let is_next = is_next && (lost == 0 || slow == SlowReaders::Skip);
            told(
                verify(is_next, &|| format!("{sequence} and {lost} lost, after {last:?}, {first:?}")),
                up_to_date,
            )?;
            last = Some((sequence, lost));
            ledger.set(me, LAST, sequence);
            ledger.set(me, LOST, lost_by_others + lost);
            ledger.add(me, TAKEN);
            held.push((sequence, message));
            while held.len() > HELD_MAX || random.below(2) == 0 && !held.is_empty() {
                let i = usize::try_from(random.below(held.len() as u64)).expect("small");
                let (sequence, message) = held.swap_remove(i);
                let is_intact = intact(&message) == Some(sequence);
                told(verify(is_intact, &|| format!("{sequence} was overwritten in its hands")), up_to_date)?;
            }
        }
        // A reader that sleeps with messages in its hands holds the writer up, which only `skip` prevents.
        if slow != SlowReaders::Skip {
            held.clear();
        }
    }
}

struct Field {
    dir: tempfile::TempDir,
    policy: usize,
    ledger: Ledger,
    workers: Workers,
    random: Random,
}

impl Field {
    fn spawn(&mut self, worker: usize) {
        self.ledger.set(worker, READY, 0);
        let arguments =
            format!("{} {worker} {} {}", self.policy, self.random.next(), self.dir.path().display());
        self.workers.spawn(worker, WORKER, arguments);
    }

    fn kill(&mut self, worker: usize) {
        self.workers.kill(worker);
        if worker != 0 {
            self.ledger.set(worker, STOP, 0);
        }
    }

    fn attach(&self, side: Side) -> Link {
        attach(self.dir.path(), side, POLICIES[self.policy]).expect("attach")
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

fn kills(policy: usize, kills: u64) {
    let seed = workers::seed();
    let slow = POLICIES[policy];
    println!("  SHMESH_KILL_SEED={seed}, {kills} kills with {slow:?}");
    let dir = workers::directory();
    let mut field = Field {
        ledger: Ledger::open(dir.path()),
        dir,
        policy,
        workers: Workers::new(WORKERS),
        random: Random::new(seed),
    };
    let started = Instant::now();
    (0..WORKERS).for_each(|worker| field.spawn(worker));
    let ready = |ledger: &Ledger| (0..WORKERS).all(|worker| ledger.get(worker, READY) != 0);
    let none_stops = |ledger: &Ledger| (1..WORKERS).all(|reader| ledger.get(reader, STOP) == 0);
    field.until("all are attached", ready);
    let mut early = 0;
    for kill in 0..kills {
        // The writer each second time.
        let victim = if kill % 2 == 0 { 0 } else { reader_of(kill / 2) };
        // Mostly in traffic, at times while one attaches.
        let while_attaching = field.random.below(5) == 0;
        if while_attaching {
            early += 1;
        } else {
            field.until("all are attached", ready);
            // Nothing is sent while a reader that stopped is not evicted; then the others go on.
            field.until("the readers that stopped get `Evicted`", none_stops);
            // The readers that live get what this writer sends, beside the dead.
            let sent = field.ledger.get(0, SENT) + 2 * u64::from(RING_LEN);
            field.until("the writer sends", |ledger| ledger.get(0, SENT) >= sent);
        }
        if slow == SlowReaders::Evict && kill % 4 == 0 {
            field.ledger.set(reader_of(kill / 4), STOP, 1);
        }
        // For half of that time the writer waits for the reader that has stopped.
        let spread = if slow == SlowReaders::Evict { 40_000 } else { 6_000 };
        let until = Instant::now() + Duration::from_micros(field.random.below(spread));
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
    field.until("the readers that stopped get `Evicted`", none_stops);
    finish(&mut field);
    report(&field, early, started.elapsed());
}

/// The readers in turns.
fn reader_of(turn: u64) -> usize {
    1 + usize::try_from(turn).expect("small") % (WORKERS - 1)
}

/// The next writer finds the readers that live, all buffers, and no more participants than there are.
fn finish(field: &mut Field) {
    field.kill(0);
    let writer = field.attach(Side::Primary);
    let first = sent(&writer, field.dir.path()) + 1;
    // The last messages are in no buffer, for newcomers get them, and readers that skip could.
    let mut end = first + 10 * u64::from(RING_LEN);
    while end % (4 * u64::from(RING_LEN)) + 1 != u64::from(RING_LEN) {
        end += 1;
    }
    field.ledger.set(0, ATTEMPT, end);
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
    writer.notify().expect("notify");
    field.until("all readers have everything", |ledger| {
        (1..WORKERS).all(|reader| ledger.get(reader, LAST) == end)
    });
    for reader in 1..WORKERS {
        field.kill(reader);
    }
    writer.recover().expect("recover");
    let (msg, data) = lengths(POLICIES[field.policy]);
    for (pool, len) in [(None, msg), (Some(PoolId::CpuData), data)] {
        let loan = || pool.map_or_else(|| writer.loan(), |pool| writer.loan_with(pool));
        let loans: Vec<_> = std::iter::from_fn(|| loan().ok()).collect();
        assert_eq!(loans.len(), len as usize, "leaked: {pool:?}");
    }
    until_participants(&writer, 1);
    let reader = field.attach(Side::Secondary);
    send(&writer, end + 1).expect("room");
    let got: Vec<_> =
        std::iter::from_fn(|| reader.receive().expect("no damage")).map(|m| intact(&m)).collect();
    assert_eq!(got, [end - 1, end, end + 1].map(Some), "the history, and what came after");
}

fn report(field: &Field, early: u64, time: Duration) {
    let sum = |word| (1..WORKERS).map(|reader| field.ledger.get(reader, word)).sum::<u64>();
    let [taken, lost, evicted] = [TAKEN, LOST, EVICTED].map(sum);
    println!(
        "  {} kills ({early} while attaching) in {:.1} s; {} messages, received {taken} times, lost {lost} times; readers were \
         evicted {evicted} times",
        field.workers.killed,
        time.as_secs_f64(),
        field.ledger.get(0, ATTEMPT),
    );
    assert!(taken > 0, "nothing arrived");
    match POLICIES[field.policy] {
        SlowReaders::Wait => assert_eq!((lost, evicted), (0, 0)),
        SlowReaders::Skip => assert!(lost > 0 && evicted == 0, "the writer overtook no reader"),
        SlowReaders::Evict => assert!(lost == 0 && evicted > 0, "none that stopped was evicted"),
    }
}
