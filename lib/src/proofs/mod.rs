//! Proofs: every interleaving of small cases (loom), undefined behaviour (Miri), random sequences (proptest).
//!
//! A model is worth what it notices. Each ordering that asks for more than `Relaxed` was weakened in turn ([`weaken`]), one
//! half at a time, and one of these models failed, except where said below:
//!
//! | ordering | noticed by |
//! |---|---|
//! | PUBLISH, producer / consumer | `nobody_sleeps_over_a_message_*` / `a_producer_hands_its_role_over`, `leaving_gives_everything_back` |
//! | CONSUME and `head`, as recovery reads it | `a_single_consumer_dead_before_head_and_its_seat` |
//! | FENCE, both halves at both ends | `what_was_sent_before_an_eviction_arrives` |
//! | `tail`, as the next producer reads it | `a_dead_sender_behind_another` |
//! | owner word: claim | `stale_hints_cost_a_retry_only`, `a_living_pair_is_no_orphan` |
//! | owner word: release / reclaim | `stale_hints_cost_a_retry_only` / `a_dead_ones_bytes_are_at_rest` |
//! | owner word: look / take / `take_alone` | `a_late_consumer_takes_no_later_loan` / `a_newcomer_keeps_its_message_mpmc` / `a_single_consumer_dead_before_head_and_its_seat` |
//! | owner word: recovery's scan of MSG / DATA | `a_newcomer_keeps_its_loan` / `a_living_pair_is_no_orphan` |
//! | HINT: set, steal | `stolen_twice`, `stale_hints_cost_a_retry_only` |
//! | HINT: set in the reserve | `released_into_the_reserve_while_it_is_searched` |
//! | seat: attach / vacate, `at` | `seats_are_not_shared` / `a_consumers_role_is_inherited` |
//! | role: claim / release | `a_role_has_one_successor` / `a_consumer_hands_its_role_over` |
//! | DEKKER, both fences | `a_late_recoverer_takes_no_wake_up_away` |
//! | EMPTY, both fences | `newcomer_or_emptier_sees_the_other` |
//! | seats, as admission reads them | `a_clone_keeps_the_side` |
//! | EVENT | `nobody_sleeps_over_an_event` |
//! | PASSED, cursor and holds | `broadcast_to_two`, `what_a_reader_holds_is_not_written` |
//! | JOIN, both fences | `a_newcomer_keeps_its_first_message` |
//! | HOLD, both fences | `what_a_reader_holds_is_not_written` |
//! | OVERWRITE, both fences | `a_small_message_that_is_overwritten_is_not_torn` |
//! | posts | `a_post_brings_its_messages` |
//! | REPLY, ROOM, OVER | `models/request.rs`, see below |
//!
//! Of broadcast rings, OPEN at the ends that only newcomers after the first look use, and what `inspect` and a successor's first look
//! read, are kept by argument alone.
//!
//! Loom cannot notice four kinds. It takes no load to be later than it is, so a consumer's reads of a slot never see the
//! producer's next writes: CONSUME needs its Acquire by the memory model and not by a model here. Its `overwrite` is an
//! exchange, so the Release of `Bitmap::take` survives: a plain store there would end the release sequence that a thief
//! reads. And what only `inspect` reads through [`queued`](crate::ring::Ring::queued) is in no model. And the lock of a seat
//! is the kernel's: the model has a mutex in its place, which is in one order for all, so the mark beside it may be Relaxed there.
//!
//! Not noticed in the time that models have, and kept by argument alone: in `mpmc`, a producer's loads of `tail`, of the
//! slot and of `head`, its exchange on `tail` for another, a consumer's second load of `head`, and its exchange on `head`; in
//! `spsc`, the loads with which a role is taken up.

#[cfg(not(loom))]
mod broadcast;
#[cfg(not(loom))]
mod names;
#[cfg(not(loom))]
mod oracle;
#[cfg(not(loom))]
mod request_oracle;
mod stage;
#[cfg(not(loom))]
mod threads;

#[cfg(loom)]
mod models;
#[cfg(loom)]
pub(crate) mod weaken;
