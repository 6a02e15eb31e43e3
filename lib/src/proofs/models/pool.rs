//! Pools: a buffer never has two holders, and none is lost once all threads have finished.

use super::super::stage::{attach, link, loan, release, release_anywhere};
use super::{Bytes, assert_all_free, explore, loan_and_write, spawn, until};
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};

fn loan_and_release(endpoint: &Endpoint, bytes: &Bytes, rounds: i32) {
    for round in 0..rounds {
        if let Some(held) = loan_and_write(endpoint, bytes, round) {
            assert_eq!(bytes.read(held.cell), round);
            assert!(release(endpoint, &held));
        }
    }
}

/// A seat that found nothing finds what is released later, by another seat or by a thread without a seat.
#[test]
fn exhausted_seat_finds_a_released_buffer() {
    for by_seat in [true, false] {
        explore("exhausted_seat_finds_a_released_buffer", move || {
            let core = link(1, true, 1, 0);
            let bytes = Bytes::new(1);
            let (a, b) = (attach(&core, Primary), attach(&core, Secondary));
            let held = loan_and_write(&b, &bytes, 7).expect("free");
            // From the second search on, it compares counts.
            assert!(loan(&a).is_none());
            let other = spawn(move || {
                assert!(if by_seat { release(&b, &held) } else { release_anywhere(&core, &held) });
            });
            let held = until(|| loan_and_write(&a, &bytes, 8));
            assert_eq!(bytes.read(held.cell), 8);
            other.join().unwrap();
        });
    }
}

/// Two seats have at most one buffer each, of two: a free one is always found, also while the other seat moves the hints.
#[test]
fn free_buffer_is_found_while_its_hint_moves() {
    explore("free_buffer_is_found_while_its_hint_moves", || {
        let core = link(1, true, 2, 0);
        let bytes = Bytes::new(2);
        let threads = [Primary, Secondary].map(|side| {
            let (endpoint, bytes) = (attach(&core, side), bytes.clone());
            spawn(move || {
                for round in 0..2 {
                    let held = loan_and_write(&endpoint, &bytes, round).expect("one is free");
                    assert!(release(&endpoint, &held));
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Both seats find their hints in the reserve, then steal them from each other.
fn two_seats(name: &str, buffers: u32, rounds: i32) {
    explore(name, move || {
        let core = link(1, true, buffers, 0);
        let bytes = Bytes::new(buffers as usize);
        let (a, b, third) = (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
        let other = {
            let bytes = bytes.clone();
            spawn(move || loan_and_release(&b, &bytes, rounds))
        };
        loan_and_release(&a, &bytes, rounds);
        other.join().unwrap();
        assert_all_free(&third, &bytes);
    });
}

#[test]
fn two_seats_and_one_buffer() {
    two_seats("two_seats_and_one_buffer", 1, 1);
}

#[test]
fn two_seats_and_two_buffers() {
    two_seats("two_seats_and_two_buffers", 2, 2);
}

/// One seat releases buffers that the other two steal; the second may steal from the first.
#[test]
fn stolen_twice() {
    explore("stolen_twice", || {
        let core = link(1, true, 1, 0);
        let bytes = Bytes::new(1);
        let (a, b, c) = (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
        let third = attach(&core, Secondary);
        let held = loan_and_write(&a, &bytes, 7).unwrap();
        let thieves = [b, c].map(|endpoint| {
            let bytes = bytes.clone();
            spawn(move || loan_and_release(&endpoint, &bytes, 1))
        });
        assert!(release(&a, &held));
        for thief in thieves {
            thief.join().unwrap();
        }
        assert_all_free(&third, &bytes);
    });
}

/// An owned message is released into the reserve, while another seat moves the reserve's hints into its own bitmap.
#[test]
fn released_into_the_reserve_while_it_is_searched() {
    explore("released_into_the_reserve_while_it_is_searched", || {
        let core = link(1, true, 2, 0);
        let bytes = Bytes::new(2);
        let (a, b, third) = (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
        let held = loan_and_write(&a, &bytes, 7).unwrap();
        let other = {
            let bytes = bytes.clone();
            spawn(move || loan_and_release(&b, &bytes, 2))
        };
        assert_eq!(bytes.read(held.cell), 7);
        assert!(release_anywhere(&core, &held));
        loan_and_release(&a, &bytes, 1);
        other.join().unwrap();
        assert_all_free(&third, &bytes);
    });
}

/// Hints for two buffers are moved together, after one of the buffers was loaned again.
#[test]
fn stale_hints_cost_a_retry_only() {
    explore("stale_hints_cost_a_retry_only", || {
        let core = link(1, true, 2, 0);
        let bytes = Bytes::new(2);
        let (a, b, third) = (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
        // Both hints in the bitmap of `a`.
        let (x, y) = (loan(&a).unwrap(), loan(&a).unwrap());
        assert!(release(&a, &x) && release(&a, &y));
        let other = {
            let bytes = bytes.clone();
            spawn(move || loan_and_release(&b, &bytes, 1))
        };
        loan_and_release(&a, &bytes, 2);
        other.join().unwrap();
        assert_all_free(&third, &bytes);
    });
}
