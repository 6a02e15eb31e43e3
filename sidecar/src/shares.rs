//! Fair shares of a scarce resource: no source can take all of it, however little there is.
//!
//! With the sources ordered by size, each may have as much as the larger ones and itself leave free. So a single source
//! gets half, the next one half of the rest, and something is always left for a newcomer. The rule does not depend on
//! the order in which sources arrive: after a restart of the sidecar they can have their old shares again, in any
//! order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A limited amount, and the share of each source.
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

    /// Whether a source may take this amount. With `part` 2, each may have half of what is left free, with 1 all of it.
    pub(crate) fn may_take(&self, source: &S, amount: usize, part: usize) -> bool {
        let is_free = amount <= self.free();
        // Check the source as the smallest one. If that is fair, every order is.
        is_free
            && (self.of(source).saturating_mul(part) <= self.free()
                || self.is_fair_with(source, amount, part))
    }

    /// Whether shares are fair when the source has this amount in addition: taken by the sources in order of their size, the largest
    /// first, each last amount would be free.
    fn is_fair_with(&self, source: &S, amount: usize, part: usize) -> bool {
        let others = self.by_source.iter().filter(|(other, _)| *other != source).map(|(_, has)| *has);
        let mut sizes: Vec<_> = others.chain([self.of(source) + amount]).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let mut used = 0;
        sizes.into_iter().all(|size| {
            let before = size.saturating_sub(amount);
            let free = self.max.saturating_sub(used + before);
            used += size;
            before.saturating_mul(part) <= free
        })
    }

    /// Takes an amount, even beyond the fair share.
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

/// The reason why a source gets no more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ShareFull {
    /// The whole amount is taken.
    All,
    /// The source has its fair share.
    Source,
}

/// An amount that a source holds until this is dropped.
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
    ) -> Result<Self, ShareFull> {
        let mut shares = lock(all);
        if !shares.may_take(&source, amount, part) {
            return Err(if shares.free() < amount { ShareFull::All } else { ShareFull::Source });
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
    // Numbers that change together, without a panic in between.
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

    /// Sources that took, in any order, what they could, and gave some of it back, can have the same again in any other order.
    #[test]
    fn shares_do_not_depend_on_the_order() {
        let mut seed = 16_u64;
        let mut below = |limit: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % limit
        };
        for part in [1, 2] {
            for _ in 0..200 {
                let mut shares = Shares::new(50 + below(200));
                for _ in 0..600 {
                    let source = below(6);
                    match below(3) {
                        0 => shares.give_back(&source, shares.of(&source).min(1)),
                        _ if shares.may_take(&source, 1, part) => shares.take(&source, 1),
                        _ => {}
                    }
                }
                let mut again = Shares::new(shares.max());
                let mut left = shares.by_source.clone();
                while !left.is_empty() {
                    let source = *left.keys().nth(below(left.len())).unwrap();
                    let count = 1 + below(left[&source]);
                    for _ in 0..count {
                        assert!(again.may_take(&source, 1, part), "{again:?} on the way to {shares:?}");
                        again.take(&source, 1);
                    }
                    *left.get_mut(&source).unwrap() -= count;
                    left.retain(|_, count| *count > 0);
                }
            }
        }
    }

    #[test]
    fn share_ends_with_its_guard() {
        let all = Arc::new(Mutex::new(Shares::new(100)));
        let one = Share::take(&all, 1, 60, 1).unwrap();
        assert_eq!(Share::take(&all, 1, 10, 1).unwrap_err(), ShareFull::Source);
        assert_eq!(Share::take(&all, 2, 41, 1).unwrap_err(), ShareFull::All);
        let two = Share::take(&all, 2, 40, 1).unwrap();
        drop((one, two));
        assert_eq!(lock(&all).free(), 100);
    }

    #[test]
    fn returned_share_is_free() {
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
