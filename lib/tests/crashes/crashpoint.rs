//! Crash-point enumeration: an operation on shared memory is stopped after every machine instruction, its
//! process is killed there, and the survivor checks what is left.
//!
//! The operation runs in a forked child that the parent single-steps with ptrace. Two labels in assembly
//! bound the counted region, so a point is an instruction of the operation (and of the few around the call),
//! never of the harness. Point 0 lies before the first instruction; the last point, `finished`, after the
//! operation has returned.
//!
//! - [`enumerate`] kills for real at each point: one child per point. A rehearsal records the path; a
//!   hardware breakpoint then brings each child close to its point at full speed, and single steps do the
//!   rest. Where the run leaves the recorded path, or with [`Options::stepwise`], the child is stepped all
//!   the way: quadratic.
//! - [`Options::interrupt`] does not kill at the point: it lets the caller work on the shared memory while the
//!   child stands there, and then has the child run on to the end.
//! - [`walk`] steps one child through and shows every point to the caller while the child is stopped but
//!   alive: linear. The caller copies the shared memory and checks the copy.
//!
//! Rules for the caller:
//!
//! - The process must have one thread, for `fork`: a test is a case of
//!   [`harness`](crate::harness). More than one thread is refused with a panic.
//! - The world must be reached through `MAP_SHARED` memory and inherited descriptors; all else is the child's
//!   own copy, of which the parent sees nothing. Captured variables of `operation` therefore do not change in
//!   the parent.
//! - `setup` also runs once for the rehearsal, which finds endless, blocked and panicking operations before
//!   any killing begins (as far as the last of the points of [`Options::only`]), and again where a run left the path. Those worlds are dropped unchecked.
//! - The child never drops its world, not even when the operation has finished: it is killed there like
//!   everywhere else.
//! - Parent and child share one processor meanwhile, for speed. Threads that `check` starts inherit that, and
//!   must have ended when it returns.
//! - The operation may make system calls (one step each), but must not start threads or processes, nor
//!   execute another program.

// UNSAFETY: fork, ptrace and an entry point in assembly: no safe interface stops a process between two
// instructions.
#![expect(unsafe_code, reason = "fork, raw ptrace and waitpid, an interval timer and two labels in assembly")]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("crash points are single-stepped on x86_64 Linux only");

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_int, c_long, c_void};
use std::fmt;
use std::mem::{MaybeUninit, offset_of};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::ptr;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::sys::prctl;
use nix::sys::ptrace;
use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};
use nix::unistd::{ForkResult, Pid, fork, getppid};

/// How many failures are kept word for word; the rest is only counted.
const KEPT_COUNT: usize = 20;
/// After so many jumps in a row that went elsewhere, the operation is stepped all the way.
const FAILED_JUMPS_COUNT: u32 = 3;
/// Exit status of a child that could not ask to be traced.
const NOT_TRACED: c_int = 125;
/// Exit status of a child whose preparation panicked.
const NOT_PREPARED: c_int = 126;
/// The trampoline's result when the operation panicked.
const PANICKED: u64 = 1;

thread_local! {
    static IN_CHILD: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Has each child run this before the operation, uncounted, until it is set anew: for what only the process can do that runs the
/// operation, as a handle of the library is of one process.
pub(crate) fn prepare_in_child(prepare: Option<Box<dyn Fn()>>) {
    IN_CHILD.set(prepare);
}

/// One place where the operation was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Point {
    /// Instructions executed so far.
    pub(crate) k: u64,
    /// The operation has returned.
    pub(crate) finished: bool,
    /// Address of the next instruction, in the child and, as both are one program, in this process.
    pub(crate) rip: u64,
    /// The child: dead and reaped in [`enumerate`], stopped in [`walk`].
    pub(crate) pid: libc::pid_t,
}

/// The coverage of a run, and its cost.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Report {
    /// Number of points checked.
    pub(crate) points: u64,
    /// Instructions from the start of the operation to its end, in the last run that got there.
    pub(crate) operation_steps: u64,
    /// Instructions stepped in all children together.
    pub(crate) steps_total: u64,
    /// Points reached by way of a breakpoint.
    pub(crate) jumps: u64,
    /// Time for all of it, checks included.
    pub(crate) elapsed: Duration,
}

impl Report {
    /// Single steps per second, over everything.
    pub(crate) fn steps_per_second(&self) -> f64 {
        self.rate(self.steps_total)
    }

    /// Points per second, over everything.
    pub(crate) fn points_per_second(&self) -> f64 {
        self.rate(self.points)
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate for people to read")]
    fn rate(&self, count: u64) -> f64 {
        count as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} points of {} steps, {} jumps, {} steps in {:.3} s ({:.0} points/s, {:.0} steps/s)",
            self.points,
            self.operation_steps,
            self.jumps,
            self.steps_total,
            self.elapsed.as_secs_f64(),
            self.points_per_second(),
            self.steps_per_second()
        )
    }
}

/// Why a point failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The caller's check said no, or panicked.
    Check,
    /// The operation took more steps than allowed.
    NotTerminated,
    /// One step took longer than allowed: the operation sleeps in a system call.
    Blocked,
    /// The operation has panicked.
    Panicked,
    /// The child died or exited by itself.
    Died,
    /// The harness could not do its work.
    Harness,
}

/// A point that failed.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// The kind of failure.
    pub(crate) kind: Kind,
    /// The point that failed.
    pub(crate) point: Point,
    /// The failure in words.
    pub(crate) message: String,
}

/// All failures of one enumeration. Its text names function and line of each point, if `addr2line` is
/// installed.
pub(crate) struct Failures {
    /// Name of the enumeration.
    pub(crate) name: String,
    /// Number of failures found.
    pub(crate) total: u64,
    /// The first of them.
    pub(crate) kept: Vec<Failure>,
    /// The coverage up to and beyond the failures.
    pub(crate) report: Report,
}

impl Failures {
    /// True if some failure kept is of this kind.
    pub(crate) fn has(&self, kind: Kind) -> bool {
        self.kept.iter().any(|f| f.kind == kind)
    }

    fn push(&mut self, kind: Kind, point: Point, message: String) {
        self.total += 1;
        if self.kept.len() < KEPT_COUNT {
            self.kept.push(Failure { kind, point, message });
        }
    }

    fn into_result(self) -> Result<Report, Self> {
        if self.total == 0 { Ok(self.report) } else { Err(self) }
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} failures in {}", self.name, self.total, self.report)?;
        let mut places = HashMap::new();
        for Failure { kind, point, message } in &self.kept {
            let place = places.entry(point.rip).or_insert_with(|| locate(point.rip));
            let finished = if point.finished { " (finished)" } else { "" };
            writeln!(f, "  point {}{finished} {kind:?}: {message}\n      at {place}", point.k)?;
        }
        let kept = u64::try_from(self.kept.len()).unwrap_or(u64::MAX);
        if self.total > kept {
            writeln!(f, "  and {} more", self.total - kept)?;
        }
        Ok(())
    }
}

/// The same as [`fmt::Display`], so that `unwrap` and `expect` print something to read.
impl fmt::Debug for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Failures {}

/// Kills the operation after 0, 1, 2, ... instructions and checks each time, with the default [`Options`].
pub(crate) fn enumerate<W>(
    name: &str,
    setup: impl FnMut() -> W,
    operation: impl Fn(&mut W),
    check: impl FnMut(W, Point) -> Result<(), String>,
) -> Result<Report, Failures> {
    Options::new(name).enumerate(setup, operation, check)
}

/// Steps one child through the operation and shows each point, with the default [`Options`].
pub(crate) fn walk<W>(
    name: &str,
    setup: impl FnOnce() -> W,
    operation: impl Fn(&mut W),
    observe: impl FnMut(&W, Point) -> Result<ControlFlow<()>, String>,
) -> Result<Report, Failures> {
    Options::new(name).walk(setup, operation, observe)
}

/// Limits of a run.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    name: String,
    max_steps: u64,
    step_timeout: Duration,
    shard: (u64, u64),
    only: Option<Vec<u64>>,
    stepwise: bool,
}

impl Options {
    /// At most 2,000,000 steps, at most a minute for one step, all points.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            max_steps: 2_000_000,
            step_timeout: Duration::from_secs(60),
            shard: (0, 1),
            only: None,
            stepwise: false,
        }
    }

    /// An operation that takes more steps than this fails with [`Kind::NotTerminated`].
    pub(crate) fn max_steps(mut self, max_steps: u64) -> Self {
        self.max_steps = max_steps;
        self
    }

    /// An operation that stays in one step (a system call) for longer fails with [`Kind::Blocked`]. Whole
    /// seconds.
    pub(crate) fn step_timeout(mut self, step_timeout: Duration) -> Self {
        self.step_timeout = step_timeout;
        self
    }

    /// Takes only the points `index`, `index + of`, `index + 2 * of`, ... so that several test cases, which
    /// nextest runs in parallel, share one enumeration. Each shard ends with a finished point.
    pub(crate) fn shard(mut self, index: u64, of: u64) -> Self {
        assert!(index < of, "shard {index} of {of}");
        self.shard = (index, of);
        self
    }

    /// Takes only these points, in this order; those past the end of the operation are taken at its end.
    pub(crate) fn only(mut self, points: Vec<u64>) -> Self {
        self.only = Some(points);
        self
    }

    /// Uses no breakpoints: every instruction is stepped, which costs time quadratic in the length of the
    /// operation.
    pub(crate) fn stepwise(mut self) -> Self {
        self.stepwise = true;
        self
    }

    /// The results of [`enumerate`](fn@enumerate).
    pub(crate) fn enumerate<W>(
        &self,
        mut setup: impl FnMut() -> W,
        operation: impl Fn(&mut W),
        mut check: impl FnMut(W, Point) -> Result<(), String>,
    ) -> Result<Report, Failures> {
        let mut run = Run::new(self);
        run.each_point(&mut setup, &operation, |run, world, child| {
            let point = run.finish_off(child)?;
            let checked = catch_unwind(AssertUnwindSafe(|| check(world, point)));
            run.judge(point, checked);
            Ok(point.finished)
        });
        run.end()
    }

    /// Stops the operation after 0, 1, 2, ... instructions, lets `meanwhile` work on the world, has the
    /// operation run on to its end, and then checks. The child is dead by the time of `check`.
    ///
    /// The point that both see is where the operation was stopped.
    pub(crate) fn interrupt<W>(
        &self,
        mut setup: impl FnMut() -> W,
        operation: impl Fn(&mut W),
        mut meanwhile: impl FnMut(&mut W, Point) -> Result<(), String>,
        mut check: impl FnMut(W, Point) -> Result<(), String>,
    ) -> Result<Report, Failures> {
        let mut run = Run::new(self);
        run.each_point(&mut setup, &operation, |run, mut world, mut child| {
            let point = child.point();
            let worked = catch_unwind(AssertUnwindSafe(|| meanwhile(&mut world, point)));
            if !matches!(worked, Ok(Ok(()))) {
                run.judge(point, worked);
                return Ok(point.finished);
            }
            let armed = run.ticker.arm();
            let ended = child.run_on(self.step_timeout);
            drop(armed);
            ended?;
            child.refuse_panic()?;
            child.kill();
            let checked = catch_unwind(AssertUnwindSafe(|| check(world, point)));
            run.judge(point, checked);
            Ok(point.finished)
        });
        run.end()
    }

    /// See [`walk`](fn@walk). `observe` gets the parent's world; it must leave the shared memory as it is,
    /// for the child goes on with it. `ControlFlow::Break` and an error both end the walk.
    pub(crate) fn walk<W>(
        &self,
        setup: impl FnOnce() -> W,
        operation: impl Fn(&mut W),
        mut observe: impl FnMut(&W, Point) -> Result<ControlFlow<()>, String>,
    ) -> Result<Report, Failures> {
        let mut run = Run::new(self);
        let mut world = setup();
        let mut child = match Child::start(&mut world, &operation) {
            Ok(child) => child,
            Err(fault) => return run.end_with(fault),
        };
        loop {
            let point = child.point();
            if point.finished
                && let Err(fault) = child.refuse_panic()
            {
                return run.end_with(fault);
            }
            run.failures.report.points += 1;
            match catch_unwind(AssertUnwindSafe(|| observe(&world, point))) {
                Ok(Ok(ControlFlow::Continue(()))) => {}
                Ok(Ok(ControlFlow::Break(()))) => return run.end(),
                Ok(Err(message)) => {
                    run.failures.push(Kind::Check, point, message);
                    return run.end();
                }
                Err(payload) => {
                    run.failures.push(Kind::Check, point, panic_text(&*payload));
                    return run.end();
                }
            }
            if point.finished {
                run.failures.report.operation_steps = point.k;
                return run.end();
            }
            run.progress(point.k, 0);
            // The timer runs only now: `observe` must not see interrupted system calls.
            if let Err(fault) = run.advance(&mut child, 1) {
                return run.end_with(fault);
            }
        }
    }
}

/// One enumeration or walk under way.
struct Run<'a> {
    options: &'a Options,
    failures: Failures,
    ticker: Ticker,
    failed_jumps: u32,
    started: Instant,
    shown: Instant,
    /// Keeps parent and child on one processor: a step is then a switch there and back, without waking
    /// another one.
    _pinned: CpuPin,
}

impl<'a> Run<'a> {
    fn new(options: &'a Options) -> Self {
        assert_single_threaded();
        let now = Instant::now();
        Self {
            options,
            failures: Failures {
                name: options.name.clone(),
                total: 0,
                kept: Vec::new(),
                report: Report::default(),
            },
            ticker: Ticker::new(),
            failed_jumps: 0,
            started: now,
            shown: now,
            _pinned: CpuPin::new(),
        }
    }

    /// Runs the operation to its end, or to the last of the points of [`Options::only`], and returns the path it took.
    fn rehearse<W, F: Fn(&mut W)>(&mut self, world: &mut W, operation: &F) -> Result<Path, Fault> {
        let mut child = Child::start(world, operation)?;
        let mut rips = vec![child.rip()];
        let last = self.options.only.as_ref().and_then(|only| only.iter().max().copied());
        while rips.last() != Some(&end_address()) && last.is_none_or(|last| child.steps < last) {
            self.advance(&mut child, 1)?;
            rips.push(child.rip());
            self.progress(child.steps, 0);
        }
        if rips.last() == Some(&end_address()) {
            child.refuse_panic()?;
            self.failures.report.operation_steps = child.steps;
        }
        // A signal comes between two instructions, where a breakpoint and a single step see different things.
        let mappable = !self.options.stepwise && child.struck.is_none();
        Ok(Path::new(rips, mappable))
    }

    /// Takes the points of the options one by one: a fresh world and a child stopped at the point, for `visit`
    /// to end. It says whether the operation was at its end.
    fn each_point<W, F: Fn(&mut W)>(
        &mut self,
        setup: &mut impl FnMut() -> W,
        operation: &F,
        mut visit: impl FnMut(&mut Self, W, Child) -> Result<bool, Fault>,
    ) {
        let path = match self.rehearse(&mut setup(), operation) {
            Ok(path) => path,
            Err(fault) => return self.failures.push(fault.kind, fault.point, fault.message),
        };
        let (first, stride) = self.options.shard;
        let mut chosen = self.options.only.as_ref().map(|only| only.iter().copied());
        let mut next = first;
        loop {
            let k = match &mut chosen {
                Some(chosen) => match chosen.next() {
                    Some(k) => k,
                    None => return,
                },
                None => next,
            };
            next += stride;
            let visited = self
                .stop_after(k, &path, setup, operation)
                .and_then(|(world, child)| visit(self, world, child));
            match visited {
                // A run that was shorter than the rehearsal does not end the enumeration.
                Ok(finished) if finished && chosen.is_none() && k >= path.steps() => {
                    self.failures.report.points += 1;
                    return;
                }
                Ok(_) => self.failures.report.points += 1,
                Err(fault) => return self.failures.push(fault.kind, fault.point, fault.message),
            }
            self.progress(k, path.steps());
        }
    }

    /// Keeps what a check said.
    fn judge(&mut self, point: Point, checked: std::thread::Result<Result<(), String>>) {
        match checked {
            Ok(Ok(())) => {}
            Ok(Err(message)) => self.failures.push(Kind::Check, point, message),
            Err(payload) => self.failures.push(Kind::Check, point, panic_text(&*payload)),
        }
    }

    /// Starts the operation and stops it after `k` instructions or at its end.
    fn stop_after<W, F: Fn(&mut W)>(
        &mut self,
        k: u64,
        path: &Path,
        setup: &mut impl FnMut() -> W,
        operation: &F,
    ) -> Result<(W, Child), Fault> {
        if self.failed_jumps < FAILED_JUMPS_COUNT
            && let Some((target, way)) = path.way(k)
        {
            let mut world = setup();
            let mut child = Child::start(&mut world, operation)?;
            let armed = self.ticker.arm();
            let jumped = child.jump(way, self.options.step_timeout);
            drop(armed);
            if jumped && self.advance(&mut child, k - way.k).is_ok() && child.rip() == target {
                self.failures.report.jumps += 1;
                self.failed_jumps = 0;
                return Ok((world, child));
            }
            self.failed_jumps += 1;
        }
        let mut world = setup();
        let mut child = Child::start(&mut world, operation)?;
        self.advance(&mut child, k)?;
        Ok((world, child))
    }

    fn finish_off(&mut self, mut child: Child) -> Result<Point, Fault> {
        let point = child.point();
        if point.finished {
            child.refuse_panic()?;
            self.failures.report.operation_steps = child.steps;
        }
        child.kill();
        Ok(point)
    }

    /// Steps the child up to `count` times, less if it reaches the end marker.
    fn advance(&mut self, child: &mut Child, count: u64) -> Result<(), Fault> {
        let before = child.steps;
        let armed = self.ticker.arm();
        let timeout = self.options.step_timeout;
        let mut result = Ok(());
        for _ in 0..count {
            if child.steps >= self.options.max_steps {
                let message = format!("did not terminate within {} steps", child.steps);
                result = Err(child.fault(Kind::NotTerminated, message));
                break;
            }
            match child.step(timeout) {
                Ok(StepOutcome::On) => {}
                Ok(StepOutcome::AtEnd) => break,
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            }
        }
        drop(armed);
        self.failures.report.steps_total += child.steps - before;
        result
    }

    /// A line on standard error, at most once a second.
    fn progress(&mut self, k: u64, expected: u64) {
        if self.shown.elapsed() < Duration::from_secs(1) {
            return;
        }
        self.shown = Instant::now();
        let mut report = self.failures.report;
        report.elapsed = self.started.elapsed();
        let of = if expected == 0 { String::new() } else { format!(" of about {expected}") };
        eprintln!("{}: at {k}{of}, {} failures, {report}", self.options.name, self.failures.total);
    }

    fn end_with(mut self, fault: Fault) -> Result<Report, Failures> {
        self.failures.push(fault.kind, fault.point, fault.message);
        self.end()
    }

    fn end(mut self) -> Result<Report, Failures> {
        self.failures.report.elapsed = self.started.elapsed();
        self.failures.into_result()
    }
}

/// A point that a breakpoint reaches.
#[derive(Clone, Copy)]
struct Way {
    k: u64,
    rip: u64,
    /// How often the address is met on the way, this time included.
    hits: u64,
}

/// The path of the operation, and for each of its points the cheapest way there: some point by breakpoint,
/// the rest in single steps.
struct Path {
    rips: Vec<u64>,
    /// One for each point; empty if breakpoints must not be used.
    ways: Vec<Option<Way>>,
}

impl Path {
    fn new(rips: Vec<u64>, mappable: bool) -> Self {
        let mut ways = Vec::new();
        let mut met = HashMap::new();
        let mut best = None;
        // The cost of a way is the number of stops.
        let (mut cost, mut before) = (0, 0);
        for (k, &rip) in (0..).zip(rips.iter().take(if mappable { usize::MAX } else { 0 })) {
            // A string instruction stops after each round under single step, but only once at a breakpoint.
            if rip != before {
                let hits = met.entry(rip).or_insert(0_u64);
                *hits += 1;
                if k > 0 && *hits <= cost {
                    (best, cost) = (Some(Way { k, rip, hits: *hits }), *hits);
                }
            }
            before = rip;
            ways.push(best);
            cost += 1;
        }
        Self { rips, ways }
    }

    /// Instructions from the first to the last point.
    fn steps(&self) -> u64 {
        self.rips.len() as u64 - 1
    }

    /// The address of point `k` and the way there, if there is a better one than stepping.
    fn way(&self, k: u64) -> Option<(u64, Way)> {
        let k = usize::try_from(k).ok()?;
        Some((*self.rips.get(k)?, (*self.ways.get(k)?)?))
    }
}

/// Why a child cannot be stepped any further.
struct Fault {
    kind: Kind,
    point: Point,
    message: String,
}

// The entry point of the child: `run(function, argument)`. The first stop is at `start`, just behind the
// int3, with nothing of the operation executed; `ud2` at `end` then faults with SIGILL, so that even the fast
// loop, which looks at the wait status only, cannot step past the end. An rsp of 16n + 8 on entry makes the
// stack aligned at the call.
std::arch::global_asm!(
    ".pushsection .text.shmesh_crashpoint, \"ax\", @progbits",
    ".hidden shmesh_crashpoint_run",
    ".hidden shmesh_crashpoint_start",
    ".hidden shmesh_crashpoint_end",
    ".globl shmesh_crashpoint_run",
    ".globl shmesh_crashpoint_start",
    ".globl shmesh_crashpoint_end",
    "shmesh_crashpoint_run:",
    "sub rsp, 8",
    "mov rax, rdi",
    "mov rdi, rsi",
    "int3",
    "shmesh_crashpoint_start:",
    "call rax",
    "shmesh_crashpoint_end:",
    "ud2",
    ".popsection",
);

unsafe extern "C" {
    fn shmesh_crashpoint_run(function: extern "C" fn(*mut c_void) -> u64, argument: *mut c_void) -> !;
    static shmesh_crashpoint_start: u8;
    static shmesh_crashpoint_end: u8;
}

fn start_address() -> u64 {
    (&raw const shmesh_crashpoint_start).addr() as u64
}

fn end_address() -> u64 {
    (&raw const shmesh_crashpoint_end).addr() as u64
}

/// The arguments of the child's call, behind one pointer.
struct Call<'a, W, F> {
    world: &'a mut W,
    operation: &'a F,
}

extern "C" fn trampoline<W, F: Fn(&mut W)>(call: *mut c_void) -> u64 {
    // SAFETY: `Child::start` passes a pointer to a live `Call<W, F>` that nothing else uses, with these very
    // types.
    let call = unsafe { &mut *call.cast::<Call<'_, W, F>>() };
    match catch_unwind(AssertUnwindSafe(|| (call.operation)(call.world))) {
        Ok(()) => 0,
        Err(payload) => {
            std::mem::forget(payload);
            PANICKED
        }
    }
}

enum StepOutcome {
    On,
    AtEnd,
}

/// A traced child, stopped whenever no method runs. Dropping it kills and reaps it.
struct Child {
    pid: Pid,
    gone: bool,
    steps: u64,
    /// Signal that the child got and that the next step must deliver.
    pending: c_int,
    /// The last such signal and where it struck.
    struck: Option<(c_int, u64)>,
}

impl Child {
    /// Forks, and leaves the child stopped just before it calls `operation`.
    fn start<W, F: Fn(&mut W)>(world: &mut W, operation: &F) -> Result<Self, Fault> {
        let mut call = Call { world, operation };
        let parent = nix::unistd::getpid();
        // SAFETY: this process has one thread (asserted by `Run::new`), so the child may do whatever it
        // likes.
        let pid = match unsafe { fork() } {
            Ok(ForkResult::Parent { child }) => child,
            Ok(ForkResult::Child) => {
                // Until EXITKILL is set: do not outlive the parent.
                let tied = prctl::set_pdeathsig(Signal::SIGKILL).is_ok() && getppid() == parent;
                if !tied || ptrace::traceme().is_err() {
                    // SAFETY: ends this process; nothing of it is needed any more.
                    unsafe { libc::_exit(NOT_TRACED) }
                }
                if catch_unwind(AssertUnwindSafe(|| {
                    IN_CHILD.with_borrow(|prepare| prepare.iter().for_each(|prepare| prepare()))
                }))
                .is_err()
                {
                    // SAFETY: as above.
                    unsafe { libc::_exit(NOT_PREPARED) }
                }
                // Symbols for a backtrace would take millions of steps.
                std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
                // SAFETY: the trampoline gets the `Call` it was made for, which lives to the end of this
                // process.
                unsafe { shmesh_crashpoint_run(trampoline::<W, F>, (&raw mut call).cast::<c_void>()) }
            }
            Err(errno) => {
                let point = Point { k: 0, finished: false, rip: 0, pid: 0 };
                return Err(Fault { kind: Kind::Harness, point, message: format!("fork: {errno}") });
            }
        };
        let mut child = Self { pid, gone: false, steps: 0, pending: 0, struck: None };
        let status = child.wait(None)?;
        if !libc::WIFSTOPPED(status) {
            child.gone = true;
            let message = format!("the child stopped nowhere ({status:#x}); is ptrace permitted here?");
            return Err(child.fault(Kind::Harness, message));
        }
        if let Err(errno) = ptrace::setoptions(pid, ptrace::Options::PTRACE_O_EXITKILL) {
            return Err(child.fault(Kind::Harness, format!("PTRACE_SETOPTIONS: {errno}")));
        }
        if libc::WSTOPSIG(status) != libc::SIGTRAP || child.rip() != start_address() {
            let message = format!("the child got signal {} before it began", libc::WSTOPSIG(status));
            return Err(child.fault(Kind::Harness, message));
        }
        Ok(child)
    }

    /// Executes one instruction. A signal for the child goes to it, and its handler counts as part of the
    /// operation.
    fn step(&mut self, timeout: Duration) -> Result<StepOutcome, Fault> {
        loop {
            let signal = c_long::from(std::mem::take(&mut self.pending));
            // SAFETY: `self.pid` is our stopped child; this request reads and writes no memory of ours. A
            // failure means that the child is dead, which the wait below finds.
            unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.pid.as_raw(), 0_usize, signal) };
            let status = self.wait(Some(timeout))?;
            if !libc::WIFSTOPPED(status) {
                self.gone = true;
                return Err(self.death(status));
            }
            match libc::WSTOPSIG(status) {
                libc::SIGTRAP => {
                    self.steps += 1;
                    return Ok(StepOutcome::On);
                }
                libc::SIGILL if self.rip() == end_address() => return Ok(StepOutcome::AtEnd),
                signal => {
                    self.pending = signal;
                    self.struck = Some((signal, self.rip()));
                }
            }
        }
    }

    /// Lets the child run freely to the end marker.
    fn run_on(&mut self, timeout: Duration) -> Result<(), Fault> {
        while self.rip() != end_address() {
            let signal = Signal::try_from(std::mem::take(&mut self.pending)).ok();
            if let Err(errno) = ptrace::cont(self.pid, signal) {
                return Err(self.fault(Kind::Harness, format!("PTRACE_CONT: {errno}")));
            }
            let status = self.wait(Some(timeout))?;
            if !libc::WIFSTOPPED(status) {
                self.gone = true;
                return Err(self.death(status));
            }
            match libc::WSTOPSIG(status) {
                libc::SIGILL if self.rip() == end_address() => {}
                signal => {
                    self.pending = signal;
                    self.struck = Some((signal, self.rip()));
                }
            }
        }
        Ok(())
    }

    /// Runs to a point by means of a breakpoint. False if the child left the path, or there are no
    /// breakpoints here; it is then of no further use.
    fn jump(&mut self, way: Way, timeout: Duration) -> bool {
        const REGISTERS: usize = offset_of!(libc::user, u_debugreg);
        const DR7: usize = REGISTERS + 7 * size_of::<u64>();
        // Breakpoint 0, local, on execution.
        const ENABLE: u64 = 1;
        if !(self.set_user(REGISTERS, way.rip) && self.set_user(DR7, ENABLE)) {
            return false;
        }
        for _ in 0..way.hits {
            if ptrace::cont(self.pid, None).is_err() {
                return false;
            }
            match self.wait(Some(timeout)) {
                Ok(status) if !libc::WIFSTOPPED(status) => {
                    self.gone = true;
                    return false;
                }
                Ok(status) if libc::WSTOPSIG(status) == libc::SIGTRAP && self.rip() == way.rip => {}
                _ => return false,
            }
        }
        self.steps = way.k;
        self.set_user(DR7, 0)
    }

    /// Waits for the next change of state. With a time limit the caller has armed the [`Ticker`].
    fn wait(&mut self, timeout: Option<Duration>) -> Result<c_int, Fault> {
        let mut ticks = 0;
        loop {
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result.
            let waited = unsafe { libc::waitpid(self.pid.as_raw(), &raw mut status, libc::__WALL) };
            if waited == self.pid.as_raw() {
                return Ok(status);
            }
            let errno = Errno::last();
            if errno != Errno::EINTR {
                self.gone = true;
                return Err(self.fault(Kind::Harness, format!("waitpid: {errno}")));
            }
            ticks += 1;
            if timeout.is_some_and(|limit| ticks > limit.as_secs().max(1)) {
                return Err(self.blocked());
            }
        }
    }

    /// Stops a child that sleeps in the kernel, to learn where.
    fn blocked(&mut self) -> Fault {
        let stopped = signal::kill(self.pid, Signal::SIGSTOP).is_ok();
        if !stopped || !self.wait(None).is_ok_and(|status| libc::WIFSTOPPED(status)) {
            return self.fault(Kind::Blocked, "one step did not end".to_owned());
        }
        let number = self.user(offset_of!(libc::user, regs) + offset_of!(libc::user_regs_struct, orig_rax));
        self.fault(Kind::Blocked, format!("system call {number} did not return, in step {}", self.steps + 1))
    }

    /// Kills the child and waits until the kernel has let go of it: memory unmapped, files closed, locks
    /// released.
    fn kill(&mut self) {
        while !self.gone {
            // If the child was reaped elsewhere, the wait reports that.
            let _killed = signal::kill(self.pid, Signal::SIGKILL);
            match self.wait(None) {
                Ok(status) => self.gone = !libc::WIFSTOPPED(status),
                Err(_) => self.gone = true,
            }
        }
    }

    /// A word of the child's user area; 0 if it is dead.
    fn user(&self, offset: usize) -> u64 {
        ptrace::read_user(self.pid, ptr::without_provenance_mut(offset)).map_or(0, i64::cast_unsigned)
    }

    fn set_user(&self, offset: usize, value: u64) -> bool {
        ptrace::write_user(self.pid, ptr::without_provenance_mut(offset), value.cast_signed()).is_ok()
    }

    fn rip(&self) -> u64 {
        self.user(offset_of!(libc::user, regs) + offset_of!(libc::user_regs_struct, rip))
    }

    fn point(&self) -> Point {
        let rip = if self.gone { 0 } else { self.rip() };
        Point { k: self.steps, finished: rip == end_address(), rip, pid: self.pid.as_raw() }
    }

    /// At the end marker: fails if the operation got there by a panic.
    fn refuse_panic(&self) -> Result<(), Fault> {
        let rax = offset_of!(libc::user, regs) + offset_of!(libc::user_regs_struct, rax);
        if self.user(rax) == PANICKED {
            return Err(self.fault(Kind::Panicked, "the operation panicked, see above".to_owned()));
        }
        Ok(())
    }

    fn death(&self, status: c_int) -> Fault {
        let how = if libc::WIFSIGNALED(status) {
            format!("was killed by signal {}", libc::WTERMSIG(status))
        } else {
            format!("exited with status {}", libc::WEXITSTATUS(status))
        };
        let mut fault = self.fault(Kind::Died, format!("the child {how} in step {}", self.steps + 1));
        if let Some((signal, rip)) = self.struck {
            fault.message += &format!(", having got signal {signal}");
            fault.point.rip = rip;
        }
        fault
    }

    fn fault(&self, kind: Kind, message: String) -> Fault {
        Fault { kind, point: self.point(), message }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A timer that interrupts `waitpid` every second while it is armed, so that waiting costs no call to the
/// clock.
struct Ticker {
    before: SigAction,
}

extern "C" fn on_tick(_signal: c_int) {}

impl Ticker {
    fn new() -> Self {
        let action = SigAction::new(SigHandler::Handler(on_tick), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, which is safe at any time.
        let before = unsafe { signal::sigaction(Signal::SIGALRM, &action) }.expect("set SIGALRM");
        Self { before }
    }

    /// Ticks until the value returned is dropped.
    fn arm(&self) -> BreakpointGuard {
        BreakpointGuard::set(1);
        BreakpointGuard
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // SAFETY: this puts back the action that was in force.
        let _previous = unsafe { signal::sigaction(Signal::SIGALRM, &self.before) };
    }
}

struct BreakpointGuard;

impl BreakpointGuard {
    fn set(seconds: libc::time_t) {
        let every = libc::timeval { tv_sec: seconds, tv_usec: 0 };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        // SAFETY: `timer` is a complete value, and the old one is not asked for.
        let set = unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, ptr::null_mut()) };
        assert_eq!(set, 0, "setitimer");
    }
}

impl Drop for BreakpointGuard {
    fn drop(&mut self) {
        Self::set(0);
    }
}

/// Binds this process, and the children it forks, to the processor it runs on, until dropped. If that is
/// refused, the steps only take longer.
struct CpuPin {
    before: Option<CpuSet>,
}

impl CpuPin {
    fn new() -> Self {
        let this = Pid::from_raw(0);
        let before = sched_getaffinity(this).ok().filter(|_| {
            let mut one = CpuSet::new();
            sched_getcpu().is_ok_and(|cpu| one.set(cpu).is_ok()) && sched_setaffinity(this, &one).is_ok()
        });
        Self { before }
    }
}

impl Drop for CpuPin {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _restored = sched_setaffinity(Pid::from_raw(0), before);
        }
    }
}

/// Panics if this process has more than one thread.
fn assert_single_threaded() {
    let status = std::fs::read_to_string("/proc/self/status").expect("read /proc/self/status");
    let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")).map(str::trim);
    assert_eq!(
        threads,
        Some("1"),
        "crash points need a process with one thread: set harness = false for this test"
    );
}

/// Names an address: module, offset, and function and line where `addr2line` knows them.
pub(crate) fn locate(address: u64) -> String {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    let Ok(at) = usize::try_from(address) else { return format!("{address:#x}") };
    // SAFETY: `dladdr` only compares the address, and `info` is a valid place for the result.
    let found = unsafe { libc::dladdr(ptr::without_provenance(at), info.as_mut_ptr()) } != 0;
    // SAFETY: all zeroes is a valid `Dl_info`.
    let info = unsafe { info.assume_init() };
    if !found || info.dli_fname.is_null() {
        return format!("{address:#x}");
    }
    // SAFETY: `dladdr` found a module, whose name it gives as a string that lives as long as the module.
    let module = OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes());
    let offset = at - info.dli_fbase.addr();
    let mut place = format!("{}+{offset:#x}", module.display());
    let mut addr2line = Command::new("addr2line");
    addr2line.args(["-i", "-p", "-f", "-C", "-e"]).arg(module).arg(format!("{offset:#x}"));
    if let Ok(output) = addr2line.output() {
        // One line for each inlined function, innermost first: the standard library and this module say
        // nothing.
        let lines = String::from_utf8_lossy(&output.stdout);
        let known = |line: &&str| !["??", "/rustc/", file!()].iter().any(|dull| line.contains(dull));
        for line in lines.lines().filter(known).take(3) {
            place += "\n         ";
            place += line.trim_start().trim_start_matches("(inlined by) ");
        }
    }
    place
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    format!("the check panicked: {}", text.unwrap_or("(no text)"))
}

/// Forks a child that runs `work` and exits with what it returns, at the latest when this process ends.
pub(crate) fn fork_child(work: impl FnOnce() -> c_int) -> Pid {
    assert_single_threaded();
    // SAFETY: has no arguments and cannot fail.
    let parent = unsafe { libc::syscall(libc::SYS_getpid) };
    // SAFETY: this process has one thread, so the child may do whatever it likes.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let tied =
                prctl::set_pdeathsig(Signal::SIGKILL).is_ok() && c_long::from(getppid().as_raw()) == parent;
            let code = if tied { catch_unwind(AssertUnwindSafe(work)).unwrap_or(101) } else { NOT_TRACED };
            // SAFETY: ends this process; nothing of it is needed any more.
            unsafe { libc::_exit(code) }
        }
    }
}
