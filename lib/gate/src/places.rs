//! The places of threads: which gates each is in.
//!
//! A thread has one place from the first gate that it passes until it ends; then another gets it. Places are never freed, so
//! who closes a gate may look at all of them.

use super::{AtomicUsize, Mutex, Ordering};

/// Gates that one thread is in at once. Who is in more takes a lock.
const DEPTH: usize = 4;
/// Looks at a place before the closer lets others have the core.
const SPINS: u32 = 100;

/// Which gates one thread is in. Nobody else writes it, and it has its cache lines to itself.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Place {
    inside: [Inside; DEPTH],
}

/// One gate that a thread is in.
#[derive(Debug)]
pub(crate) struct Inside {
    /// Its address; 0: none.
    gate: AtomicUsize,
    /// How often the thread has passed it again by this word. Its own business.
    again: AtomicUsize,
}

impl Place {
    pub(crate) fn new() -> Self {
        let inside = |_| Inside { gate: AtomicUsize::new(0), again: AtomicUsize::new(0) };
        Self { inside: std::array::from_fn(inside) }
    }

    /// Room for one more. For the thread whose place it is.
    #[inline]
    pub(crate) fn free(&self) -> Option<&Inside> {
        self.inside.iter().find(|inside| !inside.is_taken())
    }

    /// Passes a gate again that the thread is in, by the word that names it; `None`: it is not. For the thread whose place it
    /// is.
    ///
    /// By no other word: a closer that waits for this one may have looked at the others, and does not look again.
    pub(crate) fn again(&self, gate: usize) -> Option<&Inside> {
        let inside = self.inside.iter().find(|inside| inside.gate.load(Ordering::Relaxed) == gate)?;
        inside.again.store(inside.again.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Some(inside)
    }
}

impl Inside {
    #[inline]
    fn is_taken(&self) -> bool {
        self.gate.load(Ordering::Relaxed) != 0
    }

    /// Release: a closer of the gate that this thread was in before may see this instead of its leaving.
    #[inline]
    pub(crate) fn enter(&self, gate: usize) {
        self.gate.store(gate, Ordering::Release);
    }

    /// Release: what was read inside was read before whoever sees this changes it.
    #[inline]
    pub(crate) fn leave(&self) {
        match self.again.load(Ordering::Relaxed) {
            0 => self.gate.store(0, Ordering::Release),
            again => self.again.store(again - 1, Ordering::Relaxed),
        }
    }
}

/// All places of a process.
#[derive(Debug)]
pub(crate) struct Registry {
    places: Mutex<Places>,
}

#[derive(Debug)]
struct Places {
    all: Vec<&'static Place>,
    /// Of threads that have ended.
    #[cfg(not(loom))]
    free: Vec<&'static Place>,
}

impl Registry {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self { places: Mutex::new(Places { all: Vec::new(), free: Vec::new() }) }
    }

    /// A register with these places.
    #[cfg(all(test, loom))]
    pub(crate) fn of(all: Vec<&'static Place>) -> Self {
        Self { places: Mutex::new(Places { all }) }
    }

    /// Waits until no thread is in the gate.
    pub(crate) fn wait_until_none_names(&self, gate: usize) {
        // Not with the lock: threads begin and end meanwhile.
        let all = self.places.lock().unwrap_or_else(std::sync::PoisonError::into_inner).all.clone();
        for inside in all.iter().flat_map(|place| &place.inside) {
            let mut looks = 0_u32;
            // Acquire: with the Release of who leaves.
            while inside.gate.load(Ordering::Acquire) == gate {
                looks = looks.saturating_add(1);
                wait(looks);
            }
        }
    }
}

#[cfg(not(loom))]
fn wait(looks: u32) {
    if looks < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
}

#[cfg(loom)]
fn wait(looks: u32) {
    assert!(looks < SPINS * 100, "it waits for somebody who does not leave");
    loom::thread::yield_now();
}

#[cfg(not(loom))]
mod threads {
    use std::cell::Cell;
    use std::sync::PoisonError;

    use super::{Place, Registry};

    static REGISTRY: Registry = Registry::new();

    thread_local! {
        /// Without a destructor, so that it is read at once, and also while a thread ends.
        static PLACE: Cell<Option<&'static Place>> = const { Cell::new(None) };
        static MINE: Mine = Mine::take();
    }

    /// A place while its thread lives.
    struct Mine(&'static Place);

    impl Mine {
        fn take() -> Self {
            let mut places = REGISTRY.places.lock().unwrap_or_else(PoisonError::into_inner);
            let place = places.free.pop().unwrap_or_else(|| {
                let place: &'static Place = Box::leak(Box::new(Place::new()));
                places.all.push(place);
                place
            });
            Self(place)
        }
    }

    impl Drop for Mine {
        fn drop(&mut self) {
            PLACE.set(None);
            // A guard that a thread takes to its end without dropping it keeps the place.
            if self.0.is_empty() {
                REGISTRY.places.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.0);
            }
        }
    }

    /// This thread's place; `None` while the thread ends.
    #[inline]
    pub(crate) fn here() -> Option<&'static Place> {
        PLACE.get().or_else(first)
    }

    #[cold]
    fn first() -> Option<&'static Place> {
        let place = MINE.try_with(|mine| mine.0).ok()?;
        PLACE.set(Some(place));
        Some(place)
    }

    pub(crate) fn all() -> &'static Registry {
        &REGISTRY
    }
}

#[cfg(all(test, not(loom)))]
impl Place {
    pub(crate) fn is_named(&self, gate: usize) -> bool {
        self.inside.iter().any(|inside| inside.gate.load(Ordering::Relaxed) == gate)
    }

    pub(crate) fn first(&self) -> &Inside {
        &self.inside[0]
    }
}

#[cfg(not(loom))]
impl Place {
    pub(crate) fn is_empty(&self) -> bool {
        !self.inside.iter().any(Inside::is_taken)
    }
}

#[cfg(not(loom))]
pub(crate) use threads::{all, here};

/// Models name their places.
#[cfg(loom)]
pub(crate) fn here() -> Option<&'static Place> {
    None
}

#[cfg(loom)]
pub(crate) fn all() -> &'static Registry {
    unreachable!("models name their places")
}
