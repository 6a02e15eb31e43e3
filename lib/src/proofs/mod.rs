//! Proofs: every interleaving of small cases (loom), undefined behaviour (Miri), random sequences (proptest).
//!
//! A model is only worth what it detects. Each ordering stronger than `Relaxed` was weakened in turn ([`weaken`]), one half
//! at a time, and one of these models failed, with the exceptions below:
//!
//! | ordering | detected by |
//! |---|---|
//! | PUBLISH, producer / consumer | `no_receiver_sleeps_over_a_message_*` / `producer_hands_its_role_over`, `detaching_releases_everything` |
//! | CONSUME and `head`, as recovery reads it | `single_consumer_dead_before_head_and_its_seat` |
//! | FENCE, both halves at both ends | `send_before_an_eviction_arrives` |
//! | `tail`, as the next producer reads it | `dead_sender_behind_another` |
//! | owner word: claim | `stale_hints_cost_a_retry_only`, `living_pair_is_not_orphaned` |
//! | owner word: release / reclaim | `stale_hints_cost_a_retry_only` / `bytes_of_the_dead_are_not_written_late` |
//! | owner word: look / take / `take_alone` | `late_consumer_does_not_take_a_later_loan` / `newcomer_keeps_its_message_mpmc` / `single_consumer_dead_before_head_and_its_seat` |
//! | owner word: recovery's scan of MSG / DATA | `newcomer_keeps_its_loan` / `living_pair_is_not_orphaned` |
//! | HINT: set, steal | `stolen_twice`, `stale_hints_cost_a_retry_only` |
//! | MOVED: counts of a move, and its exchange | `free_buffer_is_found_while_its_hint_moves` |
//! | RELEASED: both counts, and the search's loads | `exhausted_seat_finds_a_released_buffer` |
//! | HINT: set in the reserve | `released_into_the_reserve_while_it_is_searched` |
//! | seat: attach / vacate, `at` | `seats_are_not_shared` / `consumers_role_is_inherited` |
//! | role: claim / release | `role_has_one_successor` / `consumer_hands_its_role_over` |
//! | DEKKER, both fences | `late_recovery_loses_no_wake_up` |
//! | EMPTY, both fences | `newcomer_or_emptier_sees_the_other` |
//! | TYPED, both fences | `user_or_replacer_of_a_type_sees_the_other`, `user_or_replacer_of_a_type_of_requests_sees_the_other` |
//! | bits of the users of a type: cleared / read | `type_of_a_waiting_message_is_kept_when_its_sender_leaves` |
//! | seats, as admission reads them | `clone_keeps_the_side` |
//! | EVENT | `no_participant_sleeps_over_an_event` |
//! | PASSED, cursor and holds | `broadcast_to_two`, `held_message_is_not_overwritten`; of owned messages `owned_message_is_not_overwritten` |
//! | JOIN, both fences | `newcomer_keeps_its_first_message` |
//! | HOLD, both fences | `held_message_is_not_overwritten` |
//! | OVERWRITE, both fences | `overwritten_inline_message_is_not_torn` |
//! | posts | `post_makes_messages_visible` |
//! | REPLY, ROOM, OVER | `models/request.rs`, see below |
//!
//! Of broadcast rings, three parts are only argued: OPEN at the ends that only newcomers after the first look use, what
//! `inspect` and a successor's first look read, and PASSED where a handle moves its cursor or leaves after another thread
//! has released an owned message: the lock orders the two.
//!
//! Loom cannot detect four kinds of error. It never delays a load, so a consumer's reads of a slot never see the producer's
//! next writes: CONSUME needs its Acquire by the memory model, and no model shows it. Its `overwrite` is an exchange, so
//! the Release of `Bitmap::take` survives weakening, while a plain store there would end the release sequence that a thief
//! reads; nor does a model show that MOVED needs the Acquire of the load before it. What only `inspect` reads through
//! [`queued`](crate::ring::Ring::queued) is in no model. The lock of a seat is the kernel's, for which the model has a
//! mutex: that is in one order for all threads, so the mark beside it may be Relaxed there.
//!
//! Not detected within the time limits of the models, and only argued: in `mpmc`, a producer's loads of `tail`, of the slot
//! and of `head`, its exchange on `tail` on behalf of another producer, a consumer's second load of `head`, and its
//! exchange on `head`; in `spsc`, the loads by which a role is taken over.

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
