//! Every interleaving of two who pass and one who closes, with an ordinary barrier on both sides. That a membarrier is one is
//! the kernel's promise.

use loom::sync::Arc;
use loom::thread;

use super::places::{Place, Registry};
use super::{Gate, Passing};

/// Loom finds a read beside a write in these cells.
type Value = loom::cell::UnsafeCell<u32>;

struct Guarded {
    gate: Gate<()>,
    value: Value,
}

// SAFETY: the value is touched only by who passes or has closed the gate, which is what the model is about.
unsafe impl Sync for Guarded {}

fn read(guarded: &Guarded, place: &'static Place) -> u32 {
    let passing = Passing { gate: &guarded.gate, way: guarded.gate.pass_at(place) };
    let value = guarded.value.with(|value| {
        // SAFETY: no one writes it while a thread passes.
        unsafe { *value }
    });
    drop(passing);
    value
}

fn write(guarded: &Guarded, registry: &Registry) {
    let closed = guarded.gate.close_over(registry);
    guarded.value.with_mut(|value| {
        // SAFETY: who has closed the gate is alone.
        unsafe { *value += 1 }
    });
    drop(closed);
}

fn explore(readers: usize, writes: u32, passes: u32) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let places: Vec<&'static Place> = (0..readers).map(|_| &*Box::leak(Box::new(Place::new()))).collect();
        let registry = Registry::of(places.clone());
        let guarded = Arc::new(Guarded { gate: Gate::new(()), value: Value::new(0) });
        let threads: Vec<_> = places
            .into_iter()
            .map(|place| {
                let guarded = Arc::clone(&guarded);
                thread::spawn(move || {
                    let mut before = 0;
                    for _ in 0..passes {
                        let value = read(&guarded, place);
                        assert!(before <= value && value <= writes);
                        before = value;
                    }
                })
            })
            .collect();
        for _ in 0..writes {
            write(&guarded, &registry);
        }
        threads.into_iter().for_each(|thread| thread.join().expect("it read whole values"));
    });
}

/// One who does `passes` beside one who closes.
fn beside_a_writer(passes: fn(&Guarded, &'static Place)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let place: &'static Place = Box::leak(Box::new(Place::new()));
        let registry = Registry::of(vec![place]);
        let guarded = Arc::new(Guarded { gate: Gate::new(()), value: Value::new(0) });
        let reader = {
            let guarded = Arc::clone(&guarded);
            thread::spawn(move || passes(&guarded, place))
        };
        write(&guarded, &registry);
        reader.join().expect("nobody wrote meanwhile");
    });
}

#[test]
fn who_closes_is_alone() {
    explore(2, 1, 1);
}

#[test]
fn what_was_changed_is_seen_by_who_passes_next() {
    explore(1, 2, 2);
}

/// A thread that is in passes again while somebody waits to be alone, and leaves in the order in which it came.
#[test]
fn who_passes_again_is_waited_for_to_the_end() {
    beside_a_writer(|guarded, place| {
        let pass = |gate| Passing { gate, way: Gate::pass_at(gate, place) };
        let other = Gate::new(());
        let before = pass(&other);
        let first = pass(&guarded.gate);
        // From here on the first word is free, and the closer may have looked at it.
        drop(before);
        let again = pass(&guarded.gate);
        drop(first);
        guarded.value.with(|value| {
            // SAFETY: no one writes it while a thread passes.
            unsafe { *value }
        });
        drop(again);
    });
}

/// A thread leaves one gate and is in another when the closer of the first looks.
#[test]
fn a_place_that_names_another_gate_is_out_of_this_one() {
    beside_a_writer(|guarded, place| {
        read(guarded, place);
        let other = Gate::new(());
        drop(Passing { gate: &other, way: other.pass_at(place) });
    });
}
