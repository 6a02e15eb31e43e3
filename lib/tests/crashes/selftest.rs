//! Does the crash-point harness find what it is for? Protocols with known holes must fail at the right
//! points, a sound one nowhere, and an operation that does not end must not hang the test.

#![expect(
    unsafe_code,
    reason = "UNSAFETY: anonymous shared memory and raw system calls for the harness to work on"
)]

use std::num::NonZeroUsize;
use std::ops::{ControlFlow, Deref};
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use crate::crashpoint::{self, Failures, Kind, Options, Point, Report};
use crate::harness::{self, long, quick};
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use nix::sys::signal::kill;
use nix::sys::wait::wait;
use nix::unistd::Pid;

pub(crate) const CASES: &[harness::Case] = &[
    quick("selftest::busy_flag_is_left_behind", busy_flag_is_left_behind),
    long("selftest::vyukov_push_wedges_the_consumer", vyukov_push_wedges_the_consumer),
    quick("selftest::single_cas_has_no_bad_point", single_cas_has_no_bad_point),
    long("selftest::runs_of_different_length_are_survived", runs_of_different_length_are_survived),
    long("selftest::shards_cover_all_points", shards_cover_all_points),
    long("selftest::steps_jumps_and_walk_agree", steps_jumps_and_walk_agree),
    quick("selftest::walk_stops_early", walk_stops_early),
    quick("selftest::endless_operation_is_reported", endless_operation_is_reported),
    quick("selftest::blocked_operation_is_reported", blocked_operation_is_reported),
    quick("selftest::panic_and_death_are_reported", panic_and_death_are_reported),
    quick("selftest::system_calls_are_single_steps", system_calls_are_single_steps),
    long("selftest::panicking_check_is_a_failure", panicking_check_is_a_failure),
    long("selftest::signal_handlers_run", signal_handlers_run),
    quick("selftest::threads_are_refused", threads_are_refused),
];

/// Words in shared anonymous memory, all zero at first.
struct Words<const N: usize>(NonNull<[AtomicUsize; N]>);

impl<const N: usize> Words<N> {
    fn new() -> Self {
        let bytes = NonZeroUsize::new(size_of::<[AtomicUsize; N]>()).expect("at least one word");
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, placed by the kernel.
        let memory = unsafe { mmap_anonymous(None, bytes, access, MapFlags::MAP_SHARED) }.expect("mmap");
        Self(memory.cast())
    }

    fn copy(&self) -> [usize; N] {
        std::array::from_fn(|i| self[i].load(SeqCst))
    }
}

impl<const N: usize> Deref for Words<N> {
    type Target = [AtomicUsize; N];

    fn deref(&self) -> &Self::Target {
        // SAFETY: mapped until drop, page-aligned, and zeroes are valid atomics.
        unsafe { self.0.as_ref() }
    }
}

impl<const N: usize> Drop for Words<N> {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and no reference outlives `self`.
        let _unmapped = unsafe { munmap(self.0.cast(), size_of::<[AtomicUsize; N]>()) };
    }
}

/// No child may be left, alive or dead, whatever the outcome.
fn assert_no_child() {
    assert_eq!(wait(), Err(Errno::ECHILD));
}

fn failures(result: Result<Report, Failures>) -> Failures {
    assert_no_child();
    let failures = result.expect_err("this must fail");
    println!("  {} failures in {}", failures.total, failures.report);
    failures
}

fn passed(result: Result<Report, Failures>) -> Report {
    assert_no_child();
    let report = result.expect("this must pass");
    println!("  {report}");
    report
}

/// A flag, two words that must stay equal, and the flag again: unsafe against death by design.
fn flagged_update(words: &mut Words<3>) {
    words[0].store(1, Release);
    words[1].fetch_add(1, AcqRel);
    words[2].fetch_add(1, AcqRel);
    words[0].store(0, Release);
}

fn busy_flag_is_left_behind() {
    let (mut busy_points, mut torn_points, mut finished_points) = (Vec::new(), 0, 0);
    let result = crashpoint::enumerate("busy flag", Words::<3>::new, flagged_update, |words, point| {
        finished_points += u64::from(point.finished);
        let [busy, left, right] = words.copy();
        assert!(busy == 1 || left == right, "torn only while busy");
        torn_points += u64::from(left != right);
        if busy == 1 {
            busy_points.push(point.k);
            return Err(format!("busy for ever, {left} and {right}"));
        }
        Ok(())
    });
    let failures = failures(result);
    assert!(failures.kept.iter().all(|f| f.kind == Kind::Check && !f.point.finished));
    assert_eq!(failures.total, busy_points.len() as u64);
    // Three stores lie between the flag's two: at least as many points, and all in one run.
    assert!(busy_points.len() >= 3, "{busy_points:?}");
    assert!(busy_points.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{busy_points:?}");
    assert!(torn_points >= 1, "no point between the two updates");
    assert_eq!(finished_points, 1);
    assert!(failures.report.points > failures.total && busy_points[0] > 0);
    let text = failures.to_string();
    assert!(text.contains("crashes"), "no module and offset in {text}");
}

/// Bounded queue after Vyukov: two slots of (sequence, value), then tail and head.
struct Vyukov(Words<6>);

impl Vyukov {
    const TAIL: usize = 4;
    const HEAD: usize = 5;

    fn new() -> Self {
        let words = Words::new();
        words[2].store(1, Relaxed);
        Self(words)
    }

    fn push(&self, value: usize) -> bool {
        let mut tail = self.0[Self::TAIL].load(Relaxed);
        loop {
            let slot = tail % 2 * 2;
            let sequence = self.0[slot].load(Acquire);
            if sequence == tail {
                match self.0[Self::TAIL].compare_exchange(tail, tail + 1, Relaxed, Relaxed) {
                    Ok(_) => {
                        self.0[slot + 1].store(value, Relaxed);
                        self.0[slot].store(tail + 1, Release);
                        return true;
                    }
                    Err(now) => tail = now,
                }
            } else if sequence < tail {
                return false;
            } else {
                tail = self.0[Self::TAIL].load(Relaxed);
            }
        }
    }

    fn pop(&self) -> Option<usize> {
        let head = self.0[Self::HEAD].load(Relaxed);
        let slot = head % 2 * 2;
        if self.0[slot].load(Acquire) != head + 1 {
            return None;
        }
        self.0[Self::HEAD].store(head + 1, Relaxed);
        let value = self.0[slot + 1].load(Relaxed);
        self.0[slot].store(head + 2, Release);
        Some(value)
    }
}

fn vyukov_push_wedges_the_consumer() {
    let (mut wedged, mut before, mut after) = (Vec::new(), 0, 0);
    let result = crashpoint::enumerate(
        "Vyukov push",
        Vyukov::new,
        |queue| assert!(queue.push(7)),
        |queue, point| {
            if !queue.push(8) {
                return Err("the queue has one free slot and refuses".to_owned());
            }
            match (queue.pop(), queue.pop()) {
                (Some(7), Some(8)) => after += 1,
                (Some(8), None) => before += 1,
                (None, None) => {
                    wedged.push(point.k);
                    return Err("claimed but not published: the consumer gets nothing".to_owned());
                }
                other => panic!("{other:?}"),
            }
            Ok(())
        },
    );
    let failures = failures(result);
    assert_eq!(failures.total, wedged.len() as u64);
    assert!(!wedged.is_empty() && wedged.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{wedged:?}");
    assert!(before > 1 && after >= 1);
    assert_eq!(before + after + failures.total, failures.report.points);
}

/// Two counters in one word, advanced by one compare-exchange: before or after, nothing between.
fn single_cas(words: &mut Words<1>) {
    let mut now = words[0].load(Acquire);
    while let Err(other) = words[0].compare_exchange(now, now + (1 << 32) + 1, AcqRel, Acquire) {
        now = other;
    }
}

fn check_single_cas(words: Words<1>, point: Point) -> Result<(), String> {
    assert_eq!(kill(Pid::from_raw(point.pid), None), Err(Errno::ESRCH), "reaped before the check");
    match words.copy() {
        [0] if point.finished => Err("finished, but nothing is done".to_owned()),
        [0 | 0x1_0000_0001] => Ok(()),
        [other] => Err(format!("torn: {other:#x}")),
    }
}

fn single_cas_has_no_bad_point() {
    let report = passed(crashpoint::enumerate("single CAS", Words::new, single_cas, check_single_cas));
    assert!(report.points > 5 && report.points < 1000, "{report}");
    assert_eq!(report.points, report.operation_steps + 1, "points 0 to the last step");
    let n = report.operation_steps;
    assert!(report.jumps > n / 2 && report.steps_total < 3 * n, "breakpoints save steps: {report}");
    // The rehearsal and, for each point k, k steps.
    let options = Options::new("single CAS, stepped").stepwise();
    let stepped = passed(options.enumerate(Words::new, single_cas, check_single_cas));
    assert_eq!((stepped.points, stepped.jumps), (report.points, 0));
    assert_eq!(stepped.steps_total, n + n * (n + 1) / 2);
}

fn runs_of_different_length_are_survived() {
    // Of three children one takes a longer path than the rehearsal, one a shorter one.
    let mut count = 0;
    let setup = || {
        count += 1;
        let words = Words::<2>::new();
        words[1].store([2, 4, 1][count % 3], Relaxed);
        words
    };
    let operation = |words: &mut Words<2>| {
        for _ in 0..words[1].load(Relaxed) {
            words[0].fetch_add(1, Relaxed);
        }
    };
    let report = passed(crashpoint::enumerate("different", setup, operation, |words, point| {
        let [done, wanted] = words.copy();
        if point.finished == (done == wanted) || done == wanted {
            Ok(())
        } else {
            Err(format!("{done} {point:?}"))
        }
    }));
    assert!(report.points > report.jumps && report.jumps > 0, "{report}");
}

fn shards_cover_all_points() {
    let whole = passed(crashpoint::enumerate("whole", Words::new, single_cas, check_single_cas));
    let mut seen = Vec::new();
    for index in 0..3 {
        passed(Options::new("shard").shard(index, 3).enumerate(Words::new, single_cas, |words, point| {
            seen.push(point.k);
            check_single_cas(words, point)
        }));
    }
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.iter().copied().eq(0..whole.points), "{seen:?}");
}

/// Loops, a call for each word, and a string instruction.
fn fill(words: &mut Words<64>) {
    for round in 1..3 {
        for word in words[..2].iter() {
            word.fetch_add(round, Relaxed);
        }
    }
    // SAFETY: writes the last 48 words of 64.
    unsafe {
        std::arch::asm!(
            "rep stosq",
            inout("rcx") 48_usize => _,
            inout("rdi") words[16..].as_ptr() => _,
            in("rax") 5_usize,
        );
    }
    words[8].store(1, Release);
}

fn same_in_all_ways<const N: usize>(name: &str, operation: fn(&mut Words<N>)) {
    let record = |options: Options| {
        let mut states = Vec::new();
        let report = passed(options.enumerate(Words::<N>::new, operation, |words, point| {
            states.push((point.k, point.finished, point.rip, words.copy()));
            Ok(())
        }));
        (report, states)
    };
    let (jumped, by_jumps) = record(Options::new(name));
    assert_eq!((jumped.points, jumped.jumps), (jumped.operation_steps + 1, jumped.operation_steps));
    // Stepping all the way is slow: every fifth point, and the last.
    let (stepped, by_steps) = record(Options::new(name).stepwise().shard(2, 5));
    assert!(stepped.jumps == 0 && by_steps.len() as u64 > jumped.points / 5);
    for state in &by_steps {
        assert!(by_jumps.contains(state), "{state:?} by steps only");
    }
    let mut by_walk = Vec::new();
    let walked = passed(crashpoint::walk(name, Words::<N>::new, operation, |words, point| {
        by_walk.push((point.k, point.finished, point.rip, words.copy()));
        Ok(ControlFlow::Continue(()))
    }));
    assert_eq!(by_walk, by_jumps);
    assert_eq!((walked.points, walked.operation_steps), (jumped.points, jumped.operation_steps));
    assert_eq!(walked.steps_total, walked.operation_steps);
}

fn steps_jumps_and_walk_agree() {
    same_in_all_ways("busy flag", flagged_update);
    same_in_all_ways("fill", fill);

    // A long one, for the speed.
    const ROUNDS_COUNT: usize = if cfg!(debug_assertions) { 500 } else { 50_000 };
    let spin = |words: &mut Words<1>| {
        for _ in 0..ROUNDS_COUNT {
            words[0].fetch_add(1, Relaxed);
        }
    };
    let mut last = 0;
    let long = passed(crashpoint::walk("long", Words::<1>::new, spin, |words, _| {
        let [now] = words.copy();
        let grown = now - last;
        last = now;
        if grown <= 1 { Ok(ControlFlow::Continue(())) } else { Err(format!("{grown} additions in one step")) }
    }));
    assert_eq!(last, ROUNDS_COUNT);
    assert!(long.points > ROUNDS_COUNT as u64);
}

fn walk_stops_early() {
    let report = passed(crashpoint::walk("early", Words::<1>::new, endless, |_, point| {
        Ok(if point.k == 99 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }));
    assert_eq!((report.points, report.steps_total), (100, 99));
    let failed = failures(crashpoint::walk("early", Words::<1>::new, endless, |_, point| {
        if point.k == 9 { Err("enough".to_owned()) } else { Ok(ControlFlow::Continue(())) }
    }));
    assert_eq!((failed.total, failed.report.points), (1, 10));
}

fn endless(words: &mut Words<1>) {
    while words[0].load(Acquire) == 0 {
        std::hint::spin_loop();
    }
}

fn endless_operation_is_reported() {
    let options = Options::new("endless").max_steps(2_000);
    let failed = failures(options.enumerate(Words::<1>::new, endless, |_, _| Ok(())));
    assert!(failed.total == 1 && failed.has(Kind::NotTerminated));
    assert_eq!(failed.report.steps_total, 2_000);
    let failed = failures(options.walk(Words::<1>::new, endless, |_, _| Ok(ControlFlow::Continue(()))));
    assert!(failed.total == 1 && failed.has(Kind::NotTerminated));
}

fn blocked_operation_is_reported() {
    let started = Instant::now();
    let options = Options::new("blocked").step_timeout(Duration::from_secs(1));
    let failed = failures(options.enumerate(
        || (),
        |()| {
            // SAFETY: sleeps until a signal comes.
            unsafe { libc::pause() };
        },
        |(), _| Ok(()),
    ));
    assert!(failed.has(Kind::Blocked) && failed.kept[0].message.contains("system call 34"));
    assert!(started.elapsed() < Duration::from_secs(60));
}

fn panic_and_death_are_reported() {
    let failed = failures(crashpoint::enumerate("panic", || (), |()| panic!("on purpose"), |(), _| Ok(())));
    assert!(failed.total == 1 && failed.has(Kind::Panicked));
    let failed = failures(crashpoint::enumerate("exit", || (), |()| std::process::exit(3), |(), _| Ok(())));
    assert!(failed.has(Kind::Died) && failed.kept[0].message.contains("exited with status 3"));
    let wild = |_: &mut ()| {
        // SAFETY: none; the fault is the purpose.
        unsafe { std::arch::asm!("mov byte ptr [{address}], 0", address = in(reg) 8_usize) };
    };
    let failed = failures(crashpoint::enumerate("wild", || (), wild, |(), _| Ok(())));
    assert!(failed.has(Kind::Died) && failed.kept[0].message.contains("signal 11"));
    let undefined = |_: &mut ()| {
        // SAFETY: none; the fault is the purpose, and it must not be taken for the end marker.
        unsafe { std::arch::asm!("ud2") };
    };
    let failed = failures(crashpoint::enumerate("undefined", || (), undefined, |(), _| Ok(())));
    assert!(failed.has(Kind::Died) && failed.kept[0].message.contains("signal 4"));
}

fn system_calls_are_single_steps() {
    let call = |words: &mut Words<2>| {
        words[0].store(1, SeqCst);
        // SAFETY: harmless.
        unsafe { libc::syscall(libc::SYS_sched_yield) };
        words[1].store(1, SeqCst);
    };
    let mut between = 0;
    let report = passed(crashpoint::enumerate("system call", Words::<2>::new, call, |words, point| {
        between += u64::from(words.copy() == [1, 0]);
        if words.copy() == [0, 1] || (point.finished && words.copy() != [1, 1]) {
            return Err(format!("{:?}", words.copy()));
        }
        Ok(())
    }));
    assert!(between >= 3 && report.points < 1000, "{between} of {report}");
}

fn panicking_check_is_a_failure() {
    let check = |_: Words<1>, point: Point| {
        assert_ne!(point.k, 4, "this point");
        Ok(())
    };
    let failed = failures(crashpoint::enumerate("check", Words::new, single_cas, check));
    assert!(
        failed.total == 1 && failed.kept[0].point.k == 4 && failed.kept[0].message.contains("this point")
    );
    assert!(failed.report.points > 5);
}

extern "C" fn on_signal(_signal: libc::c_int) {
    HANDLED.store(1, SeqCst);
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);

fn signal_handlers_run() {
    let operation = |words: &mut Words<1>| {
        let handler: extern "C" fn(libc::c_int) = on_signal;
        // SAFETY: the handler only stores to an atomic.
        unsafe {
            libc::signal(libc::SIGUSR1, handler as libc::sighandler_t);
            libc::raise(libc::SIGUSR1);
        }
        words[0].store(HANDLED.load(SeqCst), SeqCst);
    };
    let report = passed(crashpoint::enumerate("signal", Words::<1>::new, operation, |words, point| {
        if words.copy()[0] == usize::from(point.finished) || words.copy() == [1] {
            Ok(())
        } else {
            Err("the handler did not run".to_owned())
        }
    }));
    assert!(report.points < 5000, "{report}");
    assert_eq!(HANDLED.load(SeqCst), 0, "only the child's copy changes");
}

fn threads_are_refused() {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let second = std::thread::spawn(move || stopped.recv());
    let refused = std::panic::catch_unwind(|| {
        crashpoint::enumerate("threads", || (), |()| (), |(), _| Ok(())).map(|report| report.points)
    });
    drop(stop);
    assert!(second.join().is_ok_and(|received| received.is_err()));
    assert!(refused.is_err(), "fork beside a second thread");
    // The kernel may still count a thread that has been joined.
    while std::fs::metadata("/proc/self/task")
        .is_ok_and(|task| std::os::unix::fs::MetadataExt::nlink(&task) > 3)
    {
        std::thread::yield_now();
    }
    assert_no_child();
}
