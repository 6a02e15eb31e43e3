//! A participant stands still anywhere, for as long as it likes, and then goes on.
//!
//! - *Paused*: others work meanwhile. Its operation must still end right: nothing lost, nothing twice.
//! - *Evicted*: others declare it dead, take back what it held and use it. When it goes on, each of its calls fails
//!   with `Evicted`; it frees nothing twice, sends nothing stale and leaves the others' messages alone.
//!
//! Stopped by ptrace at every instruction in an optimised build; in a debug build, where an operation has thousands,
//! at those around a change of shared memory and a few hundred others (`SHMESH_FREEZE_POINTS`). And by SIGSTOP at
//! random instants of real traffic (`SHMESH_FREEZE_SEED`, `SHMESH_FREEZES`).

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::crashpoint::{self, Options, Point};
use crate::harness::{self, long, quick};
use crate::random::Random;
use crate::scenes::{self, Case, Extent, Scene};
use crate::shared::Words;
use crate::world::{
    self, Base, DATA_LEN, Expect, Kind, MSG_LEN, Order, Snapshot, Tag, drop_leaked, inline, msg, msg_data,
    verify,
};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use shmesh::config::{PoolId, RingMode};
use shmesh::{Error, ErrorKind, Link, Loan, Side};

pub(crate) const CASES: &[harness::Case] = &[
    quick("frozen::paused_mpmc", || paused(RingMode::Mpmc, Extent::Few)),
    quick("frozen::paused_spsc", || paused(RingMode::Spsc, Extent::Few)),
    // Each operation is followed by every other call, so one takes seconds.
    quick("frozen::evicted", || evicted(Extent::One)),
    quick("frozen::evicted_in_traffic", || evicted_in_traffic(40)),
    quick("frozen::living_participant_is_not_evicted_in_spsc", living_participant_is_not_evicted_in_spsc),
    // The longest first.
    long("frozen::evicted_in_every_operation", || evicted(Extent::All)),
    long("frozen::paused_in_every_operation_mpmc", || paused(RingMode::Mpmc, Extent::All)),
    long("frozen::paused_in_every_operation_spsc", || paused(RingMode::Spsc, Extent::All)),
    long("frozen::evicted_in_much_traffic", || evicted_in_traffic(200)),
];

/// The child's report: the result of the operation, the messages received, and how its later calls ended.
struct Report(Words);

const RESULT: usize = 0;
const LATER: usize = 1;
const COUNT: usize = 2;
const OVER: usize = 3;
const TAGS: usize = 4;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    Nowhere,
    Well,
    Evicted,
    /// A full ring, or no buffer.
    Refused,
    Otherwise,
}

fn ended(result: &Result<(), &Error>) -> Outcome {
    match result {
        Ok(()) => Outcome::Well,
        Err(error) => match error.kind() {
            ErrorKind::Evicted { .. } => Outcome::Evicted,
            _ if error.is_retryable() => Outcome::Refused,
            _ => Outcome::Otherwise,
        },
    }
}

impl Report {
    fn clear(&self) {
        for i in 0..self.0.len() {
            self.0[i].store(0, Relaxed);
        }
    }

    /// The child had come further than the operation: runs differ in a few instructions, of the allocator for one.
    fn is_over(&self) -> bool {
        self.0[OVER].load(Relaxed) != 0
    }

    fn result(&self) -> Outcome {
        [Outcome::Nowhere, Outcome::Well, Outcome::Evicted, Outcome::Refused, Outcome::Otherwise]
            [usize::try_from(self.0[RESULT].load(Relaxed)).unwrap_or(0)]
    }

    fn received(&self) -> Vec<Tag> {
        let count = usize::try_from(self.0[COUNT].load(Relaxed)).unwrap_or(0);
        (0..count).map(|i| Tag(self.0[TAGS + i].load(Relaxed))).collect()
    }

    /// In the child, after the operation.
    fn write(&self, scene: &Scene) {
        self.0[OVER].store(1, Relaxed);
        self.0[RESULT].store(ended(&scene.result.as_ref().map(|_| ())) as u64, Relaxed);
        for (i, message) in scene.messages.iter().enumerate() {
            let tag = Tag::read(message).unwrap_or(Tag(u64::MAX));
            self.0[TAGS + i].store(tag.0, Relaxed);
        }
        self.0[COUNT].store(scene.messages.len() as u64, Relaxed);
    }

    /// In the child: makes every call there is and drops what it holds. Counts the calls that did not say `Evicted`.
    fn try_everything(&self, scene: &mut Scene) {
        let link = scene.victim;
        let mut wrong = 0;
        let mut must_fail = |result: shmesh::Result<()>| {
            if ended(&result.as_ref().map(|_| ())) != Outcome::Evicted {
                wrong += 1;
            }
        };
        for mut loan in scene.loans.drain(..) {
            must_fail(loan.resize_msg(16).map(|bytes| bytes.fill(0xee)));
            if loan.data_pool().is_some() {
                must_fail(loan.resize_data(16).map(|bytes| bytes.fill(0xee)));
            }
            must_fail(loan.with_msg_id(-1).with_cell_id(-1).send().map_err(Into::into));
        }
        scene.messages.clear();
        must_fail(link.loan().map(drop));
        must_fail(link.loan_with(PoolId::CpuData).map(drop));
        must_fail(link.send_inline(1, 1, b"stale"));
        must_fail(link.receive().map(drop));
        must_fail(link.receive_batch(&mut Vec::new(), 4).map(drop));
        must_fail(link.wait(Some(Duration::ZERO)).map(drop));
        must_fail(link.recover().map(drop));
        must_fail(link.evict(link.seat()).map(drop));
        self.0[LATER].store(wrong, Relaxed);
    }
}

fn points_max() -> u64 {
    std::env::var("SHMESH_FREEZE_POINTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(if cfg!(debug_assertions) { 16 } else { 400 })
}

/// Without those that undo what others do meanwhile, on another's behalf: `crash_points` has them.
fn chosen(mode: RingMode, extent: Extent) -> Vec<Case> {
    let mut cases = scenes::chosen(mode, extent);
    cases
        .retain(|case| !["recover", "evict", "detach", "attach"].iter().any(|skip| case.name.contains(skip)));
    cases
}

/// The points at which to stop: all, if there are not too many; else those around changes and a selection.
fn points(case: &Case, base: &Base, before: &Snapshot, scene: &Rc<RefCell<Scene>>) -> Vec<u64> {
    let mut seen = before.clone();
    let mut points = vec![0];
    let walked = Options::new(case.name).walk(
        || Rc::clone(scene),
        |scene: &mut Rc<RefCell<Scene>>| (case.operation)(&mut scene.borrow_mut()),
        |_, point| {
            if !base.is(&seen) {
                seen = base.save();
                points.extend([point.k - 1, point.k]);
            }
            Ok(ControlFlow::Continue(()))
        },
    );
    let steps = walked.unwrap_or_else(|failures| panic!("{failures}")).operation_steps;
    let stride = (steps / points_max()).max(1);
    points.extend((0..=steps).step_by(usize::try_from(stride).unwrap_or(1)));
    points.sort_unstable();
    points.dedup();
    points
}

/// The work of others while the participant is stopped.
struct Meanwhile {
    p: &'static Link,
    s: Option<&'static Link>,
    loans: Vec<Loan<'static>>,
    /// Messages that were received and sent meanwhile, by direction.
    got: [Vec<Tag>; 2],
    sent: [Vec<Tag>; 2],
}

impl Meanwhile {
    fn new(base: &Base) -> Self {
        let leak = |side| -> &'static Link { Box::leak(Box::new(base.handle(side))) };
        let s = (!base.single()).then(|| leak(Side::Secondary));
        Self { p: leak(Side::Primary), s, loans: Vec::new(), got: [vec![], vec![]], sent: [vec![], vec![]] }
    }

    fn leave(mut self) -> ([Vec<Tag>; 2], [Vec<Tag>; 2]) {
        self.loans.clear();
        drop_leaked(self.p);
        if let Some(s) = self.s {
            drop_leaked(s);
        }
        (self.got, self.sent)
    }
}

fn receive_all(link: &Link, got: &mut Vec<Tag>) -> Result<(), String> {
    for _ in 0..40 {
        match link.receive() {
            Ok(Some(message)) => got.push(Tag::read(&message).map_err(|bad| bad.to_string())?),
            Ok(None) => return Ok(()),
            Err(error) => return Err(format!("receive: {error}")),
        }
    }
    Err(format!("messages without end: {got:?}"))
}

fn paused(mode: RingMode, extent: Extent) {
    let base = Base::new(mode);
    let empty = base.save();
    let mut failed = Vec::new();
    for case in chosen(mode, extent) {
        base.restore(&empty);
        let scene = Rc::new(RefCell::new((case.prepare)(&base)));
        let before = base.save();
        let points = points(&case, &base, &before, &scene);
        let report = Report(Words::new(16));
        let meanwhile = RefCell::new(None);
        let done = Options::new(case.name).only(points).interrupt(
            || {
                base.restore(&before);
                report.clear();
                Rc::clone(&scene)
            },
            |scene| {
                let mut scene = scene.borrow_mut();
                (case.operation)(&mut scene);
                report.write(&scene);
            },
            |_, point| {
                world::guard(60);
                *meanwhile.borrow_mut() = Some(work(&base, point)?);
                Ok(())
            },
            |_, _| {
                let meanwhile = meanwhile.borrow_mut().take().expect("it was made");
                check_paused(&base, &case, &report, meanwhile)
            },
        );
        match done {
            Ok(report) => println!("  paused {mode:?} {}: {report}", case.name),
            Err(failures) => {
                println!("{failures}");
                failed.push(case.name);
            }
        }
    }
    assert!(failed.is_empty(), "{mode:?}: {failed:?}");
}

/// A little of everything, beside a participant that stands still.
fn work(base: &Base, point: Point) -> Result<Meanwhile, String> {
    let mut now = Meanwhile::new(base);
    let odd = point.k % 2 == 1;
    receive_all(now.p, &mut now.got[world::TO_PRIMARY])?;
    if let Some(s) = now.s {
        // At some points it takes all, at others the one message that the other may be about to take.
        match s.receive() {
            Ok(Some(message)) => {
                now.got[world::TO_SECONDARY].push(Tag::read(&message).map_err(|bad| bad.to_string())?)
            }
            Ok(None) => {}
            Err(error) => return Err(format!("receive: {error}")),
        }
        if odd {
            receive_all(s, &mut now.got[world::TO_SECONDARY])?;
        }
        for tag in [msg(600), inline(601)] {
            if tag.send(s).is_ok() {
                now.sent[world::TO_PRIMARY].push(tag);
            }
        }
    }
    for i in 0..6 {
        let tag = if i % 3 == 1 { msg(700 + i) } else { inline(700 + i) };
        match tag.send(now.p) {
            Ok(()) => now.sent[world::TO_SECONDARY].push(tag),
            Err(error) if error.is_retryable() => {}
            Err(error) => return Err(format!("send: {error}")),
        }
    }
    let mut loans = Vec::new();
    while let Ok(loan) = now.p.loan() {
        loans.push(loan);
    }
    Ok(now)
}

fn is_in_order(part: &[Tag], whole: &[Tag]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|tag| whole.any(|other| other == tag))
}

fn check_paused(base: &Base, case: &Case, report: &Report, meanwhile: Meanwhile) -> Result<(), String> {
    let taken = report.received();
    let (got, sent) = meanwhile.leave();
    world::recover(base).map_err(|bad| bad.to_string())?;
    let (p, s) = (base.handle(Side::Primary), base.handle(Side::Secondary));
    let mut late = [Vec::new(), Vec::new()];
    receive_all(&p, &mut late[0])?;
    receive_all(&s, &mut late[1])?;
    drop((p, s));

    let whole: Vec<_> = case.expect.waiting[1].iter().chain(&sent[1]).copied().collect();
    let all: Vec<_> = [&taken, &got[1], &late[1]].into_iter().flatten().copied().collect();
    if !is_in_order(&taken, &whole)
        || !is_in_order(&[&got[1][..], &late[1]].concat(), &whole)
        || sorted(&all) != sorted(&whole)
    {
        return Err(format!(
            "to the secondary: sent {whole:?}; it took {taken:?}, others {:?} and then {:?}",
            got[1], late[1]
        ));
    }
    let mut own = sends(case);
    if report.result() != Outcome::Well {
        own.clear();
    }
    let arrived = [&got[0][..], &late[0]].concat();
    let whole: Vec<_> = case.expect.waiting[0].iter().chain(&own).chain(&sent[0]).copied().collect();
    let by =
        |tags: &[Tag]| arrived.iter().filter(|tag| tags.contains(tag)).copied().collect::<Vec<_>>() == tags;
    if sorted(&arrived) != sorted(&whole) || !by(&case.expect.waiting[0]) || !by(&own) || !by(&sent[0]) {
        return Err(format!("to the primary: sent {whole:?} ({:?}); received {arrived:?}", report.result()));
    }
    if report.result() == Outcome::Otherwise {
        return Err("the operation failed".into());
    }
    verify(base, &Expect::default(), Order::RecoverFirst).map(drop).map_err(|bad| bad.to_string())
}

/// The messages that the operation sends if others make room meanwhile.
fn sends(case: &Case) -> Vec<Tag> {
    match case.name {
        "send into a full ring" => vec![msg_data(1)],
        "send inline into a full ring" => vec![inline(1)],
        _ => case.expect.sends.clone(),
    }
}

fn sorted(tags: &[Tag]) -> Vec<Tag> {
    let mut tags = tags.to_vec();
    tags.sort();
    tags
}

fn evicted(extent: Extent) {
    let base = Base::new(RingMode::Mpmc);
    let empty = base.save();
    let mut failed = Vec::new();
    println!("operation                         points  damaged-window  ok-but-dropped  failed");
    for case in chosen(RingMode::Mpmc, extent) {
        base.restore(&empty);
        let scene = Rc::new(RefCell::new((case.prepare)(&base)));
        let before = base.save();
        let points = points(&case, &base, &before, &scene);
        let report = Report(Words::new(16));
        let meanwhile = RefCell::new(None);
        let (mut windows, mut dropped) = (Vec::new(), 0);
        let done = Options::new(case.name).only(points).interrupt(
            || {
                base.restore(&before);
                report.clear();
                Rc::clone(&scene)
            },
            |scene| {
                let mut scene = scene.borrow_mut();
                (case.operation)(&mut scene);
                report.write(&scene);
                report.try_everything(&mut scene);
            },
            |_, _| {
                world::guard(60);
                if !report.is_over() {
                    *meanwhile.borrow_mut() = Some(evict_and_reuse(&base, &scene.borrow())?);
                }
                Ok(())
            },
            |_, point| {
                let Some(meanwhile) = meanwhile.borrow_mut().take() else { return Ok(()) };
                let found = check_evicted(&base, &case, &report, meanwhile)?;
                windows.extend(found.late_write.then_some(point.k));
                dropped += u64::from(found.dropped);
                Ok(())
            },
        );
        match done {
            Ok(report) => {
                println!("{:34}{:>6} {:>15} {dropped:>15} {:>7}", case.name, report.points, windows.len(), 0);
                // A write that was under way may arrive late: that is said in the documentation of `evict`. Only
                // operations that write a message in a buffer can do it.
                if !windows.is_empty() && !case.name.contains("loan") && !case.name.contains("again") {
                    println!("  {} wrote into another's message, at {windows:?}", case.name);
                    failed.push(case.name);
                }
            }
            Err(failures) => {
                println!(
                    "{:34}{:>6} {:>15} {dropped:>15} {:>7}",
                    case.name,
                    failures.report.points,
                    windows.len(),
                    failures.total
                );
                println!("{failures}");
                failed.push(case.name);
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Declares the one that stands still dead, loans everything there is, and sends a part of it.
fn evict_and_reuse(base: &Base, scene: &Scene) -> Result<Meanwhile, String> {
    let mut now = Meanwhile::new(base);
    now.p.evict(scene.victim.seat()).map_err(|error| format!("evict: {error}"))?;
    let s = now.s.expect("many producers");
    receive_all(now.p, &mut now.got[0])?;
    receive_all(s, &mut now.got[1])?;
    for i in 0..u64::from(MSG_LEN) {
        let tag = if i < u64::from(DATA_LEN) { msg_data(800 + i) } else { msg(800 + i) };
        now.loans.push(tag.loan(now.p).map_err(|error| format!("leaked: loan {i} after eviction: {error}"))?);
    }
    for tag in [inline(900), inline(901)] {
        tag.send(s).map_err(|error| format!("send: {error}"))?;
        now.sent[0].push(tag);
    }
    now.loans.drain(..2).try_for_each(Loan::send).map_err(|error| format!("send: {error}"))?;
    inline(902).send(now.p).map_err(|error| format!("send: {error}"))?;
    now.sent[1].extend([msg_data(800), msg_data(801), inline(902)]);
    Ok(now)
}

#[derive(Default)]
struct FrozenResult {
    /// Another's message was overwritten by a write that had begun before the eviction.
    late_write: bool,
    /// The operation reported a message as sent that no receiver will get.
    dropped: bool,
}

fn check_evicted(
    base: &Base,
    case: &Case,
    report: &Report,
    mut now: Meanwhile,
) -> Result<FrozenResult, String> {
    let mut found = FrozenResult::default();
    match report.0[LATER].load(Relaxed) {
        0 => {}
        wrong => return Err(format!("{wrong} calls did not say Evicted afterwards")),
    }
    // The others send what they hold; all of it arrives, as it was written.
    let s = now.s.expect("many producers");
    let (mut arrived, mut at_primary) = (Vec::new(), Vec::new());
    let mut take = |link: &Link, into: &mut Vec<Tag>| -> Result<(), String> {
        while let Some(message) = link.receive().map_err(|error| format!("receive: {error}"))? {
            match Tag::read(&message) {
                // It wrote all of its own message into a buffer that was another's by then.
                Ok(tag) if tag.kind() == Kind::Inline || !case.expect.sends.contains(&tag) => into.push(tag),
                _ => {
                    found.late_write = true;
                    into.push(Tag(u64::MAX - into.len() as u64));
                }
            }
        }
        Ok(())
    };
    take(s, &mut arrived)?;
    for loan in now.loans.drain(..) {
        let sent = loan.send();
        sent.map_err(|error| format!("send: {error}"))?;
        take(s, &mut arrived)?;
    }
    take(now.p, &mut at_primary)?;
    for i in 2..u64::from(MSG_LEN) {
        now.sent[1].push(if i < u64::from(DATA_LEN) { msg_data(800 + i) } else { msg(800 + i) });
    }
    // What the evicted one had received counts as received, be it before or in the same breath.
    let (got, sent) = now.leave();
    let in_hands: BTreeSet<_> = report.received().into_iter().collect();
    let damaged = |tags: &[Tag]| tags.iter().filter(|tag| tag.0 > u64::MAX / 2).count();
    let came: Vec<_> = arrived.iter().filter(|tag| tag.0 < u64::MAX / 2).copied().collect();
    let expected: Vec<_> = sent[1].iter().filter(|tag| !in_hands.contains(tag)).copied().collect();
    if !is_in_order(&came, &expected) || came.len() + damaged(&arrived) != expected.len() {
        return Err(format!(
            "the others sent {expected:?}, received {arrived:?}, and {in_hands:?} went to the evicted one"
        ));
    }
    let distinct: BTreeSet<_> = got[1].iter().chain(&in_hands).collect();
    if distinct.len() != got[1].len() + in_hands.len() {
        return Err(format!("doubled: {in_hands:?} and {:?}", got[1]));
    }
    // To the primary: what waited, what the evicted one sent in time, what the others sent.
    let all: Vec<_> = [&got[0][..], &at_primary].concat();
    let foreign: Vec<_> = all
        .iter()
        .filter(|tag| !case.expect.waiting[0].contains(tag) && !sent[0].contains(tag))
        .copied()
        .collect();
    // An inline message has no buffer that could have been taken away: its call ends as it had begun.
    let in_one_breath = case.name == "send inline into a full ring" && foreign == [inline(1)];
    if !case.expect.sends.starts_with(&foreign) && !in_one_breath {
        return Err(format!("stale: {foreign:?} of {all:?}"));
    }
    let mut own = all.clone();
    own.retain(|tag| !foreign.contains(tag));
    if sorted(&own) != sorted(&[&case.expect.waiting[0][..], &sent[0]].concat()) {
        return Err(format!("to the primary arrived {all:?}"));
    }
    found.dropped = report.result() == Outcome::Well && foreign.len() < case.expect.sends.len();
    // It has ended: everything is there again, its seat too.
    verify(base, &Expect::default(), Order::RecoverFirst).map_err(|bad| bad.to_string())?;
    Ok(found)
}

fn count(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Words that the child and its jailer share.
const WRITING: usize = 0;
const READY: usize = 1;
const DONE: usize = 2;

/// The exit code of a child all of whose calls said what they should.
const AS_EXPECTED: i32 = 42;

fn evicted_in_traffic(freezes: u64) {
    let (seed, freezes) = (count("SHMESH_FREEZE_SEED", 1), count("SHMESH_FREEZES", freezes));
    println!("  seed {seed}, {freezes} freezes");
    let mut random = Random::new(seed);
    let base = Base::new(RingMode::Mpmc);
    let flags = Words::new(8);
    let (mut windows, mut held) = (0, 0);
    let started = Instant::now();
    for round in 0..freezes {
        world::guard(60);
        for i in 0..flags.len() {
            flags[i].store(0, Relaxed);
        }
        let child_seed = random.next();
        let pid = crashpoint::fork_child(|| inmate(&base, &flags, child_seed));
        while flags[READY].load(Relaxed) == 0 {
            std::thread::yield_now();
        }
        // Traffic from this side until the instant comes.
        let p = base.handle(Side::Primary);
        let until = Instant::now() + Duration::from_micros(random.below(2_000));
        let mut number = 0;
        while Instant::now() < until {
            traffic(&p, &mut number);
        }
        kill(pid, Signal::SIGSTOP).expect("stop");
        let status = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).expect("wait");
        assert!(matches!(status, WaitStatus::Stopped(..)), "round {round}: {status:?}");
        let writing = flags[WRITING].load(Relaxed) != 0;
        let before = flags[DONE].load(Relaxed);
        windows += u64::from(writing);

        let seat = p
            .participants()
            .find(|other| other.word.pid() == pid.as_raw().cast_unsigned())
            .expect("its seat")
            .seat;
        let back = p.evict(seat).expect("evict");
        held += back.messages;
        let mut got = Vec::new();
        receive_all(&p, &mut got).expect("what it had sent is whole");
        // From now on the buffers are ours.
        let s = base.handle(Side::Secondary);
        receive_all(&s, &mut got).expect("what it had not received is whole");
        let mut loans: Vec<_> = (0..u64::from(MSG_LEN))
            .map(|i| {
                if i < u64::from(DATA_LEN) { msg_data(i) } else { msg(i) }
                    .loan(&p)
                    .expect("all buffers are back")
            })
            .collect();
        loans.drain(..2).for_each(|loan| loan.send().expect("send"));

        kill(pid, Signal::SIGCONT).expect("continue");
        let status = waitpid(pid, None).expect("wait");
        assert_eq!(status, WaitStatus::Exited(pid, AS_EXPECTED), "round {round} of seed {seed}");

        let mut intact = 0;
        let mut check = || {
            loop {
                match s.receive() {
                    Ok(None) => break,
                    Ok(Some(message)) => match Tag::read(&message) {
                        Ok(tag) => assert!(tag.kind() != Kind::Inline, "stale: {tag:?}"),
                        Err(bad) => assert!(writing, "round {round} of seed {seed}: {bad}"),
                    },
                    // The late write was the reference to its DATA buffer.
                    Err(error) => assert!(writing, "round {round} of seed {seed}: {error}"),
                }
                intact += 1;
            }
        };
        check();
        for loan in loans {
            loan.send().expect("send");
            check();
        }
        // It may have received, in the call that was under way, what we sent meanwhile.
        let taken = u32::try_from(flags[DONE].load(Relaxed) - before).expect("a count");
        assert!(intact + taken >= MSG_LEN && intact <= MSG_LEN, "{intact} arrived, it took {taken}");
        // Of what it was sending when it was stopped, an inline message may come: late, but whole and once.
        let mut late = Vec::new();
        receive_all(&p, &mut late).expect("whole");
        assert!(
            late.len() <= 1 && late.iter().all(|tag| tag.kind() == Kind::Inline && !got.contains(tag)),
            "stale: {late:?}"
        );
        assert!(
            p.participants().any(|other| other.seat == seat),
            "taken until it has ended and is recovered"
        );
        p.recover().expect("recover");
        assert!(!p.participants().any(|other| other.seat == seat), "its seat is free");
        drop((p, s));
        verify(&base, &Expect::default(), Order::RecoverFirst)
            .unwrap_or_else(|bad| panic!("round {round} of seed {seed}: {bad}"));
    }
    println!(
        "  {freezes} freezes in {:.1} s, {held} messages taken back, {windows} times while it wrote",
        started.elapsed().as_secs_f64()
    );
}

fn traffic(link: &Link, number: &mut u64) {
    *number += 1;
    let _ = Tag(*number).send(link);
    if let Ok(Some(message)) = link.receive() {
        Tag::read(&message).expect("whole");
    }
}

/// The child: attaches, works, holds loans and messages, and counts on being evicted.
fn inmate(base: &Base, flags: &Words, seed: u64) -> i32 {
    world::be_myself();
    let mut random = Random::new(seed);
    let (options, name) = base.options();
    let Ok(link) = options.attach(name, Side::Secondary) else { return 1 };
    let link: &'static Link = Box::leak(Box::new(link));
    let (mut loans, mut messages) = (Vec::new(), Vec::new());
    flags[READY].store(1, Relaxed);
    let mut number = 1 << 20;
    let error = loop {
        number += 1;
        let step = match random.below(5) {
            // Writing: from before the loan, whose descriptor is cleared, until it is complete.
            0 | 1 => {
                flags[WRITING].store(1, Relaxed);
                let tag = Tag(number | 1);
                let tag = if tag.kind() == Kind::Inline { Tag(tag.0 + 1) } else { tag };
                let loan = tag.loan(link);
                flags[WRITING].store(0, Relaxed);
                loan.map(|loan| {
                    if loans.len() < 2 {
                        loans.push(loan)
                    }
                })
            }
            2 => match loans.pop() {
                Some(loan) => loan.send().map_err(Into::into),
                None => inline(number).send(link),
            },
            3 => link.receive().map(|message| {
                flags[DONE].fetch_add(u64::from(message.is_some()), Relaxed);
                messages.extend(message);
            }),
            _ => {
                messages.clear();
                Ok(())
            }
        };
        match step {
            Err(error) if error.is_retryable() => {}
            Err(error) => break error,
            Ok(()) if messages.len() > 2 => drop(messages.pop()),
            Ok(()) => {}
        }
    };
    if ended(&Err(&error)) != Outcome::Evicted {
        eprintln!("the inmate: {error}");
        return 2;
    }
    let report = Report(Words::new(16));
    let mut scene = Scene {
        victim: link,
        loans: Vec::new(),
        messages: Vec::new(),
        pending: Vec::new(),
        requests: Vec::new(),
        leaver: None,
        third: None,
        dead: None,
        witness: None,
        options: base.options(),
        result: Ok(()),
    };
    drop((loans, messages));
    report.try_everything(&mut scene);
    if report.0[LATER].load(Relaxed) != 0 {
        eprintln!("the inmate: {} calls were not refused", report.0[LATER].load(Relaxed));
        return 3;
    }
    AS_EXPECTED
}

fn living_participant_is_not_evicted_in_spsc() {
    let base = Base::new(RingMode::Spsc);
    let flags = Words::new(8);
    let pid = crashpoint::fork_child(|| {
        flags[READY].store(1, Relaxed);
        loop {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let error = base.primary.evict(base.secondary.seat()).expect_err("it lives");
    assert!(matches!(error.kind(), ErrorKind::StillAlive { seat: 1, .. }), "{error}");
    kill(pid, Signal::SIGKILL).expect("kill");
    waitpid(pid, None).expect("wait");
}
