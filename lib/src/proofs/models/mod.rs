//! Loom models. Each explores the interleavings of its threads, with all values that relaxed loads may return: all interleavings
//! with at most as many pre-emptions as is stated here. `cargo test ... -- --nocapture` prints how many there are.

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

/// Models that are explored in full with one pre-emption, because two take longer than fifteen seconds. All that are in no list are
/// explored with two.
#[rustfmt::skip]
const ONE: &[&str] = &[
    "bytes_of_the_dead_are_not_written_late", "client_dead_in_a_reception",
    "client_of_a_dead_server_gets_its_replies_then_an_error", "dead_clients_replies_are_freed",
    "dead_loan_is_taken_back_once", "dead_receiver_mpmc", "dead_receiver_spsc", "dead_sender_behind_another",
    "dead_sender_mpmc", "dead_sender_spsc", "free_buffer_is_found_while_its_hint_moves",
    "known_message_is_not_overlooked", "mpmc_two_consumers_capacity_2", "mpmc_two_producers_capacity_1",
    "mpmc_two_producers_capacity_2", "newcomer_keeps_its_loan", "newcomer_keeps_its_message_mpmc",
    "newcomer_keeps_its_request", "one_of_many_consumers_dead_before_head", "posts",
    "producer_hands_its_role_over", "sender_dead_before_tail",
    "single_consumer_dead_before_head_and_its_seat", "stolen_twice", "two_seats_and_one_buffer",
    "two_seats_and_two_buffers", "user_or_replacer_of_a_type_of_requests_sees_the_other",
    "writer_does_not_wait_for_a_detached_reader",
];
/// Models that are explored in full with three pre-emptions.
#[rustfmt::skip]
const THREE: &[&str] = &[
    "consumer_hands_its_role_over", "consumers_role_is_inherited", "detaching_releases_everything",
    "evicted_participant_releases", "evicted_participant_sends", "message_of_the_dead_is_kept",
    "mpmc_one_to_one", "mpmc_two_consumers_capacity_1", "no_participant_sleeps_over_lost_messages",
    "no_receiver_sleeps_over_a_message_mpmc", "no_receiver_sleeps_over_a_message_spsc",
    "owned_message_is_not_overwritten_skip", "owned_message_is_not_overwritten_wait",
    "owned_message_is_not_overwritten_wait_and_leave", "producers_role_is_inherited",
    "replies_arrive_in_order_with_their_bytes", "send_before_a_false_report_of_death_arrives",
    "send_before_an_eviction_arrives", "send_before_an_eviction_arrives_before_another_producer",
    "spsc_batch", "spsc_capacity_2", "spsc_inline_batch", "spsc_inline_capacity_1", "spsc_inline_capacity_2",
    "spsc_inline_two_lines", "stale_hints_cost_a_retry_only",
];
/// Models of which all schedules are explored.
#[rustfmt::skip]
const ALL: &[&str] = &[
    "exhausted_seat_finds_a_released_buffer", "late_failure_does_not_reach_a_later_request",
    "newcomer_keeps_its_details", "post_makes_messages_visible", "role_has_one_successor",
    "seats_are_not_shared",
];

/// Time limit of the search that every model must finish.
const LIMIT: Duration = Duration::from_secs(180);

/// Explores all schedules of `model` with as many pre-emptions as the lists above say, and fails if that takes too long.
///
/// With `LOOM_MAX_DURATION`, schedules with one more, with two more and so on follow, for so many seconds each. The last line of
/// the output gives the number of pre-emptions that was explored in full.
fn explore(name: &str, model: impl Fn() + Sync + Send + 'static) {
    let model = Arc::new(model);
    let stated = match name {
        _ if ALL.contains(&name) => None,
        _ if ONE.contains(&name) => Some(1),
        _ if THREE.contains(&name) => Some(3),
        _ => Some(2),
    };
    let (mut bound, mut before, mut finished) = (stated, 0, None);
    loop {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = bound;
        builder.max_branches = 20_000;
        builder.checkpoint_interval = 200;
        // The environment may have a limit, after which nothing is explored in full.
        builder.max_permutations = None;
        let deeper = builder.max_duration;
        let limit = if finished.is_none() { LIMIT } else { deeper.unwrap_or(LIMIT) };
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
        let shown = bound.map_or("all".into(), |bound| bound.to_string());
        let cut = if took >= limit { ", cut short" } else { "" };
        eprintln!("{name}, pre-emptions {shown}: {count} executions, {:.2} s{cut}", took.as_secs_f64());
        if !cut.is_empty() {
            break;
        }
        finished = Some(shown);
        // A deeper search would find no further schedule.
        if deeper.is_none() || bound.is_none() || count == before {
            break;
        }
        (bound, before) = (bound.map(|bound| bound + 1), count);
    }
    let finished =
        finished.unwrap_or_else(|| panic!("{name}: {stated:?} pre-emptions were not explored in {LIMIT:?}"));
    eprintln!("{name}: explored in full up to pre-emptions: {finished}");
}

#[test]
fn listed_models_exist() {
    let sources = [
        include_str!("admission.rs"),
        include_str!("broadcast.rs"),
        include_str!("notify.rs"),
        include_str!("pool.rs"),
        include_str!("recovery.rs"),
        include_str!("request.rs"),
        include_str!("ring.rs"),
        include_str!("typed.rs"),
    ];
    for name in [ONE, THREE, ALL].concat() {
        assert!(
            sources.iter().any(|source| source.contains(&format!("\"{name}\""))),
            "{name}: no such model"
        );
        let lists = [ONE, THREE, ALL].iter().filter(|list| list.contains(&name)).count();
        assert_eq!(lists, 1, "{name}: in two lists");
    }
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
