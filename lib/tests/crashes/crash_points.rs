//! A participant dies at every machine instruction of every operation, and the survivors must not notice.
//!
//! Each operation is walked through instruction by instruction; after each, the shared memory is copied and
//! examined from fresh handles, as if the participant had been killed there. Where an instruction changed
//! nothing in shared memory, its predecessor's verdict holds for it. Then the operation is run again and really
//! killed: at each instruction around a change, and at every so many others (`SHMESH_CRASH_STRIDE`).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::crashpoint::{self, Options, Point};
use crate::harness::{self, long, quick};
use crate::scenes::{self, Case, Extent, Scene};
use crate::world::{self, Bad, Base, Class, Order, Progress, Snapshot};
use shmesh::Side;
use shmesh::config::RingMode;

pub(crate) const CASES: &[harness::Case] = &[
    quick("crash_points::mpmc", || all(RingMode::Mpmc, Extent::Few)),
    quick("crash_points::spsc", || all(RingMode::Spsc, Extent::Few)),
    quick("crash_points::detach_sampled", || sampled(&[1_000, 10_000])),
    long("crash_points::detach_sampled_late", || sampled(&[30_000, 60_000, 90_000])),
    long("crash_points::mpmc_every_operation", || all(RingMode::Mpmc, Extent::All)),
    long("crash_points::spsc_every_operation", || all(RingMode::Spsc, Extent::All)),
    long("crash_points::attach_by_name", attach_by_name),
];

/// One line of the table.
#[derive(Default)]
struct Tally {
    /// Instructions after which the participant was taken for dead.
    points: u64,
    /// Different states of the shared memory among them.
    states: u64,
    /// Number of real kills.
    kills: u64,
    bad: BTreeMap<Class, u64>,
    time: Duration,
}

static TABLE: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Tally {
    fn row(&self, mode: RingMode, name: &str) {
        let bad = |class| self.bad.get(&class).copied().unwrap_or(0);
        let row = format!(
            "{:5} {name:32} {:>8} {:>6} {:>6} {:>6} {:>5} {:>7} {:>6} {:>7} {:>6.2}",
            format!("{mode:?}").to_lowercase(),
            self.points,
            self.states,
            self.kills,
            bad(Class::Wedged),
            bad(Class::Lost),
            bad(Class::Doubled),
            bad(Class::Leaked),
            bad(Class::Damaged),
            self.time.as_secs_f64(),
        );
        println!("{row}");
        TABLE.lock().expect("one thread").push(row);
    }

    fn is_good(&self) -> bool {
        self.bad.is_empty()
    }
}

pub(crate) fn header() {
    println!(
        "mode  operation                          points states  kills wedged  lost doubled leaked damaged      s"
    );
}

/// Points between two real kills where nothing changes.
fn stride() -> u64 {
    std::env::var("SHMESH_CRASH_STRIDE").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000)
}

fn all(mode: RingMode, extent: Extent) {
    let (original, copy) = (Base::new(mode), Base::new(mode));
    let empty = original.save();
    header();
    let mut failed = Vec::new();
    for case in &scenes::chosen(mode, extent) {
        original.restore(&empty);
        let good = one(mode, case, &original, &copy, Kills::AtChanges, VERIFY);
        if !good {
            failed.push(case.name);
        }
    }
    assert!(failed.is_empty(), "{mode:?}: {failed:?}");
}

/// Examines a copy of what a dead participant left, in both orders.
struct Examiner<'a> {
    copy: &'a Base,
    case: &'a Case,
    verify: Verify,
    tally: Tally,
    said: u32,
    last: Progress,
    /// All points are of one run, so what was sent stays sent.
    one_run: bool,
}

impl Examiner<'_> {
    fn examine(&mut self, bytes: &Snapshot, point: Point) {
        world::guard(60);
        for order in [Order::RecoverFirst, Order::WorkFirst] {
            self.copy.restore(bytes);
            match (self.verify)(self.copy, self.case, order) {
                Ok(progress) => {
                    let back =
                        self.one_run && (progress.sent < self.last.sent || progress.taken < self.last.taken);
                    let whole =
                        Progress { sent: self.case.expect.sends.len(), taken: self.case.expect.takes };
                    if back
                        || point.k == 0 && progress != Progress::default()
                        || point.finished && progress != whole
                    {
                        self.note(
                            Class::Lost,
                            point,
                            &format!("{order:?}: {progress:?} after {:?}", self.last),
                        );
                    }
                    self.last = progress;
                }
                Err(bad) => self.note(bad.class, point, &format!("{order:?}: {}", bad.what)),
            }
        }
    }

    fn note(&mut self, class: Class, point: Point, what: &str) {
        *self.tally.bad.entry(class).or_default() += 1;
        self.said += 1;
        if self.said <= 6 {
            println!("  {} after {} instructions: {class:?}: {what}", self.case.name, point.k);
            println!("      at {}", crashpoint::locate(point.rip));
        }
    }
}

/// Detaching takes some hundred thousand instructions: kills at a few of them.
fn sampled(points: &'static [u64]) {
    let (original, copy) = (Base::new(RingMode::Mpmc), Base::new(RingMode::Mpmc));
    header();
    assert!(one(RingMode::Mpmc, &scenes::detach(), &original, &copy, Kills::Sample(points), VERIFY));
}

/// Where the operation is really killed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kills {
    /// Nowhere: it is walked through only.
    None,
    /// Around each change of the shared memory, and in strides, after it was walked through.
    AtChanges,
    /// At these instructions, and nowhere else is it examined.
    Sample(&'static [u64]),
}

/// Examines what a dead participant left.
pub(crate) type Verify = fn(&Base, &Case, Order) -> Result<Progress, Bad>;

const VERIFY: Verify = |base, case, order| world::verify(base, &case.expect, order);

pub(crate) fn one(
    mode: RingMode,
    case: &Case,
    original: &Base,
    copy: &Base,
    kills: Kills,
    verify: Verify,
) -> bool {
    let started = Instant::now();
    let scene = Rc::new(RefCell::new((case.prepare)(original)));
    let before = original.save();
    crashpoint::prepare_in_child(case.in_child.map(|prepare| -> Box<dyn Fn()> {
        let scene = Rc::clone(&scene);
        Box::new(move || prepare(&mut scene.borrow_mut()))
    }));
    let mut examiner = Examiner {
        copy,
        case,
        verify,
        tally: Tally::default(),
        said: 0,
        last: Progress::default(),
        one_run: true,
    };
    let operation = |scene: &mut Rc<RefCell<Scene>>| (case.operation)(&mut scene.borrow_mut());

    let points = if let Kills::Sample(points) = kills {
        points.to_vec()
    } else {
        let (mut seen, mut changes) = (before.clone(), vec![0]);
        let walked = Options::new(case.name).walk(
            || Rc::clone(&scene),
            operation,
            |_, point| {
                if point.k == 0 || point.finished || !original.is(&seen) {
                    seen = original.save();
                    changes.extend([point.k.saturating_sub(1), point.k]);
                    examiner.tally.states += 1;
                    examiner.examine(&seen, point);
                }
                Ok(ControlFlow::Continue(()))
            },
        );
        let walked = walked.unwrap_or_else(|failures| panic!("{failures}"));
        examiner.tally.points = walked.points;
        let stride = usize::try_from(stride().max(walked.operation_steps / 8)).unwrap_or(usize::MAX);
        changes.extend((0..=walked.operation_steps).step_by(stride));
        changes.sort_unstable();
        changes.dedup();
        if kills == Kills::None { Vec::new() } else { changes }
    };
    examiner.one_run = false;
    let killed = Options::new(case.name).only(points).enumerate(
        || {
            original.restore(&before);
            Rc::clone(&scene)
        },
        operation,
        |_, point| {
            examiner.examine(&original.save(), point);
            Ok(())
        },
    );
    let killed = killed.unwrap_or_else(|failures| panic!("{failures}"));
    crashpoint::prepare_in_child(None);
    examiner.tally.kills = killed.points;
    examiner.tally.time = started.elapsed();
    examiner.tally.row(mode, case.name);
    examiner.tally.is_good()
}

/// Attaching as a process does it: files, lock, mapping, seat, recovery of a dead predecessor, and for the
/// primary its role. That takes hundreds of thousands of instructions, so two of the four kinds are walked, unless
/// `SHMESH_CRASH_FULL` is set; real kills in the middle of it are for `killer`.
fn attach_by_name() {
    header();
    let full = std::env::var_os("SHMESH_CRASH_FULL").is_some();
    let kills = if full { Kills::AtChanges } else { Kills::None };
    let mut good = true;
    for (mode, side, always) in [
        (RingMode::Mpmc, Side::Secondary, true),
        (RingMode::Spsc, Side::Primary, true),
        (RingMode::Mpmc, Side::Primary, false),
        (RingMode::Spsc, Side::Secondary, false),
    ] {
        if always || full {
            let (original, copy) = (Base::new(mode), Base::new(mode));
            good &= one(mode, &scenes::attach_by_name(side), &original, &copy, kills, VERIFY);
            // What the kernel kept for the dead must not stand in the way of the living.
            let (options, name) = original.options();
            options.timeout(Duration::from_secs(60)).attach(name, side).expect("attach after the deaths");
        }
    }
    assert!(good);
}
