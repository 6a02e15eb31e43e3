//! A gate: many calls pass it together, and who closes it is alone.
//!
//! It is a reader-writer lock for what every call of a library reads and hardly anybody changes: that an instance has not
//! been destroyed. Passing an ordinary one takes two locked instructions, which for a call of 30 ns is half of it. Here a
//! thread writes into a place of its own which gate it is in, and the one who closes looks at all places; what has to happen
//! between a thread's write and its look at the gate, the closer brings about for all threads ([`barrier`]).
//!
//! | passing | closing |
//! |---|---|
//! | `inside` = this gate | `is_closing` = true |
//! | light barrier | heavy barrier |
//! | look at `is_closing` | look at each `inside` |
//!
//! Of two that meet at least one sees the other: Dekker's pair. The one who passes gives way. The closer then waits until no
//! place names the gate; leaving is a store with Release, which that look acquires. Opening is the Release of
//! `is_closing`, which those who pass next acquire. `model.rs` explores that.
//!
//! | file | concept |
//! |---|---|
//! | `lib.rs` | [`Gate`] |
//! | `places.rs` | the places of threads |
//! | `barrier.rs` | the barrier that costs only one side |
// Unsafe: hands out references to what the gate guards.
#![expect(unsafe_code, reason = "a lock")]

mod barrier;
#[cfg(all(test, loom))]
mod model;
mod places;

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use places::{Inside, Place, Registry};

/// Guards a value: many read it at once, and who changes it is alone.
///
/// Reading is cheap and changing is slow: some microseconds, and as long as the longest of those who read. So nobody waits
/// for anything while he reads. A child of a fork must not close a gate that another thread of its parent was in.
///
/// ```
/// use shmesh_gate::Gate;
/// let gate = Gate::new(Some("backend"));
/// assert_eq!(*gate.pass(), Some("backend"));
/// gate.close().take();
/// assert_eq!(*gate.pass(), None);
/// ```
pub struct Gate<T> {
    is_closing: AtomicBool,
    /// Held by who is alone, and by readers who have no place.
    alone: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: as a reader-writer lock: it hands out `&T` to many threads at once, and `&mut T`, by which a value can be moved out.
unsafe impl<T: Send + Sync> Sync for Gate<T> {}

impl<T> Gate<T> {
    /// An open gate.
    ///
    /// ```
    /// assert_eq!(*shmesh_gate::Gate::new(7).pass(), 7);
    /// ```
    pub fn new(value: T) -> Self {
        barrier::prepare();
        Self { is_closing: AtomicBool::new(false), alone: Mutex::new(()), value: UnsafeCell::new(value) }
    }

    /// Passes: nobody changes the value while the answer lives. It may be passed again meanwhile, by the same thread too, but
    /// not by one that is in more than four gates, or in its last destructors: that would wait for itself.
    ///
    /// ```
    /// let gate = shmesh_gate::Gate::new(7);
    /// let (once, again) = (gate.pass(), gate.pass());
    /// assert_eq!(*once, *again);
    /// ```
    #[inline]
    pub fn pass(&self) -> Passing<'_, T> {
        let way = match places::here() {
            Some(place) => self.pass_at(place),
            None => Way::Locked(self.lock()),
        };
        Passing { gate: self, way }
    }

    /// Closes it: waits until nobody passes any more. Whoever passes itself waits for itself.
    ///
    /// ```
    /// let gate = shmesh_gate::Gate::new(7);
    /// *gate.close() += 1;
    /// assert_eq!(*gate.pass(), 8);
    /// ```
    pub fn close(&self) -> Closed<'_, T> {
        self.close_over(places::all())
    }

    fn name(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        // It guards no value of its own.
        self.alone.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[inline]
    fn pass_at<'a>(&'a self, place: &'a Place) -> Way<'a> {
        let Some(inside) = place.free() else { return self.pass_beyond(place) };
        loop {
            inside.enter(self.name());
            // DEKKER: with the heavy barrier of `close_over`.
            barrier::light();
            if !self.is_closing.load(Ordering::Acquire) {
                return Way::Place(inside);
            }
            if let Some(inside) = self.give_way(place, inside) {
                return Way::Place(inside);
            }
        }
    }

    /// For who is in as many gates as a place can name.
    #[cold]
    fn pass_beyond<'a>(&'a self, place: &'a Place) -> Way<'a> {
        place.again(self.name()).map_or_else(|| Way::Locked(self.lock()), Way::Place)
    }

    /// Lets the closer go first, unless this thread is in already, and the closer waits for it.
    #[cold]
    fn give_way<'a>(&self, place: &'a Place, inside: &Inside) -> Option<&'a Inside> {
        inside.leave();
        let again = place.again(self.name());
        if again.is_none() {
            drop(self.lock());
        }
        again
    }

    fn close_over(&self, registry: &Registry) -> Closed<'_, T> {
        // Opens the gate again if what follows panics.
        let closed = Closed { gate: self, lock: self.lock() };
        self.is_closing.store(true, Ordering::Relaxed);
        // DEKKER: with the light barrier of `pass_at`. Who takes its first place after this look has locked the register
        // after it, and so sees `is_closing`.
        barrier::heavy();
        registry.wait_until_none_names(self.name());
        closed
    }
}

impl<T: fmt::Debug> fmt::Debug for Gate<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gate").field(&*self.pass()).finish()
    }
}

enum Way<'a> {
    Place(&'a Inside),
    Locked(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'a, ()>),
}

/// Nobody changes the value while this lives. It stays in its thread.
pub struct Passing<'a, T> {
    gate: &'a Gate<T>,
    /// Cannot be sent to another thread, for the sake of the lock; a place is its thread's alone as well.
    way: Way<'a>,
}

impl<T> Deref for Passing<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `&mut` is handed out only by who has closed the gate, and that one has waited for this to be dropped.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> Drop for Passing<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Way::Place(inside) = self.way {
            inside.leave();
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Passing<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Nobody else has the value while this lives.
pub struct Closed<'a, T> {
    gate: &'a Gate<T>,
    #[expect(dead_code, reason = "held until the gate is open again")]
    lock: MutexGuard<'a, ()>,
}

impl<T> Deref for Closed<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: who is alone has waited for all who passed; who has no place holds the lock that is held here.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> DerefMut for Closed<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.gate.value.get() }
    }
}

impl<T> Drop for Closed<'_, T> {
    fn drop(&mut self) {
        // Before the lock, which those who gave way wait for. Release: who passes next sees what was changed.
        self.gate.is_closing.store(false, Ordering::Release);
    }
}

impl<T: fmt::Debug> fmt::Debug for Closed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    const ROUNDS: u64 = if cfg!(miri) { 20 } else { 2_000 };

    #[test]
    fn both_halves_of_a_value_are_of_one_change() {
        let gate = Arc::new(Gate::new([0_u64; 2]));
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || {
                    loop {
                        let [one, two] = *gate.pass();
                        assert_eq!(one, two);
                        if one == ROUNDS {
                            return;
                        }
                    }
                })
            })
            .collect();
        for _ in 0..ROUNDS {
            let mut value = gate.close();
            value[0] += 1;
            value[1] += 1;
        }
        readers.into_iter().for_each(|reader| reader.join().expect("it saw one change at a time"));
    }

    #[test]
    fn gates_are_apart_and_can_be_passed_within_each_other() {
        let gates: [Gate<u32>; 6] = std::array::from_fn(|_| Gate::new(1));
        // More than a place has room for: the last ones are locked.
        let inside: Vec<_> = gates.iter().map(Gate::pass).collect();
        assert_eq!(*gates[0].pass(), 1, "in already");
        let other = Gate::new(0);
        *other.close() = inside.iter().map(|one| **one).sum();
        assert_eq!(*other.pass(), 6);
        drop(inside);
        gates.iter().for_each(|gate| *gate.close() = 2);
    }

    /// In whatever order a thread passes and leaves, also while somebody waits to be alone: as long as it is in, the word
    /// that said so first goes on saying so.
    #[test]
    fn who_is_in_is_named_all_the_time() {
        let gate = Gate::new(());
        let others: [Gate<()>; 3] = std::array::from_fn(|_| Gate::new(()));
        let place = Place::new();
        let pass = |gate| Passing { gate, way: Gate::pass_at(gate, &place) };
        let is_named = |gate: &Gate<()>| place.is_named(gate.name());
        let before = pass(&others[0]);
        let first = pass(&gate);
        // A word before the one that names the gate: the closer has seen it without.
        drop(before);
        gate.is_closing.store(true, Ordering::Relaxed);
        let again = pass(&gate);
        assert!(
            place.free().is_some_and(|free| std::ptr::eq(free, place.first())),
            "a closer has looked there"
        );
        drop(first);
        assert!(is_named(&gate), "it is in");
        drop(again);
        assert!(!is_named(&gate));
        gate.is_closing.store(false, Ordering::Relaxed);

        // No word is free.
        let first = pass(&gate);
        let full: Vec<_> = others.iter().map(pass).collect();
        let again = pass(&gate);
        drop(first);
        assert!(is_named(&gate), "it is in");
        drop((again, full));
        assert!(!is_named(&gate) && place.is_empty());
    }

    #[test]
    fn the_closer_waits_for_who_is_inside_who_may_pass_again() {
        let gate = Arc::new(Gate::new(1));
        let inside = gate.pass();
        let closer = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || *gate.close() = 2)
        };
        while !gate.is_closing.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        assert_eq!(*gate.pass(), 1, "in already");
        assert_eq!(*inside, 1);
        drop(inside);
        closer.join().expect("it was let in");
        assert_eq!(*gate.pass(), 2);
    }

    #[test]
    fn a_thread_that_ends_gives_its_place_to_another() {
        let gate = Arc::new(Gate::new(()));
        for _ in 0..3 {
            let gate = Arc::clone(&gate);
            thread::spawn(move || drop(gate.pass())).join().expect("it passes");
        }
        drop(gate.close());
    }

    #[test]
    fn also_while_a_thread_ends() {
        struct AtExit(Arc<Gate<u32>>, mpsc::Sender<u32>);
        impl Drop for AtExit {
            fn drop(&mut self) {
                let _ = self.1.send(*self.0.pass());
            }
        }
        thread_local!(static LAST: std::cell::RefCell<Option<AtExit>> = const { std::cell::RefCell::new(None) });
        let (gate, (said, heard)) = (Arc::new(Gate::new(3)), mpsc::channel());
        let at_exit = AtExit(Arc::clone(&gate), said);
        thread::spawn(move || {
            LAST.with(|last| *last.borrow_mut() = Some(at_exit));
            // Registered after, and so given back before.
            drop(gate.pass());
        })
        .join()
        .expect("it ends");
        assert_eq!(heard.recv(), Ok(3));
    }
}
