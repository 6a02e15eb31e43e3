//! An entry names the last bits of its buffer's epoch, 6 for an inline cell, and those wrap. So its slot is passed before
//! the buffer can be loaned again, and a later loan never looks like the message that was received.

use super::stage::{abandon, attach, link, receive, send_inline};
use crate::link::endpoint::Endpoint;
use crate::participant::Side::{Primary, Secondary};
use crate::pool::owner::MsgOwner;
use crate::ring::entry::RingEntry;
use crate::ring::{Look, Owners, Ring};

/// Loans and releases until the cell of `entry` is loaned with the same epoch bits that the entry has.
fn go_round(endpoint: &Endpoint, entry: RingEntry) {
    let others: Vec<_> = std::iter::from_fn(|| endpoint.loan_inline()).collect();
    let (cell, owner) = others.into_iter().find(|(cell, _)| *cell == entry.wild_cell()).expect("it is free");
    endpoint.release_inline(cell, owner);
    for _ in 0..1 << 12 {
        let (again, owner) = endpoint.loan_inline().expect("the only one that is free");
        assert_eq!(again, cell);
        if entry.names(owner.epoch()) {
            return;
        }
        endpoint.release_inline(cell, owner);
    }
    panic!("the bits never came round");
}

#[test]
fn recovery_passes_the_slot_of_a_dead_consumer() {
    let core = link(1, false, 1, 0);
    let (dead, producer, consumer) =
        (attach(&core, Secondary), attach(&core, Primary), attach(&core, Secondary));
    send_inline(&producer, 1).unwrap();
    // It dies between the exchange on the owner word and the one on `head`.
    let (_, entry) = dead.incoming.queued().next().unwrap();
    let Ok(Look::Here(word)) = dead.receiving().look(entry) else { panic!("it waits") };
    assert!(dead.receiving().take(entry, word));
    core.reclaim(&abandon(dead), producer.me.seat, false);
    go_round(&producer, entry);
    assert!(receive(&consumer).unwrap().is_none(), "nothing was sent since");
}

#[test]
fn batch_passes_the_slot_of_an_inline_message() {
    let core = link(1, false, 1, 0);
    let (producer, consumer, other) =
        (attach(&core, Primary), attach(&core, Secondary), attach(&core, Secondary));
    send_inline(&producer, 1).unwrap();
    let Ring::Mpmc(ring) = &consumer.incoming else { unreachable!() };
    let taken = ring.pop_batch(&consumer.receiving(), 2, |entry, _, word| {
        // As `Link::inline_cell` does.
        consumer.release_inline(entry.wild_cell(), MsgOwner(word).borrowed(consumer.me.seat));
        go_round(&producer, entry);
        assert!(receive(&other).unwrap().is_none(), "nothing was sent since");
    });
    assert_eq!(taken, Ok(1));
}

/// A batch ends even if the sender is as fast as the receiver.
#[test]
fn batch_is_never_more_than_the_ring_holds() {
    let core = link(2, false, 1, 0);
    let (producer, consumer) = (attach(&core, Primary), attach(&core, Secondary));
    for id in 0..2 {
        send_inline(&producer, id).unwrap();
    }
    let Ring::Mpmc(ring) = &consumer.incoming else { unreachable!() };
    let taken = ring.pop_batch(&consumer.receiving(), 1_000, |entry, _, word| {
        consumer.release_inline(entry.wild_cell(), MsgOwner(word).borrowed(consumer.me.seat));
        send_inline(&producer, 9).expect("its slot was passed");
    });
    assert_eq!(taken, Ok(2));
}
