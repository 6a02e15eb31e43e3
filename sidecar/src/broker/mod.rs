//! The broker of device keys: the exported regions, their admitted processes and their importers.
//!
//! A state machine: [`Command`]s in, [`Effect`]s out, in the order in which they must be carried out. It does no I/O,
//! never waits and reads no clock, so it can be tested with thousands of random sequences (`tests/suite/broker_model`)
//! and read on its own.
//!
//! | file | concept |
//! |---|---|
//! | `command.rs` | commands and effects |
//! | `request.rs` | handling of one request: caller, answer, audit record |
//! | `session.rs` | connections, deaths of processes, timeouts |
//! | `export.rs` | exporting memory under a new key |
//! | `admit.rs` | admitting processes, pods and service accounts |
//! | `import.rs` | delivery and acknowledgement |
//! | `close.rs` | closing imports and exports |
//! | `recover.rs` | registering again what a former broker knew |
//! | `inspect.rs` | lists for the operator |
//! | `region.rs`, `grant.rs`, `table.rs` | the state |
//! | `policy.rs` | all limits |
//! | `audit.rs`, `refusal.rs` | audit records; refusals sent to the caller |
//!
//! # Lifetimes
//!
//! Exports and imports belong to a **process**, not to the session that requested them: a library may connect again,
//! and a process that has lost its connection may still have the memory mapped. They end when the process closes or
//! detaches, or when it dies. When a session ends, only its pending requests end.
//!
//! An import counts from the moment the memory is *delivered*, not when that is acknowledged: from then on the importer
//! may have it mapped. A grant that is not acknowledged in time becomes invalid; its import stays registered until it
//! is closed or its process dies.
//!
//! A forced close, and `Detach` of an exporter, send the importers an event and drop the descriptor at once, so that no process can
//! import the key any more. The key stays registered until the last importer is gone. The exporter gets `Unused` then: from that
//! moment it can free the memory without a fault in another process.
//!
//! # After a restart
//!
//! Nothing is stored. For [`Policy::restore_millis`] after [`Command::Recover`], exporters register their keys again
//! (`Restore`) and importers what they have mapped (`Claim`), in any order; imports of a key that is not restored yet
//! wait. A key is the hash of a secret and of its exporter's identity, so only the exporter, and no importer, can prove
//! that it is its own. A claim counts as an import when the key is restored and admits the claimant. Until the time is
//! over a restored key counts as imported; then claims to keys that were not restored end in `RegionLost`.
//!
//! # Responsibilities of the socket
//!
//! - It numbers sessions and descriptors and never reuses a number. It carries out effects in their order:
//!   [`Effect::Reply`] sends a copy of a descriptor, [`Effect::DropFd`] closes it.
//! - It identifies a peer before [`Command::Opened`], and keeps the pidfd from [`Effect::Watch`] on. It does not pass
//!   on requests that were sent by another process than the connected one.
//! - It checks each descriptor first: a sealed memfd of the claimed size, or a device. For the broker a descriptor is a
//!   number, and a size is a claim.
//! - It handles `Attach`, `Seated` and `Offer`, which concern the link; the broker refuses them as unsupported. So are
//!   `ListProcesses` and `ListKeys`: the socket decides which process may ask, and `inspect.rs` has the answers.
//! - It ticks at [`Broker::next_deadline`], writes the audit log, and limits the rate of refusals in it.

mod admit;
mod audit;
mod clock;
mod close;
mod command;
mod digest;
mod export;
mod grant;
mod import;
mod inspect;
mod policy;
mod recover;
mod refusal;
mod region;
mod request;
mod session;
mod table;

use std::collections::BTreeMap;
use std::fmt;

pub use audit::{Credentials, Op, Outcome, Party, PartyPod, Reason, Record};
pub use clock::Millis;
pub use command::{Command, Effect, FdToken, ProcessId, SessionId, Ticket};
pub use inspect::Holdings;
pub use policy::Policy;

use admit::PendingAdmission;
use grant::Grants;
use recover::Recovery;
pub(crate) use table::Account;
use table::Tables;

/// The broker of device keys of one sidecar. `Debug` prints counts, and no key or handle.
pub struct Broker {
    policy: Policy,
    entropy: Entropy,
    now: Millis,
    draining: bool,
    tables: Tables,
    grants: Grants,
    questions: BTreeMap<Ticket, PendingAdmission>,
    questions_ever: u64,
    recovery: Option<Recovery>,
    effects: Vec<Effect>,
}

type Fill = dyn FnMut(&mut [u8]) + Send;

struct Entropy(Box<Fill>);

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker").field("now", &self.now).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// Counts of the broker's tables, for gauges.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Stats {
    /// Sessions of all clients.
    pub sessions: usize,
    /// Processes that have a session, a key or an import.
    pub processes: usize,
    /// Keys, including those that wait for their last importer.
    pub keys: usize,
    /// Total size of the keys' memory in bytes.
    pub bytes: u64,
    /// Descriptors that the broker holds.
    pub descriptors: usize,
    /// Imports, including those that wait for their exporter.
    pub imports: usize,
    /// Grants that wait for their acknowledgement.
    pub grants: usize,
    /// Questions that wait for the identity service.
    pub questions: usize,
    /// Imports whose exporter has not reconnected after a restart.
    pub claims: usize,
}

impl Broker {
    /// Creates a broker without sessions. `entropy` fills bytes from the system's source of random numbers; it must not
    /// return predictable bytes.
    #[must_use]
    pub fn new(policy: Policy, entropy: impl FnMut(&mut [u8]) + Send + 'static) -> Self {
        Self {
            policy,
            entropy: Entropy(Box::new(entropy)),
            now: Millis::default(),
            draining: false,
            tables: Tables::default(),
            grants: Grants::default(),
            questions: BTreeMap::new(),
            questions_ever: 0,
            recovery: None,
            effects: Vec::new(),
        }
    }

    /// Handles one command. The effects must be carried out in their order: a descriptor may be sent and then dropped.
    ///
    /// Commands of an unknown session or process are ignored, but the descriptors of its request are dropped, so the
    /// socket needs no table of its own to stay consistent.
    pub fn handle(&mut self, now: Millis, command: Command) -> Vec<Effect> {
        self.now = self.now.max(now);
        // First, so that timeouts hold even if `Tick` is late.
        self.expire();
        match command {
            Command::Opened { session, peer } => self.opened(session, peer),
            Command::Closed { session } => self.closed(session),
            Command::Request { session, request, fds } => self.request(session, request, fds),
            Command::Died { process } => self.died(process),
            Command::Resolved { ticket, found } => self.resolved(ticket, &found),
            Command::Unanswered { ticket } => self.unanswered(ticket),
            Command::Recover => self.recover(),
            Command::Tick => {}
            Command::Drain => self.drain(),
        }
        std::mem::take(&mut self.effects)
    }

    /// The time at which to send [`Command::Tick`], if no other command comes before. A deadline is over when the clock
    /// shows it.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Millis> {
        let question = self.questions.first_key_value().map(|(_, question)| question.deadline);
        let recovery = self.recovery.as_ref().map(|recovery| recovery.until);
        self.grants.next_deadline().into_iter().chain(question).chain(recovery).min()
    }

    /// Whether there is no key and no question, so that a draining sidecar can exit.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.tables.regions.is_empty() && self.questions.is_empty()
    }

    /// Counts the entries of all tables.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let regions = || self.tables.regions.values();
        Stats {
            sessions: self.tables.sessions.len(),
            processes: self.tables.processes.len(),
            keys: regions().count(),
            bytes: regions().map(|region| region.size).fold(0, u64::saturating_add),
            descriptors: regions().filter(|region| region.fd.is_some()).count(),
            imports: regions().map(|region| region.imports.len()).sum(),
            grants: self.grants.len(),
            questions: self.questions.len(),
            claims: self.tables.claims().count(),
        }
    }

    /// Recounts all counters from the tables. For tests: it visits every entry.
    ///
    /// # Errors
    /// The inconsistency that was found.
    pub fn check(&self) -> Result<(), &'static str> {
        if let Some(what) = self.tables.inconsistency() {
            return Err(what);
        }
        let imports =
            || self.tables.regions.iter().flat_map(|(id, r)| r.imports.iter().map(move |i| (id, i)));
        let bound = imports().all(|(id, (process, import))| {
            import.grant.is_none_or(|digest| {
                self.grants.get(&digest).is_some_and(|g| g.region == *id && g.importer == *process)
            })
        });
        let granted = imports().filter(|(_, (_, import))| import.grant.is_some()).count();
        if !self.grants.is_consistent() || !bound || granted != self.grants.len() {
            return Err("grants");
        }
        let asked = |ticket: &Ticket, question: &PendingAdmission| {
            self.tables
                .sessions
                .get(&question.session)
                .is_some_and(|session| session.questions.contains(ticket))
        };
        let waiting: usize = self.tables.sessions.values().map(|session| session.questions.len()).sum();
        if waiting != self.questions.len() || !self.questions.iter().all(|(t, q)| asked(t, q)) {
            return Err("questions");
        }
        Ok(())
    }

    fn draw<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        (self.entropy.0)(&mut bytes);
        bytes
    }
}
