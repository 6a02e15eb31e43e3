//! The table behind the handles of C, without C.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use crate::handles::{EnterError, HandleTable, interned};

/// Counts the values that are alive.
#[derive(Debug)]
struct CountedValue(Arc<AtomicUsize>, usize);

impl CountedValue {
    fn new(living: &Arc<AtomicUsize>, value: usize) -> Self {
        living.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(living), value)
    }
}

impl Drop for CountedValue {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn removed_handle_never_names_the_next_value() {
    let table = HandleTable::new();
    let first = table.insert(c"first", 1).unwrap();
    assert_eq!(table.enter(first).unwrap().remove(), Some(1));
    for value in 2..100 {
        let next = table.insert(c"next", value).unwrap();
        assert_eq!(table.enter(first).unwrap_err(), EnterError::Ended);
        assert!(table.name(first).is_null() && !table.name(next).is_null());
        assert_eq!(table.enter(next).unwrap().remove(), Some(value));
    }
}

#[test]
fn every_bit_of_a_handle_counts() {
    let table = HandleTable::new();
    let handles: Vec<_> = (0..300).map(|value| table.insert(c"value", value).unwrap()).collect();
    for (value, handle) in handles.iter().enumerate() {
        assert_eq!(*table.enter(*handle).unwrap(), value);
        for bit in 0..usize::BITS {
            let bent = handle.map_addr(|bits| bits ^ 1 << bit);
            match table.enter(bent) {
                Ok(other) => assert_eq!(handles[*other], bent),
                Err(refused) => assert_eq!(refused, EnterError::Ended),
            }
        }
    }
    assert!([0, 1, usize::MAX, 1 << 63 | 0xf_ffff].into_iter().all(|bits| {
        let wild = std::ptr::without_provenance(bits);
        table.enter(wild).is_err() && table.name(wild).is_null()
    }));
}

#[test]
fn busy_handle_refuses_other_calls_and_keeps_its_name() {
    let table = HandleTable::new();
    let handle = table.insert(interned("link"), 7).unwrap();
    let mut entered = table.enter(handle).unwrap();
    *entered += 1;
    assert_eq!(table.enter(handle).unwrap_err(), EnterError::Busy);
    // SAFETY: names stay for ever, and end with a NUL.
    assert_eq!(unsafe { CStr::from_ptr(table.name(handle)) }, c"link");
    assert_eq!(interned("link").as_ptr(), table.name(handle), "equal texts are kept once");
    drop(entered);
    assert_eq!(*table.enter(handle).unwrap(), 8);
}

#[test]
fn one_of_several_threads_removes_a_value() {
    const THREADS: usize = 4;
    let rounds = if cfg!(miri) { 10 } else { 2000 };
    let living = Arc::new(AtomicUsize::new(0));
    let table = HandleTable::new();
    for round in 0..rounds {
        let handle = table.insert(c"contested", CountedValue::new(&living, round)).unwrap().addr();
        let (start, removed) = (Barrier::new(THREADS), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    start.wait();
                    let handle = std::ptr::without_provenance(handle);
                    loop {
                        // A value of its own, in perhaps the place that another thread vacates just now.
                        let own = table.insert(c"own", CountedValue::new(&living, usize::MAX)).unwrap();
                        let seen = table.enter(handle).map(|entered| {
                            assert_eq!(entered.1, round);
                            entered.remove()
                        });
                        assert_eq!(table.enter(own).unwrap().remove().unwrap().1, usize::MAX);
                        match seen {
                            Ok(value) => {
                                assert_eq!(value.map(|_| removed.fetch_add(1, Ordering::Relaxed)), Some(0))
                            }
                            Err(EnterError::Busy) => continue,
                            Err(EnterError::Ended) => break,
                        }
                    }
                });
            }
        });
        assert_eq!((removed.into_inner(), living.load(Ordering::Relaxed)), (1, 0));
    }
}
