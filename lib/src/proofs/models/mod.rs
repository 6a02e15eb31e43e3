//! Loom models. Each explores the interleavings of its threads, with all values that relaxed loads may return: all
//! interleavings with at most one pre-emption, and those with more as far as time allows. `cargo test ... -- --nocapture`
//! prints how far.

mod admission;
mod broadcast;
mod notify;
mod pool;
mod recovery;
mod request;
mod ring;
#[cfg(feature = "typed")]
mod typed;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::stage::{self, HeldBuffers, ReceivedItem};
use crate::link::endpoint::Endpoint;

/// Time limit of each deeper search of a model. `LOOM_MAX_DURATION` (in seconds) changes it.
const DEEPER_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of the search with one pre-emption, which every model must finish.
const FIRST_LIMIT: Duration = Duration::from_secs(180);

/// Explores `model`: all schedules with one pre-emption, then with two and so on, up to `most`, or without a limit for
/// `None`.
///
/// Every model must finish the first search. A deeper one that takes too long is cut short. The last line of the output
/// gives the number of pre-emptions that was explored in full.
fn explore(name: &str, most: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let model = Arc::new(model);
    let bounds = most.map_or(vec![Some(1), None], |most| (1..=most).map(Some).collect());
    let mut before = 0;
    let mut finished = None;
    for bound in bounds {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = bound;
        builder.max_branches = 20_000;
        builder.checkpoint_interval = 200;
        let deeper = builder.max_duration.unwrap_or(DEEPER_LIMIT);
        let limit = if finished.is_none() { deeper.max(FIRST_LIMIT) } else { deeper };
        builder.max_duration = Some(limit);
        let count = Arc::new(AtomicUsize::new(0));
        let (counter, start) = (Arc::clone(&count), Instant::now());
        let model = Arc::clone(&model);
        builder.check(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            let model = Arc::clone(&model);
            spawn(move || model()).join().unwrap();
        });
        let (count, took) = (count.load(Ordering::Relaxed), start.elapsed());
        let bound = bound.map_or("all".into(), |bound| bound.to_string());
        let cut = if took >= limit { ", cut short" } else { "" };
        eprintln!("{name}, pre-emptions {bound}: {count} executions, {:.2} s{cut}", took.as_secs_f64());
        if !cut.is_empty() {
            break;
        }
        finished = Some(bound);
        // A deeper search would find no further schedule.
        if count == before {
            break;
        }
        before = count;
    }
    let finished =
        finished.unwrap_or_else(|| panic!("{name}: not even one pre-emption was explored in full"));
    eprintln!("{name}: explored in full up to pre-emptions: {finished}");
}

/// The bytes of the MSG buffers as loom cells: access without happens-before, or by two threads at once, is an error.
#[derive(Clone)]
struct Bytes(Arc<Vec<loom::cell::UnsafeCell<i32>>>);

// UNSAFETY: shared between the threads of a model on purpose. Loom reports accesses that are not ordered.
#[expect(unsafe_code, reason = "loom's cells check each access")]
mod access {
    use super::Bytes;
    // SAFETY: each access goes through a loom cell, which checks it.
    unsafe impl Send for Bytes {}
    // SAFETY: as above.
    unsafe impl Sync for Bytes {}

    impl Bytes {
        pub(super) fn write(&self, cell: u32, value: i32) {
            // SAFETY: loom panics if another access is not ordered with this one.
            self.0[cell as usize].with_mut(|p| unsafe { *p = value });
        }

        pub(super) fn read(&self, cell: u32) -> i32 {
            // SAFETY: as above.
            self.0[cell as usize].with(|p| unsafe { *p })
        }
    }
}

impl Bytes {
    fn new(len: usize) -> Self {
        Self(Arc::new((0..len).map(|_| loom::cell::UnsafeCell::new(0)).collect()))
    }
}

fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> loom::thread::JoinHandle<T> {
    // In words. Loom's default stacks are too small for a panic.
    loom::thread::Builder::new().stack_size(1 << 15).spawn(f).expect("a thread")
}

/// Calls `attempt` until it returns a value.
fn until<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        loom::thread::yield_now();
    }
}

fn loan_and_write(endpoint: &Endpoint, bytes: &Bytes, value: i32) -> Option<HeldBuffers> {
    let mut held = stage::loan(endpoint)?;
    held.msg_id = value;
    bytes.write(held.cell, value);
    Some(held)
}

/// Loans, writes and sends, retrying until it succeeds.
fn send(endpoint: &Endpoint, bytes: &Bytes, value: i32) {
    let held = until(|| loan_and_write(endpoint, bytes, value));
    until(|| stage::send(endpoint, &held).then_some(()));
}

/// Tries once to receive, read and release.
fn receive(endpoint: &Endpoint, bytes: &Bytes) -> Option<i32> {
    let got = stage::receive(endpoint).expect("no damage")?;
    Some(consume(endpoint, bytes, &got))
}

fn consume(endpoint: &Endpoint, bytes: &Bytes, got: &ReceivedItem) -> i32 {
    match got {
        ReceivedItem::Pooled(held) => {
            assert_eq!(bytes.read(held.cell), held.msg_id, "the message and its bytes belong together");
            assert!(stage::release(endpoint, held), "a living participant keeps what it received");
        }
        ReceivedItem::Inline(id, first, last) => {
            assert_eq!(
                (*first, *last),
                (u64::from(id.cast_unsigned()), u64::from(id.cast_unsigned())),
                "torn"
            );
        }
    }
    got.msg_id()
}

/// Receives all messages that are left.
fn drain(endpoint: &Endpoint, bytes: &Bytes) -> Vec<i32> {
    std::iter::from_fn(|| receive(endpoint, bytes)).collect()
}

/// When no other thread runs, `endpoint` can loan all buffers, and its writes to them race with no access.
fn assert_all_free(endpoint: &Endpoint, bytes: &Bytes) {
    let len = endpoint.core.msg().table.len();
    let all: Vec<_> = (0..len).map_while(|_| loan_and_write(endpoint, bytes, -1)).collect();
    assert_eq!(all.len(), len, "every MSG buffer is free and known");
    if let Some(pool) = endpoint.core.pool(stage::DATA) {
        let data = (0..pool.table.len())
            .map_while(|_| endpoint.loan_data(stage::DATA, all[0].cell, all[0].owner))
            .count();
        assert_eq!(data, pool.table.len(), "every DATA buffer is free and known");
    }
    assert!(stage::loan(endpoint).is_none());
}
