//! The floor: the round trip of a bare cache line between the two cores, as a reference.
//!
//! Virtual cores move on their host, and all times measured between them change. So the floor is measured just before
//! and just after each test, and a test during which it changed is repeated.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use shmesh_sys::sched;

use super::measure::{Dist, Rx, STOP, Tx, echo, ping};

const SECONDS: f64 = 0.03;
/// Maximum ratio of the floors before and after a test.
const STEADY: f64 = 1.25;
const TRIES: u32 = 5;
/// How often to measure the floor, a tenth of a second apart, while it is outside the requested range.
const LOOKS: u32 = 300;

/// Pins the calling thread to `core`.
pub(super) fn pin(core: usize) -> Result<()> {
    sched::pin(core).with_context(|| format!("cannot run on core {core}"))
}

/// The cores that this process may use.
pub(super) fn cores() -> Result<Vec<usize>> {
    sched::cores().context("cannot determine the cores that this process may use")
}

/// A counter that one side writes and the other polls, on a pair of lines of its own.
#[repr(align(128))]
struct BareLine(AtomicUsize);

/// Zero means that there is no message yet. STOP + 1 wraps to zero, so STOP is sent unchanged.
fn shown(word: u64) -> usize {
    usize::try_from(word.saturating_add(1)).unwrap_or(usize::MAX)
}

impl Tx for &BareLine {
    #[inline(always)]
    fn send(&mut self, word: u64) -> Result<()> {
        // Release pairs with the Acquire of `recv`, as for a message.
        self.0.store(shown(word), Ordering::Release);
        Ok(())
    }
}

/// The polling side: the line and the last value that it has read. It does not pause, because a pause takes longer than
/// the line.
struct BarePoll<'a>(&'a BareLine, usize);

impl Rx for BarePoll<'_> {
    #[inline(always)]
    fn recv(&mut self) -> Result<u64> {
        loop {
            let value = self.0.0.load(Ordering::Acquire);
            if value != self.1 {
                self.1 = value;
                return Ok(if value == usize::MAX { STOP } else { value as u64 - 1 });
            }
        }
    }
}

/// The median round trip in nanoseconds.
pub(super) fn cacheline((a, b): (usize, usize)) -> Result<f64> {
    let (there, back) = (BareLine(AtomicUsize::new(0)), BareLine(AtomicUsize::new(0)));
    let (pinned, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Pinned before the line is polled: two sides that poll on one core would measure the scheduler.
    let meet = |core| {
        let done = pin(core);
        refused.fetch_add(usize::from(done.is_err()), Ordering::AcqRel);
        pinned.fetch_add(1, Ordering::AcqRel);
        while pinned.load(Ordering::Acquire) < 2 {
            std::thread::yield_now();
        }
        done?;
        ensure!(refused.load(Ordering::Acquire) == 0, "the other side cannot be pinned");
        Ok(())
    };
    // Threads suffice: a line moves between two threads as it does between two processes.
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| {
            meet(b)?;
            echo(&mut &back, &mut BarePoll(&there, 0))
        });
        let ask = scope.spawn(|| {
            meet(a)?;
            ping(SECONDS, &mut &there, &mut BarePoll(&back, 0)).map(|dist| dist.p50)
        });
        let failed = |_| anyhow!("measuring a cache line failed");
        let p50 = ask.join().map_err(failed)?;
        answer.join().map_err(failed)??;
        p50
    })
}

/// Runs a test between two measurements of the floor, and repeats it if the floor changed.
pub(super) fn around(
    cores: (usize, usize),
    wanted: &[f64],
    mut test: impl FnMut() -> Result<Dist>,
) -> Result<(Dist, f64)> {
    let is_wanted = |ns: f64| wanted.is_empty() || (wanted[0]..=wanted[1]).contains(&ns);
    for attempt in 1..=TRIES {
        let begin = Instant::now();
        let mut before = cacheline(cores)?;
        for look in 0.. {
            if is_wanted(before) {
                break;
            }
            ensure!(
                look < LOOKS,
                "a bare cache line takes {before:.0} ns, and did not reach the range of --floor in 30 s; widen the range"
            );
            std::thread::sleep(Duration::from_millis(100));
            before = cacheline(cores)?;
        }
        let dist = test()?;
        let after = cacheline(cores)?;
        let steady = before.max(after) < before.min(after) * STEADY && is_wanted(after);
        // Without --floor, a noisy machine is reported rather than not measured.
        if steady || (wanted.is_empty() && attempt == TRIES) {
            return Ok((dist, f64::midpoint(before, after)));
        }
        let took = begin.elapsed().as_secs_f64();
        eprintln!(
            "repeat   a bare cache line took {before:.0} ns before and {after:.0} ns after, {took:.1} s later"
        );
    }
    bail!(
        "the round trip of a bare cache line changed during each of {TRIES} tries; run on an idle machine, or without --floor"
    )
}
