//! Grants: one-time permissions of one process, each of which must be acknowledged within a time limit.
//!
//! A grant is 128 random bits; the table has only its hash. It is bound to one region, by a number that is never
//! reused, and to one importer. Each step has a grant of its own: the exporter acknowledges one when it has admitted
//! the importer, the importer another when it has mapped the memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::audit::Reason;
use super::digest::Digest;
use super::region::RegionId;
use super::{Millis, ProcessId};

/// Bytes of a grant.
pub(super) const GRANT_BYTES: usize = 16;

/// Number of remembered grants that are over, by which the log distinguishes a replay from a guess.
const REMEMBERED: usize = 1024;

#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    pub(super) region: RegionId,
    pub(super) importer: ProcessId,
    pub(super) step: GrantStep,
    pub(super) deadline: Millis,
}

/// The step that a grant waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum GrantStep {
    /// The exporter is to admit the importer in its driver.
    Admit,
    /// The importer is to map the memory.
    Map,
}

#[derive(Debug, Default)]
pub(super) struct Grants {
    live: BTreeMap<Digest, Grant>,
    by_deadline: BTreeSet<(Millis, Digest)>,
    over: BTreeMap<Digest, Reason>,
    over_in_order: VecDeque<Digest>,
}

impl Grants {
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    pub(super) fn get(&self, digest: &Digest) -> Option<&Grant> {
        self.live.get(digest)
    }

    /// The reason why a grant is not valid.
    pub(super) fn reason(&self, digest: &Digest) -> Reason {
        self.over.get(digest).copied().unwrap_or(Reason::UnknownGrant)
    }

    pub(super) fn is_taken(&self, digest: &Digest) -> bool {
        self.live.contains_key(digest) || self.over.contains_key(digest)
    }

    pub(super) fn add(
        &mut self,
        digest: Digest,
        region: RegionId,
        importer: ProcessId,
        step: GrantStep,
        deadline: Millis,
    ) {
        self.live.insert(digest, Grant { region, importer, step, deadline });
        self.by_deadline.insert((deadline, digest));
    }

    /// Ends a grant. Later uses of it are refused for `reason`.
    pub(super) fn end(&mut self, digest: &Digest, reason: Reason) -> Option<Grant> {
        let grant = self.live.remove(digest)?;
        self.by_deadline.remove(&(grant.deadline, *digest));
        if self.over_in_order.len() == REMEMBERED
            && let Some(oldest) = self.over_in_order.pop_front()
        {
            self.over.remove(&oldest);
        }
        self.over.insert(*digest, reason);
        self.over_in_order.push_back(*digest);
        Some(grant)
    }

    pub(super) fn next_deadline(&self) -> Option<Millis> {
        self.by_deadline.first().map(|(deadline, _)| *deadline)
    }

    /// A grant that has expired.
    pub(super) fn late(&self, now: Millis) -> Option<Digest> {
        self.by_deadline.first().filter(|(deadline, _)| *deadline <= now).map(|(_, digest)| *digest)
    }

    /// Whether the two tables are consistent.
    pub(super) fn is_consistent(&self) -> bool {
        self.live.len() == self.by_deadline.len()
            && self.live.iter().all(|(digest, grant)| self.by_deadline.contains(&(grant.deadline, *digest)))
            && self.over.len() == self.over_in_order.len()
            && self.over.len() <= REMEMBERED
            && self.over.keys().all(|digest| !self.live.contains_key(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_grants_that_are_over_is_bounded() {
        let mut grants = Grants::default();
        let importer = ProcessId { bare_tgid: 1, start_time: 0, pidfd_inode: 0 };
        let digest = |n: usize| Digest::of(&n.to_le_bytes());
        for n in 0..=REMEMBERED {
            grants.add(digest(n), RegionId(0), importer, GrantStep::Map, Millis(0));
            assert!(grants.end(&digest(n), Reason::GrantUsed).is_some());
        }
        assert!(grants.is_consistent());
        assert_eq!(grants.reason(&digest(0)), Reason::UnknownGrant, "the oldest is forgotten");
        assert_eq!(grants.reason(&digest(1)), Reason::GrantUsed);
        assert!(grants.end(&digest(1), Reason::GrantUsed).is_none(), "it is over");
    }
}
