//! Rate limit of audit records per account, as a token bucket.
//!
//! Accounts are the same as for quotas: a pod, or outside pods a user. Refusals and other records have a bucket each, so
//! that a flood of refusals cannot hide operations that succeeded. The time comes from the records, not from a clock.

use std::collections::BTreeMap;

use crate::broker::{Millis, Op, Outcome, Record};

/// Rate of refusals. A correct program causes none.
const REFUSED: Rate = Rate { burst: 100, millis: 1_000 };
/// Rate of other records: the burst is more than exporting, admitting, importing and closing all keys of an account at
/// once.
const DONE: Rate = Rate { burst: 100_000, millis: 10 };
/// Maximum number of accounts with buckets of their own.
pub(super) const ACCOUNTS_MAX: usize = 1024;
/// Shortest time between two searches for idle accounts.
const CLEAR_PAUSE_MS: u64 = 1000;

#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u64,
    /// Milliseconds until one token returns.
    millis: u64,
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum AuditAccount {
    Pod(String),
    User(u32),
    /// All accounts beyond [`ACCOUNTS_MAX`], and clients whose user is unknown.
    Others,
}

impl AuditAccount {
    pub(super) fn of(record: &Record) -> Self {
        let party = record.caller.as_ref();
        match (party.and_then(|party| party.pod.as_ref()), party, record.socket) {
            (Some(pod), ..) => Self::Pod(pod.uid.clone()),
            (None, Some(party), _) => Self::User(party.uid),
            (None, None, Some(socket)) => Self::User(socket.uid),
            (None, None, None) => Self::Others,
        }
    }
}

#[derive(Debug)]
struct Bucket {
    rate: Rate,
    tokens: u64,
    /// When the tokens were last counted.
    at: u64,
    /// The number of suppressed records, and the last of them.
    left_out: Option<(u64, Box<Record>)>,
}

impl Bucket {
    fn new(rate: Rate, now: u64) -> Self {
        Self { rate, tokens: rate.burst, at: now, left_out: None }
    }

    fn refill(&mut self, now: u64) {
        let more = now.saturating_sub(self.at) / self.rate.millis;
        self.tokens = self.tokens.saturating_add(more).min(self.rate.burst);
        // The remaining time counts for the next token.
        self.at += more * self.rate.millis;
    }

    fn take(&mut self, record: &Record) -> bool {
        self.refill(record.at.0);
        if let Some(rest) = self.tokens.checked_sub(1) {
            self.tokens = rest;
            return true;
        }
        self.leave_out(record);
        false
    }

    fn leave_out(&mut self, record: &Record) {
        let (count, last) = self.left_out.get_or_insert_with(|| (0, Box::new(record.clone())));
        *count += 1;
        if *count > 1 {
            **last = record.clone();
        }
    }

    /// Whether the bucket is in the state of a new one.
    fn is_fresh(&mut self, now: u64) -> bool {
        self.refill(now);
        self.tokens == self.rate.burst && self.left_out.is_none()
    }
}

/// A bucket for refusals, and one for other records.
type Buckets = [Bucket; 2];

#[derive(Debug, Default)]
pub(super) struct Limiter {
    accounts: BTreeMap<AuditAccount, Buckets>,
    /// When idle accounts were last dropped.
    cleared_at: Option<u64>,
}

impl Limiter {
    /// Whether a record may be written. It is counted if not.
    pub(super) fn admits(&mut self, record: &Record) -> bool {
        self.bucket(record).take(record)
    }

    /// Counts a record that is suppressed for another reason.
    pub(super) fn leave_out(&mut self, record: &Record) {
        self.bucket(record).leave_out(record);
    }

    fn bucket(&mut self, record: &Record) -> &mut Bucket {
        let now = record.at.0;
        let mut account = AuditAccount::of(record);
        if self.accounts.len() >= ACCOUNTS_MAX && !self.accounts.contains_key(&account) {
            if self.cleared_at.is_none_or(|at| now.saturating_sub(at) >= CLEAR_PAUSE_MS) {
                self.cleared_at = Some(now);
                self.accounts.retain(|_, buckets| !buckets.iter_mut().all(|bucket| bucket.is_fresh(now)));
            }
            if self.accounts.len() >= ACCOUNTS_MAX {
                account = AuditAccount::Others;
            }
        }
        let buckets = self
            .accounts
            .entry(account)
            .or_insert_with(|| [REFUSED, DONE].map(|rate| Bucket::new(rate, now)));
        &mut buckets[usize::from(record.outcome != Outcome::Refused)]
    }

    /// For each account with suppressed records: their number since the last report, and the party of the last one.
    pub(super) fn reports(&mut self, now: Millis) -> Vec<Record> {
        let buckets = self.accounts.values_mut().flatten();
        let left_out = buckets.filter_map(|bucket| bucket.left_out.take());
        left_out
            .map(|(count, last)| Record {
                outcome: last.outcome,
                reason: last.reason,
                caller: last.caller,
                socket: last.socket,
                suppressed: Some(count),
                ..Record::new(now, Op::Suppressed)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::{Credentials, Reason};

    fn refused(at: u64, uid: u32) -> Record {
        Record {
            outcome: Outcome::Refused,
            reason: Some(Reason::UnknownKey),
            socket: Some(Credentials { pid: 1, uid, gid: 1 }),
            ..Record::new(Millis(at), Op::Import)
        }
    }

    fn count(limiter: &mut Limiter, n: u64, record: &Record) -> u64 {
        (0..n).map(|_| u64::from(limiter.admits(record))).sum()
    }

    #[test]
    fn burst_is_written_and_the_rest_counted() {
        let mut limiter = Limiter::default();
        assert_eq!(count(&mut limiter, 5000, &refused(0, 7)), 100);
        assert_eq!(count(&mut limiter, 10, &refused(0, 8)), 10, "another account");
        let done = Record { outcome: Outcome::Done, ..refused(0, 7) };
        assert_eq!(count(&mut limiter, 10, &done), 10, "what is done has a bucket of its own");
        // One token returns each second, and the rest of a second is not lost.
        assert_eq!(count(&mut limiter, 5, &refused(1_999, 7)), 1);
        assert_eq!(count(&mut limiter, 5, &refused(2_000, 7)), 1);
        let reports = limiter.reports(Millis(2_000));
        let [report] = &reports[..] else { panic!("{reports:?}") };
        assert_eq!((report.op, report.suppressed), (Op::Suppressed, Some(4900 + 4 + 4)));
        assert_eq!((report.outcome, report.reason), (Outcome::Refused, Some(Reason::UnknownKey)));
        assert_eq!(report.socket.map(|socket| socket.uid), Some(7));
        assert!(limiter.reports(Millis(2_000)).is_empty(), "said once");
        assert_eq!(count(&mut limiter, 500, &refused(1_000_000, 7)), 100, "never more than a burst");
    }

    #[test]
    fn successful_operations_have_a_high_limit() {
        let mut limiter = Limiter::default();
        let done = Record { outcome: Outcome::Done, ..refused(0, 7) };
        assert_eq!(count(&mut limiter, 100_500, &done), 100_000);
        assert_eq!(limiter.reports(Millis(0))[0].suppressed, Some(500));
    }

    #[test]
    fn accounts_without_end_take_no_memory_without_end() {
        let full = || {
            let mut limiter = Limiter::default();
            let all: u64 = (0..50_000).map(|uid| u64::from(limiter.admits(&refused(0, uid)))).sum();
            assert!(limiter.accounts.len() <= ACCOUNTS_MAX + 1);
            assert!(all <= ACCOUNTS_MAX as u64 + 100, "the others share one bucket: {all}");
            let suppressed: u64 = limiter.reports(Millis(0)).iter().filter_map(|r| r.suppressed).sum();
            assert_eq!(all + suppressed, 50_000, "each is written or counted");
            limiter
        };
        // Accounts without recent records are forgotten.
        let mut limiter = full();
        assert!(limiter.admits(&refused(10_000_000, 60_000)));
        assert_eq!(limiter.accounts.len(), 1);
        // Once a second at most; the bucket of the others is not idle again after that time.
        let mut limiter = full();
        limiter.admits(&refused(999, 60_000));
        assert_eq!((limiter.accounts.len(), limiter.cleared_at), (ACCOUNTS_MAX + 1, Some(0)));
        assert!(limiter.admits(&refused(1_000, 60_000)));
        assert_eq!((limiter.accounts.len(), limiter.cleared_at), (2, Some(1_000)));
    }
}
