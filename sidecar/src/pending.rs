//! Clients that have connected and not yet proved their identity, before Linux 6.5. The actor does not know them, so
//! the limits per process and account apply here too, by their claimed identity.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shmesh_proto::identity::PeerIdentity;

use crate::broker::{Account, Policy, ProcessId, Reason};

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum PendingKey {
    Process(ProcessId),
    Account(Account),
}

type Counts = BTreeMap<PendingKey, usize>;

/// Counts of pending clients by process and account.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingClients(Arc<Mutex<Counts>>);

/// The place of one pending client, freed when this is dropped.
#[derive(Debug)]
pub(crate) struct PendingPermit {
    all: PendingClients,
    whose: Vec<PendingKey>,
}

impl PendingClients {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Numbers, each of which changes as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for one more client.
    pub(crate) fn enter(&self, peer: &PeerIdentity) -> Result<PendingPermit, Reason> {
        let policy = Policy::default();
        let process = ProcessId::of(peer).map(|process| {
            (PendingKey::Process(process), policy.sessions_per_process, Reason::SessionsOfProcess)
        });
        let account =
            (PendingKey::Account(Account::of(peer)), policy.sessions_per_account, Reason::SessionsOfAccount);
        let limits = || process.iter().chain([&account]);
        let mut counts = self.counts();
        if let Some((.., reason)) =
            limits().find(|(whose, limit, _)| counts.get(whose).is_some_and(|count| count >= limit))
        {
            return Err(*reason);
        }
        let whose: Vec<_> = limits().map(|(whose, ..)| whose.clone()).collect();
        for one in &whose {
            *counts.entry(one.clone()).or_default() += 1;
        }
        Ok(PendingPermit { all: self.clone(), whose })
    }
}

impl Drop for PendingPermit {
    fn drop(&mut self) {
        let mut counts = self.all.counts();
        for one in &self.whose {
            if let Some(count) = counts.get_mut(one) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(one);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(bare_tgid: i32, uid: u32) -> PeerIdentity {
        PeerIdentity { bare_tgid, uid, ..PeerIdentity::default() }
    }

    #[test]
    fn neither_a_process_nor_an_account_takes_all_places() {
        let pending = PendingClients::default();
        let one: Vec<_> = (0..64).map(|_| pending.enter(&peer(1, 7)).unwrap()).collect();
        assert_eq!(pending.enter(&peer(1, 7)).unwrap_err(), Reason::SessionsOfProcess);
        let more: Vec<_> = (2..194).map(|tgid| pending.enter(&peer(tgid, 7)).unwrap()).collect();
        assert_eq!(pending.enter(&peer(500, 7)).unwrap_err(), Reason::SessionsOfAccount);
        let other = pending.enter(&peer(500, 8)).unwrap();
        drop((one, more));
        assert!(pending.enter(&peer(1, 7)).is_ok());
        drop(other);
        assert!(pending.counts().is_empty());
    }
}
