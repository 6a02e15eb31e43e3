//! Shares of what is scarce: nobody takes all of it, however little there is.
//!
//! A source may take one more while it has no more than is free. So one that takes all it can gets half, the next half of the
//! rest, and there is always something left for one that has nothing yet.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How much each source has of something, of which there is so much in all.
#[derive(Clone, Debug)]
pub(crate) struct Shares<S> {
    max: usize,
    used: usize,
    by_source: BTreeMap<S, usize>,
}

impl<S: Clone + Ord> Shares<S> {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, used: 0, by_source: BTreeMap::new() }
    }

    pub(crate) fn free(&self) -> usize {
        self.max.saturating_sub(self.used)
    }

    pub(crate) fn of(&self, source: &S) -> usize {
        self.by_source.get(source).copied().unwrap_or(0)
    }

    pub(crate) fn max(&self) -> usize {
        self.max
    }

    /// Whether a source that has no more than a `part` of what is free may take this amount.
    pub(crate) fn may_take(&self, source: &S, amount: usize, part: usize) -> bool {
        amount <= self.free() && self.of(source).saturating_mul(part) <= self.free()
    }

    /// Takes an amount, whether the source may or not.
    pub(crate) fn take(&mut self, source: &S, amount: usize) {
        self.used += amount;
        *self.by_source.entry(source.clone()).or_default() += amount;
    }

    pub(crate) fn give_back(&mut self, source: &S, amount: usize) {
        let Some(has) = self.by_source.get_mut(source) else { return };
        self.used = self.used.saturating_sub(amount);
        *has = has.saturating_sub(amount);
        if *has == 0 {
            self.by_source.remove(source);
        }
    }
}

/// Why a source gets no more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Full {
    /// There is none left.
    All,
    /// It has its share.
    Source,
}

/// An amount that a source has until this is dropped.
#[derive(Debug)]
pub(crate) struct Share<S: Clone + Ord> {
    all: Arc<Mutex<Shares<S>>>,
    source: S,
    amount: usize,
}

impl<S: Clone + Ord> Share<S> {
    pub(crate) fn take(
        all: &Arc<Mutex<Shares<S>>>,
        source: S,
        amount: usize,
        part: usize,
    ) -> Result<Self, Full> {
        let mut shares = lock(all);
        if !shares.may_take(&source, amount, part) {
            return Err(if shares.free() < amount { Full::All } else { Full::Source });
        }
        shares.take(&source, amount);
        drop(shares);
        Ok(Self { all: Arc::clone(all), source, amount })
    }
}

impl<S: Clone + Ord> Drop for Share<S> {
    fn drop(&mut self) {
        lock(&self.all).give_back(&self.source, self.amount);
    }
}

fn lock<S>(all: &Mutex<Shares<S>>) -> MutexGuard<'_, Shares<S>> {
    // Numbers, changed together without a panic in between.
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greedy(shares: &mut Shares<u8>, source: u8, part: usize) -> usize {
        let mut taken = 0;
        while shares.may_take(&source, 1, part) {
            shares.take(&source, 1);
            taken += 1;
        }
        taken
    }

    #[test]
    fn something_is_left_for_the_next() {
        let mut shares = Shares::new(1000);
        assert_eq!(greedy(&mut shares, 1, 1), 501);
        assert_eq!(greedy(&mut shares, 2, 1), 250);
        assert_eq!(greedy(&mut shares, 3, 2), 84, "a third of what was free");
        for source in 4..10 {
            assert!(greedy(&mut shares, source, 1) > 0);
        }
        assert_eq!(greedy(&mut shares, 1, 1), 0);
    }

    #[test]
    fn share_ends_with_its_guard() {
        let all = Arc::new(Mutex::new(Shares::new(100)));
        let one = Share::take(&all, 1, 60, 1).unwrap();
        assert_eq!(Share::take(&all, 1, 10, 1).unwrap_err(), Full::Source);
        assert_eq!(Share::take(&all, 2, 41, 1).unwrap_err(), Full::All);
        let two = Share::take(&all, 2, 40, 1).unwrap();
        drop((one, two));
        assert_eq!(lock(&all).free(), 100);
    }

    #[test]
    fn what_is_given_back_is_free() {
        let mut shares = Shares::new(2);
        assert_eq!(greedy(&mut shares, 1, 1), 2, "two places are for two, also of one source");
        assert!(!shares.may_take(&2, 1, 1));
        shares.give_back(&1, 1);
        shares.give_back(&9, 1);
        assert!(shares.may_take(&2, 1, 1));
        shares.give_back(&1, 1);
        assert!(shares.by_source.is_empty());
        assert_eq!(shares.free(), 2);
    }
}
