//! The yardstick: the round trip of a bare cache line between the two cores.
//!
//! Virtual cores move on their host, and all that is measured between them moves along. So it is taken just before and just
//! after each test, and a test during which it jumped is tried again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use shmesh_sys::sched;

use super::measure::{Dist, Rx, STOP, Tx, echo, ping};

const SECONDS: f64 = 0.03;
/// How much the yardstick may differ before and after a test, and how often a test is tried for that.
const STEADY: f64 = 1.25;
const TRIES: u32 = 5;
/// How often, a tenth of a second apart, the yardstick is looked at while it lies outside of what is wanted.
const LOOKS: u32 = 300;

/// Ties the calling thread to `core`.
pub(super) fn pin(core: usize) -> Result<()> {
    sched::pin(core).with_context(|| format!("cannot run on core {core}"))
}

/// The cores that this process may use.
pub(super) fn cores() -> Result<Vec<usize>> {
    sched::cores().context("cannot tell which cores may be used")
}

/// A counter that one side writes and the other polls, on a pair of lines of its own.
#[repr(align(128))]
struct BareLine(AtomicUsize);

/// Zero is "nothing yet", and STOP + 1 is zero again, so that one goes as itself.
fn shown(word: u64) -> usize {
    usize::try_from(word.saturating_add(1)).unwrap_or(usize::MAX)
}

impl Tx for &BareLine {
    #[inline(always)]
    fn send(&mut self, word: u64) -> Result<()> {
        // Release pairs with the Acquire of `recv`, as a message's would.
        self.0.store(shown(word), Ordering::Release);
        Ok(())
    }
}

/// The polling side: the line and the last value seen in it. Without a pause, which takes longer than the line.
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
    // Threads: a line moves the same way between two of them as between two processes.
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

/// What a test found, and the yardstick around it.
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
            ensure!(look < LOOKS, "a bare cache line takes {before:.0} ns, and did not come into --floor");
            std::thread::sleep(Duration::from_millis(100));
            before = cacheline(cores)?;
        }
        let dist = test()?;
        let after = cacheline(cores)?;
        let steady = before.max(after) < before.min(after) * STEADY && is_wanted(after);
        // Without a wish, a restless machine is better shown than not measured.
        if steady || (wanted.is_empty() && attempt == TRIES) {
            return Ok((dist, f64::midpoint(before, after)));
        }
        let took = begin.elapsed().as_secs_f64();
        eprintln!(
            "moved    a bare cache line took {before:.0} ns before and {after:.0} ns after, {took:.1} s later"
        );
    }
    bail!("the cores moved in each of {TRIES} tries")
}
