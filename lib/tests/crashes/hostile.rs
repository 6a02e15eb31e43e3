//! A hostile peer writes what it likes into every word of shared memory, and the library must answer with results
//! and errors: no crash, no panic, no loop without end, no access outside of its mapping.
//!
//! - *Word by word*: each word of the link's segment and of the pools' tables gets each of a set of nasty values, and
//!   then the whole API is called once. Deterministic.
//! - *While it runs*: one process writes random and plausible words all the time, another calls the API.
//!
//! The victims are processes of their own, so a crash or a hang is seen from outside. `SHMESH_HOSTILE_SEED` and
//! `SHMESH_HOSTILE_SECONDS` (for each ring mode).

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::crashpoint;
use crate::harness::{self, long, quick};
use crate::layout::{LINE, Table};
use crate::random::Random;
use crate::shared::Words;
use crate::workers;
use crate::world::{self, Base, DATA_LEN, MSG_LEN, RING_LEN, msg_data};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use shmesh::config::{PoolId, RingMode, SlowReaders};
use shmesh::{Link, Side};

pub(crate) const CASES: &[harness::Case] = &[
    quick("hostile::word_by_word_mpmc", || word_by_word(RingMode::Mpmc, 10)),
    quick("hostile::word_by_word_spsc", || word_by_word(RingMode::Spsc, 10)),
    quick("hostile::while_it_runs_mpmc", || while_it_runs(RingMode::Mpmc, 0, QUICK)),
    quick("hostile::while_it_runs_spsc", || while_it_runs(RingMode::Spsc, 0, QUICK)),
    quick("hostile::word_by_word_broadcast", || broadcast_word_by_word(&[SlowReaders::Skip], 23)),
    quick("hostile::while_it_runs_broadcast", || broadcast_while_it_runs(&[SlowReaders::Skip], QUICK)),
    quick("hostile::doorbell_that_never_ends", doorbell_that_never_ends),
    quick("hostile::requests_word_by_word", || requests_word_by_word(12)),
    quick("hostile::requests_while_it_runs", || while_it_runs(RingMode::Mpmc, WINDOW, QUICK)),
    long("hostile::requests_every_word", || requests_word_by_word(1)),
    long("hostile::every_word_mpmc", || word_by_word(RingMode::Mpmc, 1)),
    long("hostile::every_word_spsc", || word_by_word(RingMode::Spsc, 1)),
    long("hostile::every_seventh_word_broadcast", || broadcast_word_by_word(&SLOW, 7)),
    long("hostile::for_seconds_broadcast", || broadcast_while_it_runs(&SLOW, LONG)),
    long("hostile::for_seconds_mpmc", || while_it_runs(RingMode::Mpmc, 0, LONG)),
    long("hostile::for_seconds_spsc", || while_it_runs(RingMode::Spsc, 0, LONG)),
    long("hostile::for_seconds_requests", || while_it_runs(RingMode::Mpmc, WINDOW, LONG)),
];

/// How long a victim is attacked while it works.
const QUICK: Duration = Duration::from_millis(250);
const LONG: Duration = Duration::from_secs(3);

const SLOW: [SlowReaders; 3] = [SlowReaders::Wait, SlowReaders::Skip, SlowReaders::Evict];

/// Requests that a client can have pending, on a link that has some.
const WINDOW: u32 = 2;

/// Words that the victim reports about itself.
const CALLS: usize = 0;
const ERRORS: usize = 1;
const PLACE: usize = 2;
const WORD: usize = 3;
const VALUE: usize = 4;
const STEP: usize = 5;
const SLOWEST: usize = 6;
/// Calls that a victim makes at least, however busy the machine is.
const CALLS_MIN: u64 = 1_000;
/// No single call may take longer, on a machine with other work.
const PATIENCE: Duration = Duration::from_secs(60);

/// Every word that participants write: segment and offset.
fn words(base: &Base) -> Vec<(usize, usize)> {
    let of =
        |segment: usize, range: std::ops::Range<usize>| range.step_by(8).map(move |offset| (segment, offset));
    let pool = |segment, len: u32| {
        let table = Table::of_pool(len as usize);
        of(segment, table.hints().start..table.cells().end)
    };
    // The cursors of readers stand behind the other tables of a broadcast link.
    let own = match base.mode {
        RingMode::Broadcast => {
            base.layout().primary_role()..base.segments[0].len() - base.layout().times().len()
        }
        RingMode::Mpmc | RingMode::Spsc => base.layout().mutable(),
    };
    of(0, own).chain(pool(1, MSG_LEN)).chain(pool(2, DATA_LEN)).collect()
}

/// Values that are wrong in as many ways as possible, or nearly right.
fn nasty(old: u64) -> [u64; 14] {
    [
        0,
        1,
        u64::MAX,
        1 << 63,
        old ^ 1,
        old ^ 3,
        old.wrapping_add(1),
        old.wrapping_sub(1),
        old ^ 1 << 32,
        old.wrapping_add(1 << 32),
        old ^ 0xff << 2,
        u64::from(u32::MAX) << 32,
        0x5555_5555_5555_5555,
        // A published slot of the first lap, past the end of every table.
        1 << 32 | 0x7_ffff << 1,
    ]
}

/// Calls everything there is, from handles that hold something already. Counts calls and errors.
struct Victim<'a> {
    base: &'a Base,
    log: &'a Words,
}

impl Victim<'_> {
    fn said<T>(&self, step: u64, result: shmesh::Result<T>) -> Option<T> {
        self.log[STEP].store(step, Relaxed);
        self.log[CALLS].fetch_add(1, Relaxed);
        if result.is_err() {
            self.log[ERRORS].fetch_add(1, Relaxed);
        }
        // An error must be printable whatever is in it.
        result.inspect_err(|error| assert!(!error.to_string().is_empty())).ok()
    }

    fn use_all(&self, link: &Link) {
        let started = Instant::now();
        let mut held = Vec::new();
        for _ in 0..2 {
            if let Some(mut loan) = self.said(1, link.loan()) {
                if let Some(bytes) = self.said(2, loan.resize_msg(64)) {
                    bytes.fill(1);
                }
                let _ = self.said(3, loan.with_msg_id(1).with_cell_id(2).send().map_err(Into::into));
            }
            if let Some(mut loan) = self.said(4, link.loan_with(PoolId::CpuData)) {
                if let Some(bytes) = self.said(5, loan.resize_data(64)) {
                    bytes.fill(1);
                }
                let _ = self.said(6, loan.send().map_err(Into::into));
            }
            let _ = self.said(7, link.loan()).map(drop);
            let _ = self.said(8, link.send_inline(1, 2, &[7; shmesh::INLINE_MAX_BYTES]));
            if let Some(message) = self.said(9, link.receive()).flatten() {
                touch(&message);
                held.push(message);
            }
            let _ = self.said(10, link.receive_batch(&mut held, 3));
            held.iter().for_each(touch);
            let _ = self.said(11, link.wait(Some(Duration::ZERO)));
            held.clear();
        }
        if link.request_window().is_some() {
            self.use_requests(link);
        }
        let mut loans: Vec<_> = (0..3).filter_map(|_| self.said(12, link.loan())).collect();
        let _ = self.said(13, link.send_batch(&mut loans));
        let _ = (link.has_message(), link.queued(), link.seat(), link.side(), format!("{link:?}").len());
        let everybody: Vec<_> = link.participants().collect();
        let _ = self.said(14, link.recover());
        for other in everybody.iter().take(4) {
            if other.seat != self.base.primary.seat() && other.seat != self.base.secondary.seat() {
                let _ = self.said(15, link.evict(other.seat));
                let _ = self.said(16, link.recover_participant(other.seat, other.word));
            }
        }
        if let Some(other) = self.said(17, link.try_clone()) {
            let _ = self.said(18, other.send_inline(0, 0, b"clone"));
            let _ = self.said(19, other.receive()).map(drop);
        }
        let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.log[SLOWEST].fetch_max(micros, Relaxed);
    }

    /// Asks or answers, and drops half of it.
    fn use_requests(&self, link: &Link) {
        if link.side() == Side::Secondary {
            let mut pending = Vec::new();
            if let Some(loan) = self.said(30, link.loan_with(PoolId::CpuData)) {
                pending.extend(self.said(31, link.request(loan).map_err(Into::into)));
            }
            pending.extend(self.said(32, link.request_inline(1, 2, &[7; 104])));
            for pending in &mut pending {
                let _ = pending.is_ready();
                for _ in 0..3 {
                    if let Some(reply) = self.said(33, pending.wait(Some(Duration::ZERO))).flatten() {
                        touch(&reply);
                    }
                }
            }
            return;
        }
        let _ = (link.has_request(), self.said(34, link.wait_request(Some(Duration::ZERO))));
        for _ in 0..3 {
            let Some(mut request) = self.said(35, link.receive_request()).flatten() else { continue };
            touch(&request);
            let _ = (
                request.is_wanted(),
                request.client(),
                self.said(36, request.wait_room(Some(Duration::ZERO))),
            );
            let _ = self.said(37, request.stream_inline(1, 2, &[7; 8]));
            if let Some(loan) = self.said(38, link.loan()) {
                let _ = self.said(39, request.reply(loan).map_err(Into::into));
            }
            std::mem::forget(self.said(40, link.receive_request()));
        }
    }

    /// A writer and two readers, which hold messages, also beyond their handles, and answer.
    fn use_broadcast(&self) {
        let started = Instant::now();
        let handles = [&self.base.primary, &self.base.secondary, &self.base.secondary]
            .map(|root| self.said(50, root.try_clone()));
        let [Some(writer), Some(one), Some(other)] = handles else { return };
        let mut owned = Vec::new();
        for _ in 0..3 {
            if let Some(loan) = self.said(51, writer.loan_with(PoolId::CpuData)) {
                let _ = self.said(52, loan.send().map_err(Into::into));
            }
            let _ = self.said(53, writer.send_inline(1, 2, &[7; shmesh::INLINE_MAX_BYTES]));
            let _ = self.said(54, writer.send_inline(1, 2, &[7; 8]));
            for reader in [&one, &other] {
                let _ = (reader.has_message(), reader.queued(), reader.lost());
                if let Some(message) = self.said(55, reader.receive()).flatten() {
                    touch(&message);
                    owned.push(message.into_owned());
                }
                let mut held = Vec::new();
                let _ = self.said(56, reader.receive_batch(&mut held, 2));
                held.iter().for_each(touch);
                let _ = self.said(57, reader.wait(Some(Duration::ZERO)));
                let _ = self.said(58, reader.send_inline(1, 2, b"answer"));
            }
            let _ = (writer.readers(), self.said(59, writer.receive()).map(drop));
            let _ = self.said(60, writer.recover());
            owned.truncate(3);
        }
        drop(one);
        let sum =
            owned.iter().flat_map(|message| message.msg()).fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        std::hint::black_box(sum);
        drop((writer, other));
        drop(owned);
        let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.log[SLOWEST].fetch_max(micros, Relaxed);
    }

    /// Both sides, from fresh handles; `by_name` attaches as a new process does.
    fn all(&self, by_name: bool) {
        if self.base.mode == RingMode::Broadcast {
            self.use_broadcast();
        }
        if by_name {
            let name = self.base.options().1.parse().expect("a name");
            if let Some(view) = self.said(23, shmesh::inspect::View::open(&self.base.path(), &name)) {
                std::hint::black_box(view.snapshot());
            }
        }
        for side in [Side::Primary, Side::Secondary] {
            let root = if side == Side::Primary { &self.base.primary } else { &self.base.secondary };
            if let Some(link) = self.said(20, root.try_clone()) {
                self.use_all(&link);
            }
            if by_name {
                let (options, name) = self.base.options();
                if let Some(link) = self.said(21, options.prefault(false).attach(name, side)) {
                    let _ = self.said(22, link.receive()).map(drop);
                }
            }
        }
    }
}

fn touch(message: &shmesh::Message<'_>) {
    let sum = message.msg().iter().chain(message.data()).fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    std::hint::black_box((
        sum,
        message.msg_id(),
        message.cell_id(),
        message.data_pool(),
        message.is_inline(),
    ));
}

/// Something of each kind lies in the rings and in hands.
fn furnish(base: &Base) {
    for (from, to) in [(Side::Primary, Side::Secondary), (Side::Secondary, Side::Primary)] {
        let (from, to) = (base.handle(from), base.handle(to));
        for i in 0..2 {
            msg_data(i).send(&from).expect("send");
            drop(to.receive().expect("receive"));
        }
        msg_data(3).send(&from).expect("send");
        world::inline(4).send(&from).expect("send");
    }
    const { assert!(RING_LEN >= 4) };
}

/// A client waits for one request that was taken and answered in part, and for one that was not taken.
fn furnish_requests(base: &Base) {
    let (client, server) = (base.handle(Side::Secondary), base.handle(Side::Primary));
    std::mem::forget(client.request(msg_data(1).loan(&client).expect("a buffer")).expect("room"));
    std::mem::forget(client.request_inline(1, 2, &[7; 8]).expect("room"));
    let mut request = server.receive_request().expect("no damage").expect("it was made");
    request.stream(msg_data(2).loan(&server).expect("a buffer")).expect("room");
    request.stream_inline(1, 2, &[7; 8]).expect("room");
    std::mem::forget(request);
    // Handles of others, which stay.
    std::mem::forget((client, server));
}

/// Waits for a child that must end well, and kills it if it stays at one place for too long.
fn watch(pid: Pid, log: &Words, what: &str) {
    let (mut calls, mut since) = (0, Instant::now());
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG)).expect("wait") {
            WaitStatus::StillAlive => {}
            WaitStatus::Exited(_, 0) => return,
            status => panic!("{what}: {status:?} {}", place(log)),
        }
        let now = log[CALLS].load(Relaxed);
        if now != calls {
            (calls, since) = (now, Instant::now());
        }
        if since.elapsed() > PATIENCE {
            kill(pid, Signal::SIGKILL).expect("kill");
            waitpid(pid, None).expect("wait");
            panic!("{what}: hangs {}", place(log));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn place(log: &Words) -> String {
    let word = |i: usize| log[i].load(Relaxed);
    format!(
        "at segment {} offset {:#x} value {:#x}, after step {}, {} calls",
        word(PLACE),
        word(WORD),
        word(VALUE),
        word(STEP),
        word(CALLS)
    )
}

fn word_by_word(mode: RingMode, every: usize) {
    let base = Base::new(mode);
    furnish(&base);
    each_word(&base, &words(&base), every);
}

/// A writer has sent, and one reader holds a message of each kind.
fn furnish_broadcast(base: &Base) {
    let (writer, reader) = (base.handle(Side::Primary), base.handle(Side::Secondary));
    for i in 0..2 {
        msg_data(i).send(&writer).expect("send");
        world::inline(3).send(&writer).expect("send");
        std::mem::forget((reader.receive().expect("receive"), reader.receive().expect("receive")));
    }
    world::inline(4).send(&reader).expect("send");
    // A handle of another, which stays.
    std::mem::forget(reader);
}

fn broadcast_word_by_word(slow: &[SlowReaders], every: usize) {
    for &slow in slow {
        let base = Base::broadcast(slow);
        furnish_broadcast(&base);
        each_word(&base, &words(&base), every);
    }
}

fn broadcast_while_it_runs(slow: &[SlowReaders], time: Duration) {
    for &slow in slow {
        let base = Base::broadcast(slow);
        furnish_broadcast(&base);
        attack(&base, time);
    }
}

/// The words of the ring of requests, of the reply slots of seats that are taken, and of the cells that requests are in.
fn requests_word_by_word(every: usize) {
    let base = Base::with_requests(RingMode::Mpmc, WINDOW);
    furnish_requests(&base);
    let layout = base.layout();
    let (replies, inline) = (layout.replies(), layout.inline());
    let ring = inline.cells().end + inline.len * LINE..replies.start;
    let slots = replies.start..replies.start + 4 * WINDOW as usize * LINE;
    let of = |segment, range: std::ops::Range<usize>| range.step_by(8).map(move |offset| (segment, offset));
    let cells = |segment, table: Table| of(segment, table.owner(0)..table.owner(2) + LINE);
    let pool = Table::of_pool(MSG_LEN as usize);
    let words: Vec<_> =
        of(0, ring).chain(of(0, slots)).chain(cells(0, inline)).chain(cells(1, pool)).collect();
    each_word(&base, &words, every);
}

fn each_word(base: &Base, words: &[(usize, usize)], every: usize) {
    let before = base.save();
    let mode = base.mode;
    let log = Words::new(16);
    let started = Instant::now();
    // One child goes through all of them; after a crash, the next one goes on behind it.
    let pid = crashpoint::fork_child(|| {
        let victim = Victim { base, log: &log };
        for (i, &(segment, offset)) in words.iter().enumerate().step_by(every) {
            let old = base.segments[segment].word(offset).load(Relaxed);
            // Where there is nothing but zeroes (bitmaps of unused seats), some values will do.
            let boring = old == 0 && i % 16 != 0;
            for value in nasty(old).into_iter().take(if boring { 3 } else { usize::MAX }) {
                base.restore(&before);
                log[PLACE].store(segment as u64, Relaxed);
                log[WORD].store(offset as u64, Relaxed);
                log[VALUE].store(value, Relaxed);
                base.segments[segment].word(offset).store(value, Relaxed);
                victim.all(i % 64 == 0);
            }
        }
        0
    });
    watch(pid, &log, "word by word");
    println!(
        "  {mode:?}: every {every} of {} words, {} calls, {} errors, slowest round {} us, in {:.1} s",
        words.len(),
        log[CALLS].load(Relaxed),
        log[ERRORS].load(Relaxed),
        log[SLOWEST].load(Relaxed),
        started.elapsed().as_secs_f64()
    );
}

/// A value of the kind that lies at such a place, but wrong.
fn plausible(random: &mut Random, old: u64) -> u64 {
    let cell = random.below(u64::from(MSG_LEN) + 2);
    let seat = random.below(6);
    match random.below(10) {
        0 => random.next() << 1 | random.next() & 1,
        1 => *random.pick(&nasty(old)),
        // A MSG owner word.
        2 => (old >> 10 << 10) | seat << 2 | random.below(4),
        // A DATA owner word.
        3 => old >> 42 << 42 | random.below(8) << 22 | cell << 2 | random.below(4),
        // A slot: pooled or inline, of this lap or the next.
        4 => (old >> 32 << 32).wrapping_add(random.below(2) << 32) | random.below(4096) << 20 | cell << 1,
        5 => (old >> 32 << 32) | random.below(128) << 25 | random.below(64) << 19 | cell << 1 | 1,
        // An index.
        6 => old.wrapping_add(random.below(9)).wrapping_sub(4),
        // Lengths, or a reference to DATA.
        7 => random.below(70) << 32 | random.below(70),
        8 => random.below(7) << 32 | random.below(5),
        // Another's word: role, seat, whatever.
        _ => old,
    }
}

fn while_it_runs(mode: RingMode, window: u32, time: Duration) {
    let base = Base::with_requests(mode, window);
    if window == 0 {
        furnish(&base);
    } else {
        furnish_requests(&base);
    }
    attack(&base, time);
}

/// One process writes into the memory of a link while another uses it.
fn attack(base: &Base, time: Duration) {
    let seed = workers::from_env("SHMESH_HOSTILE_SEED").unwrap_or(1);
    let limit = workers::from_env("SHMESH_HOSTILE_SECONDS").map_or(time, Duration::from_secs);
    let mode = base.mode;
    let before = base.save();
    let log = Words::new(16);
    println!("  {mode:?}: SHMESH_HOSTILE_SEED={seed}, {limit:?}");
    let attacker = crashpoint::fork_child(|| {
        let mut random = Random::new(seed);
        let words = words(base);
        // The seats of the two roots are spared most of the time: evicted ones do not do much.
        let spared: Vec<_> = (0..2).map(|seat| (0, base.layout().seat(seat))).collect();
        loop {
            for _ in 0..64 {
                let &(segment, offset) = random.pick(&words);
                if spared.contains(&(segment, offset)) && random.below(1_000) != 0 {
                    continue;
                }
                let word = base.segments[segment].word(offset);
                let value = plausible(&mut random, word.load(Relaxed));
                // Another word of the same kind, moved here.
                let value = if value == word.load(Relaxed) {
                    let &(segment, offset) = random.pick(&words);
                    base.segments[segment].word(offset).load(Relaxed)
                } else {
                    value
                };
                word.store(value, Relaxed);
            }
            for _ in 0..random.below(200) {
                std::hint::spin_loop();
            }
        }
    });
    let victim = crashpoint::fork_child(|| {
        let victim = Victim { base, log: &log };
        let started = Instant::now();
        let mut rounds = 0_u64;
        while started.elapsed() < limit || log[CALLS].load(Relaxed) <= CALLS_MIN {
            // Back to something that works, so that the attack meets all of the code.
            if rounds.is_multiple_of(4) {
                base.restore(&before);
            }
            victim.all(rounds.is_multiple_of(256));
            rounds += 1;
        }
        0
    });
    watch(victim, &log, "while it runs");
    kill(attacker, Signal::SIGKILL).expect("kill");
    waitpid(attacker, None).expect("wait");
    println!(
        "  {mode:?}: {} calls, {} errors, slowest round {} us",
        log[CALLS].load(Relaxed),
        log[ERRORS].load(Relaxed),
        log[SLOWEST].load(Relaxed)
    );
}

/// A bell is a file of the link too: a peer may add as many signals as it likes.
fn doorbell_that_never_ends() {
    let log = Words::new(16);
    let pid = crashpoint::fork_child(|| {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let config = shmesh::config::LinkConfig::new("bell".parse().expect("a name"));
        let link = shmesh::LinkOptions::new().monitor(false).dir(dir.path()).create(&config).expect("create");
        link.fd().expect("a bell");
        let mut files = std::fs::read_dir(dir.path()).expect("the directory").map_while(Result::ok);
        let bell =
            files.find(|file| file.file_name().to_string_lossy().contains(".bell-")).expect("its bell");
        let ringer = shmesh_sys::bell::Ringer::open(&bell.path()).expect("connect");
        for _ in 0..10_000 {
            ringer.ring().expect("ring");
        }
        let started = Instant::now();
        let woken = link.wait(Some(Duration::from_millis(50))).expect("wait");
        assert!(!woken && started.elapsed() < PATIENCE, "{:?}", started.elapsed());
        log[CALLS].store(1, Relaxed);
        0
    });
    watch(pid, &log, "a doorbell that never ends");
}
