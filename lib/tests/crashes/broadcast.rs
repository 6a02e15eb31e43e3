//! The writer or a reader of a broadcast ring dies at every machine instruction. Readers that live get every message once and in
//! order, a writer is not stopped by a dead reader, and the next writer finds all buffers.
//!
//! The living have a state of their own, which is not in shared memory. So they are made anew for each examination, as they were
//! before the operation, and then the memory is put in their hands that the dead one left.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use shmesh::config::{PoolId, RingMode, SlowReaders};
use shmesh::{ErrorKind, Link, Message, SeatIndex, Side};

use crate::crash_points::{Kills, header, one};
use crate::crashpoint::Options;
use crate::harness::{self, long, quick};
use crate::layout::Table;
use crate::scenes::{Case, Scene, forever, send};
use crate::world::{
    Bad, Base, Class, DATA_LEN, Expect, HISTORY, MSG_LEN, Order, PROBE, Progress, RING_LEN, TO_PRIMARY, Tag,
    bad, drain, drop_leaked, inline, loanable, msg, msg_data, wedged, whole_ring,
};

pub(crate) const CASES: &[harness::Case] = &[
    quick("broadcast::crash_points", || all(SlowReaders::Wait, &QUICK)),
    quick("broadcast::evicted_while_it_becomes_the_writer", evicted_while_it_becomes_the_writer),
    long("broadcast::crash_points_of_every_operation_wait", || all(SlowReaders::Wait, &[])),
    long("broadcast::crash_points_of_every_operation_skip", || all(SlowReaders::Skip, &[])),
    long("broadcast::crash_points_of_recovery_wait", || each(SlowReaders::Wait, &recovers(), &[])),
    long("broadcast::crash_points_of_recovery_skip", || each(SlowReaders::Skip, &recovers(), &[])),
    long("broadcast::crash_points_of_an_eviction", || all(SlowReaders::Evict, &[])),
];

/// Those of a hundred thousand instructions: each is examined, and none is killed once more.
const WALKED: [&str; 8] = [
    "the writer leaves",
    "join in a dead reader's seat",
    "leave with a message",
    "leave with an owned message, release it",
    "publish inline, evict a reader",
    "recover a dead reader",
    "the writer recovers a dead reader",
    "recover a dead writer",
];
const QUICK: [&str; 4] = [
    "publish MSG, free what was read",
    "take MSG+DATA",
    "release MSG+DATA",
    "take MSG+DATA and inline, own and release both",
];

fn all(slow: SlowReaders, only: &[&str]) {
    each(slow, &cases(slow), only);
}

fn each(slow: SlowReaders, cases: &[Case], only: &[&str]) {
    let [original, copy] = [(); 2].map(|()| Base::broadcast(slow));
    header();
    let mut failed = Vec::new();
    for case in cases.iter().filter(|case| only.is_empty() || only.contains(&case.name)) {
        original.restore(&original.empty);
        let kills = if WALKED.contains(&case.name) { Kills::None } else { Kills::AtChanges };
        if !one(RingMode::Broadcast, case, &original, &copy, kills, verify) {
            failed.push(case.name);
        }
    }
    assert!(failed.is_empty(), "{slow:?}: {failed:?}");
}

/// With a reader that lives and, if the victim is another one, a writer that does.
fn scene(base: &Base, victim: Side) -> Scene {
    let witness = forever(base.handle(Side::Secondary));
    let mut scene = Scene::on(base, victim);
    scene.witness = Some(witness);
    if victim == Side::Secondary {
        scene.third = Some(forever(base.handle(Side::Primary)));
    }
    scene
}

/// The victim is the writer; the living reader has received what was sent before `unread`.
fn writer(base: &Base, read: &[Tag], unread: &[Tag]) -> Scene {
    let scene = scene(base, Side::Primary);
    publish(&scene, scene.victim, read, unread);
    scene
}

/// The victim is a reader, before which these messages lie.
fn reader(base: &Base, unread: &[Tag]) -> Scene {
    let scene = scene(base, Side::Secondary);
    publish(&scene, scene.third.expect("the writer"), &[], unread);
    scene
}

fn publish(scene: &Scene, writer: &Link, read: &[Tag], unread: &[Tag]) {
    for tag in read {
        tag.send(writer).expect("room");
        drop(scene.witness.expect("a reader").receive().expect("no damage").expect("it was sent"));
    }
    for tag in unread {
        tag.send(writer).expect("room");
    }
}

fn loaned(mut scene: Scene, tag: Tag) -> Scene {
    scene.loans.push(tag.loan(scene.victim).expect("a buffer"));
    scene
}

/// A participant that has died, with all it did, and was recovered.
fn bury(base: &Base, dead: &'static Link) {
    let found = base.primary.participants().find(|other| other.seat == dead.seat()).expect("it is seated");
    base.primary.recover_participant(found.seat, found.word).expect("recover");
}

fn case(
    name: &'static str,
    unread: &[Tag],
    sends: &[Tag],
    prepare: fn(&Base) -> Scene,
    operation: fn(&mut Scene),
) -> Case {
    let waiting = [Vec::new(), unread.to_vec()];
    let expect = Expect { waiting, sends: sends.to_vec(), ..Expect::default() };
    Case { name, expect, prepare, in_child: None, operation }
}

const LAST: [Tag; 1] = [inline(20)];
const EARLIER: [Tag; 2] = [msg(20), msg_data(21)];
const RING: [Tag; 4] = [msg(10), msg_data(11), inline(12), msg_data(13)];
const WAITING: [Tag; 3] = [msg_data(1), inline(2), msg(3)];
const INLINE: [Tag; 2] = [inline(2), inline(3)];

fn cases(slow: SlowReaders) -> Vec<Case> {
    if slow == SlowReaders::Evict {
        return vec![evicts()];
    }
    let mut cases = vec![
        case(
            "publish MSG+DATA",
            &LAST,
            &[msg_data(1)],
            |base| loaned(writer(base, &[], &LAST), msg_data(1)),
            send,
        ),
        case(
            "publish inline",
            &LAST,
            &[inline(2)],
            |base| writer(base, &[], &LAST),
            |s| s.result = inline(2).send(s.victim),
        ),
        case(
            "publish MSG, free what was read",
            &[],
            &[msg(1)],
            |base| loaned(writer(base, &RING, &[]), msg(1)),
            send,
        ),
        case(
            "publish inline again round the ring",
            &[],
            &[inline(2)],
            |base| writer(base, &RING, &[]),
            |s| s.result = inline(2).send(s.victim),
        ),
        case(
            "first MSG of the next writer",
            &EARLIER,
            &[msg(1)],
            |base| {
                let scene = scene(base, Side::Primary);
                publish(&scene, &base.handle(Side::Primary), &RING, &EARLIER);
                scene
            },
            |s| s.result = msg(1).send(s.victim),
        ),
        case(
            "first MSG after a dead writer",
            &EARLIER,
            &[msg(1)],
            |base| {
                let scene = scene(base, Side::Primary);
                let dead = forever(base.handle(Side::Primary));
                publish(&scene, dead, &RING, &EARLIER);
                bury(base, dead);
                scene
            },
            |s| s.result = msg(1).send(s.victim),
        ),
        case(
            "loan MSG+DATA, free what was read",
            &[],
            &[],
            |base| writer(base, &[msg_data(1), msg_data(2), msg_data(3)], &[]),
            |s| match s.victim.loan_with(PoolId::CpuData) {
                Ok(loan) => s.loans.push(loan),
                Err(error) => s.result = Err(error),
            },
        ),
        case(
            "the writer leaves",
            &EARLIER,
            &[],
            |base| {
                let mut scene = scene(base, Side::Primary);
                let leaver = base.handle(Side::Primary);
                publish(&scene, &leaver, &RING, &EARLIER);
                scene.leaver = Some(leaver);
                scene
            },
            |s| drop(s.leaver.take()),
        ),
        case("take MSG+DATA", &WAITING, &[], |base| reader(base, &WAITING), Scene::receive),
        case("take inline", &INLINE, &[], |base| reader(base, &INLINE), Scene::receive),
        case(
            "release MSG+DATA",
            &WAITING,
            &[],
            |base| {
                let mut scene = reader(base, &WAITING);
                scene.receive();
                assert_eq!(scene.messages.len(), 1);
                scene
            },
            |s| drop(s.messages.pop()),
        ),
        case(
            "take MSG+DATA and inline, own and release both",
            &WAITING,
            &[],
            |base| reader(base, &WAITING),
            |s| {
                let owned = [(); 2].map(|()| s.victim.receive().map(|found| found.map(Message::into_owned)));
                drop(owned);
            },
        ),
        case(
            "leave with an owned message, release it",
            &WAITING,
            &[],
            |base| {
                let mut scene = scene(base, Side::Secondary);
                scene.leaver = Some(base.handle(Side::Secondary));
                publish(&scene, scene.third.expect("the writer"), &[], &WAITING);
                scene
            },
            |s| {
                let leaver = s.leaver.take().expect("it is prepared");
                let owned = leaver.receive().map(|found| found.map(Message::into_owned));
                drop(leaver);
                drop(owned);
            },
        ),
        case(
            "take 3, release the last one first",
            &WAITING,
            &[],
            |base| reader(base, &WAITING),
            |s| {
                (0..3).for_each(|_| s.receive());
                while let Some(message) = s.messages.pop() {
                    drop(message);
                }
            },
        ),
        case(
            "join in a dead reader's seat",
            &WAITING,
            &[],
            |base| {
                let scene = scene(base, Side::Secondary);
                let dead = forever(base.handle(Side::Secondary));
                bury(base, dead);
                publish(&scene, scene.third.expect("the writer"), &[], &WAITING);
                scene
            },
            |s| match s.victim.try_clone() {
                Ok(link) => std::mem::forget(link),
                Err(error) => s.result = Err(error),
            },
        ),
        case(
            "leave with a message",
            &WAITING,
            &[],
            |base| {
                let mut scene = scene(base, Side::Secondary);
                let leaver = base.handle(Side::Secondary);
                publish(&scene, scene.third.expect("the writer"), &[], &WAITING);
                std::mem::forget(leaver.receive());
                scene.leaver = Some(leaver);
                scene
            },
            |s| drop(s.leaver.take()),
        ),
    ];
    if slow == SlowReaders::Skip {
        cases.push(case(
            "take when overtaken",
            &[],
            &[],
            |base| {
                let scene = scene(base, Side::Secondary);
                publish(&scene, scene.third.expect("the writer"), &RING, &[]);
                publish(&scene, scene.third.expect("the writer"), &RING, &[]);
                scene
            },
            |s| {
                s.receive();
                s.receive();
            },
        ));
    }
    cases
}

/// A reader holds the writer up for longer than it may.
fn evicts() -> Case {
    case(
        "publish inline, evict a reader",
        &[],
        &[inline(2)],
        |base| {
            let scene = scene(base, Side::Primary);
            let slow = forever(base.handle(Side::Secondary));
            publish(&scene, scene.victim, &RING, &[]);
            std::mem::forget(slow.receive());
            inline(2).send(scene.victim).expect_err("a reader has read nothing");
            std::thread::sleep(Duration::from_millis(2));
            scene
        },
        |s| s.result = inline(2).send(s.victim),
    )
}

/// The participant that recovers a dead one, which had its hands full, dies too.
fn recovers() -> Vec<Case> {
    let case = |name, unread: &[Tag], prepare| {
        let mut case = case(name, unread, &[], prepare, Scene::recover);
        case.expect.waiting[TO_PRIMARY] = vec![inline(30)];
        case
    };
    vec![
        case("recover a dead reader", &WAITING, |base| with_dead_reader(base, scene(base, Side::Secondary))),
        case("the writer recovers a dead reader", &WAITING, |base| {
            with_dead_reader(base, scene(base, Side::Primary))
        }),
        case("recover a dead writer", &EARLIER, |base| {
            let mut scene = Scene::on(base, Side::Secondary);
            scene.witness = Some(forever(base.handle(Side::Secondary)));
            let dead = forever(base.handle(Side::Primary));
            for tag in RING {
                publish(&scene, dead, &[tag], &[]);
                drop(scene.victim.receive().expect("no damage").expect("it was sent"));
            }
            publish(&scene, dead, &[], &EARLIER);
            std::mem::forget(msg_data(32).loan(dead).expect("buffers"));
            inline(30).send(scene.victim).expect("room");
            scene.dead = Some(dead);
            scene
        }),
    ]
}

fn with_dead_reader(base: &Base, mut scene: Scene) -> Scene {
    let dead = forever(base.handle(Side::Secondary));
    publish(&scene, scene.third.unwrap_or(scene.victim), &[], &WAITING);
    // Received and kept: a buffer of each pool, and an owned message.
    std::mem::forget(dead.receive().expect("no damage").expect("it was sent"));
    std::mem::forget(dead.receive().expect("no damage").expect("it was sent").into_owned());
    std::mem::forget(msg_data(32).loan(dead).expect("buffers"));
    inline(30).send(dead).expect("room");
    scene.dead = Some(dead);
    scene
}

fn verify(base: &Base, case: &Case, order: Order) -> Result<Progress, Bad> {
    let crashed = base.save();
    base.restore(&base.empty);
    let scene = (case.prepare)(base);
    base.restore(&crashed);
    let (witness, writer) = (scene.witness.expect("a reader that lives"), scene.third);
    // It is dead: what it had is not dropped.
    std::mem::forget(scene);
    let progress = examine(base, case, order, witness, writer)?;
    drop_leaked(witness);
    if let Some(writer) = writer {
        drop_leaked(writer);
    }
    let seats: Vec<_> = base.primary.participants().map(|other| other.seat).collect();
    if seats != [base.primary.seat(), base.secondary.seat()] {
        return bad(Class::Leaked, format!("seats {seats:?} are taken"));
    }
    Ok(progress)
}

/// Everything that a newcomer gets, which must be the last messages: as many as the history has, and one more if the writer
/// died before it had counted it.
fn join(base: &Base, all: &[Tag]) -> Result<Link, Bad> {
    let newcomer = base.handle(Side::Secondary);
    let mut got = Vec::new();
    drain(&newcomer, &mut got)?;
    let is_enough = got.len() >= all.len().min(HISTORY as usize) && got.len() <= HISTORY as usize + 1;
    if !is_enough || !all.is_empty() && !all.ends_with(&got) && !got.ends_with(all) {
        return bad(Class::Lost, format!("a newcomer got {got:?} of {all:?}"));
    }
    Ok(newcomer)
}

fn recover_but(base: &Base, living: &[SeatIndex]) -> Result<(), Bad> {
    let reaper = base.handle(Side::Primary);
    let is_dead = |seat| {
        ![base.primary.seat(), base.secondary.seat(), reaper.seat()].contains(&seat)
            && !living.contains(&seat)
    };
    let dead: Vec<_> = reaper.participants().filter(|other| is_dead(other.seat)).collect();
    for dead in dead {
        reaper.recover_participant(dead.seat, dead.word).map_err(wedged("recover"))?;
    }
    Ok(())
}

fn examine(
    base: &Base,
    case: &Case,
    order: Order,
    witness: &'static Link,
    writer: Option<&'static Link>,
) -> Result<Progress, Bad> {
    let skips = base.slow == SlowReaders::Skip;
    let living: Vec<_> = std::iter::once(witness).chain(writer).map(Link::seat).collect();
    if order == Order::RecoverFirst {
        recover_but(base, &living)?;
    }
    let mut all = Vec::new();
    drain(witness, &mut all)?;
    let waited = &case.expect.waiting[1];
    let sent = match all.strip_prefix(waited.as_slice()) {
        Some(rest) if case.expect.sends.starts_with(rest) => rest.len(),
        _ => {
            let what = format!("waited {waited:?}, then {:?}, received {all:?}", case.expect.sends);
            return bad(Class::Lost, what);
        }
    };
    if order == Order::WorkFirst {
        drop(join(base, &all)?);
        if let Some(writer) = writer {
            for i in 0..3 * u64::from(RING_LEN) {
                let tag = [inline(PROBE + i), msg(PROBE + i)][usize::from(i % 2 == 1)];
                match tag.send(writer) {
                    Ok(()) => all.push(tag),
                    // It is not known to be dead yet.
                    Err(error)
                        if !skips
                            && matches!(
                                error.kind(),
                                ErrorKind::Full { .. } | ErrorKind::Exhausted { .. }
                            ) =>
                    {
                        break;
                    }
                    Err(error) => return Err(wedged("send beside the dead one")(error)),
                }
                gets(witness, tag)?;
            }
        }
        recover_but(base, &living)?;
    }

    let newcomer = join(base, &all)?;
    let successor;
    let writer = match writer {
        Some(writer) => writer,
        None => {
            successor = base.handle(Side::Primary);
            &successor
        }
    };
    for i in 0..3 * u64::from(RING_LEN) + 1 {
        let n = PROBE + 100 + i;
        let tag = [msg(n), inline(n), msg_data(n)][usize::try_from(i % 3).unwrap_or(0)];
        tag.send(writer).map_err(wedged("send, and all have read what was sent"))?;
        gets(witness, tag)?;
        gets(&newcomer, tag)?;
    }
    drop(newcomer);
    if !skips {
        whole_ring(writer, witness, (0..=u64::from(RING_LEN)).map(|i| msg(PROBE + 200 + i)))?;
    }
    let mut answers = Vec::new();
    drain(writer, &mut answers)?;
    let waited = &case.expect.waiting[TO_PRIMARY];
    if answers != *waited {
        return bad(Class::Lost, format!("the writer waited for {waited:?}, and received {answers:?}"));
    }
    // What newcomers get has no buffer.
    let last = inline(PROBE + 300);
    last.send(writer).map_err(wedged("send"))?;
    gets(witness, last)?;
    for (name, pool, len) in [("cpu_msg", None, MSG_LEN), ("cpu_data", Some(PoolId::CpuData), DATA_LEN)] {
        for link in [writer, witness] {
            let found = loanable(link, pool)?;
            if found != len {
                return bad(Class::Leaked, format!("{found} of {len} buffers of {name} can be loaned"));
            }
        }
    }
    for tag in [inline(PROBE + 400), msg_data(PROBE + 401)] {
        tag.send(witness).map_err(wedged("answer"))?;
        gets(writer, tag)?;
    }
    if witness.lost() != 0 {
        return bad(Class::Lost, format!("the reader that lives has lost {}", witness.lost()));
    }
    Ok(Progress { sent, taken: 0 })
}

/// This message, and no other.
fn gets(link: &Link, tag: Tag) -> Result<(), Bad> {
    let mut got = Vec::new();
    drain(link, &mut got)?;
    if got == [tag] { Ok(()) } else { bad(Class::Lost, format!("{tag:?} was sent, and {got:?} received")) }
}

/// A participant is evicted at any instruction of its first message, by which it becomes the writer. When it goes on, what it had
/// is another's, or it still has it.
fn evicted_while_it_becomes_the_writer() {
    let base = Base::broadcast(SlowReaders::Wait);
    let name = "evicted in the first MSG of a writer";
    let scene = Rc::new(RefCell::new(loaned(scene(&base, Side::Primary), msg(1))));
    let before = base.save();
    let operation = |scene: &mut Rc<RefCell<Scene>>| send(&mut scene.borrow_mut());
    let (mut seen, mut points) = (before.clone(), vec![0]);
    let walked = Options::new(name).walk(
        || Rc::clone(&scene),
        operation,
        |_, point| {
            if !base.is(&seen) {
                seen = base.save();
                points.extend([point.k - 1, point.k]);
            }
            Ok(ControlFlow::Continue(()))
        },
    );
    let steps = usize::try_from(walked.unwrap_or_else(|failures| panic!("{failures}")).operation_steps);
    points.extend((0..).step_by((steps.expect("a count") / 40).max(1)).take(40));
    points.sort_unstable();
    points.dedup();
    let table = Table::of_pool(MSG_LEN as usize);
    let word = |cell: u32| base.segments[1].word(table.owner(cell as usize)).load(Relaxed);
    let loaned = RefCell::new(Vec::new());
    let interrupted = Options::new(name).only(points).interrupt(
        || {
            base.restore(&before);
            Rc::clone(&scene)
        },
        operation,
        |scene, _| {
            let scene = scene.borrow();
            let other = scene.witness.expect("a reader");
            match other.evict(scene.victim.seat()) {
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::StillAlive { .. }) => {}
                Err(error) => return Err(error.to_string()),
            }
            let all = std::iter::from_fn(|| other.loan().ok()).map(|loan| {
                let cell = loan.index();
                std::mem::forget(loan);
                (cell, word(cell))
            });
            *loaned.borrow_mut() = all.collect();
            Ok(())
        },
        |_, _| match loaned.borrow().iter().find(|(cell, held)| word(*cell) != *held) {
            Some((cell, _)) => Err(format!("cell {cell} was taken from its holder")),
            None => Ok(()),
        },
    );
    let interrupted = interrupted.unwrap_or_else(|failures| panic!("{failures}"));
    assert!(interrupted.points >= 40, "{} points", interrupted.points);
}
