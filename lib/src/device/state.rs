//! The keys of a session, and their registration with the next sidecar after a restart.
//!
//! A thread waits for the end of the connection, so that the program need not call anything: a process that uses mapped
//! memory may compute for hours without a call. The thread starts with the first key.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shmesh_proto::broker::{
    self, Admitted, Claim, Code, Done, ExportKey, Hello, Restore, event::SessionEvent, reply, request,
};
use shmesh_proto::key::KEY_BYTES;
use shmesh_proto::limits::{MAX_PACKET_BYTES, MAX_RESTORED_PIDS, MAX_SUBJECT_BYTES};
use shmesh_sys::epoll::Epoll;
use shmesh_sys::eventfd::Doorbell;
use shmesh_sys::poll::{self, Watch};
use shmesh_sys::socket;

use super::{BareTgid, DeviceMemory, ExportFlags};
use crate::client::{self, ANSWER_LIMIT, Client};
use crate::error::{Error, ErrorKind, Result};

/// How long a call waits for a sidecar while there is none.
const AWAY_LIMIT: Duration = ANSWER_LIMIT;
/// Pause between two attempts to connect; it doubles each time up to the maximum.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_LAST: Duration = Duration::from_millis(500);

/// Pods or service accounts in one packet: these of the longest names take half of it.
const RESTORED_NAMES: usize = MAX_PACKET_BYTES / 2 / MAX_SUBJECT_BYTES;

pub(super) type KeyBytes = [u8; KEY_BYTES];

/// An export of this session.
#[derive(Debug)]
pub(super) struct Export<M> {
    /// Kept until the export is closed, because importers have it mapped.
    pub(super) memory: M,
    pub(super) flags: ExportFlags,
    /// Proves to a new sidecar that the key is ours. Empty if the sidecar does not restore keys.
    pub(super) secret: Vec<u8>,
    pub(super) admitted: BTreeMap<i32, Admitted>,
    /// `namespace/name` of each pod that it admits.
    pub(super) pods: BTreeSet<String>,
    /// The same of service accounts.
    pub(super) service_accounts: BTreeSet<String>,
    /// Whether it was closed by force, so that it may still be mapped elsewhere.
    pub(super) is_forced: bool,
}

/// An import of this session.
#[derive(Debug)]
pub(super) struct ImportState<M> {
    pub(super) memory: Arc<M>,
    pub(super) count: u64,
}

#[derive(Debug)]
pub(super) struct State<M> {
    pub(super) client: Client,
    pub(super) exports: HashMap<KeyBytes, Export<M>>,
    pub(super) imports: HashMap<KeyBytes, ImportState<M>>,
    /// This process, once broker and driver agree on its identity; `None` inside if the driver has no notion of that.
    pub(super) agreed: Option<Option<BareTgid>>,
    /// Number of reconnections to a sidecar.
    pub(super) reconnected: u64,
    is_watched: bool,
    is_over: bool,
}

#[derive(Debug)]
pub(super) struct Shared<M> {
    state: Mutex<State<M>>,
    over: Condvar,
    /// Watches the current connection, and the bell.
    readiness: Epoll,
    /// Rung when events were received during another request.
    bell: Doorbell,
}

/// Connects to the broker of a link. Waits for one while the link exists: a sidecar may just be starting, and begins to listen
/// only after the link exists.
pub(super) fn connect(dir: &Path, link: &str) -> Result<Client> {
    let may_begin =
        |error: &Error| matches!(error.kind(), ErrorKind::NoBroker { .. }) && client::link_exists(dir, link);
    retry(Instant::now() + AWAY_LIMIT, || Client::connect(dir, link), may_begin)
}

/// Repeats `attempt` with pauses, until it succeeds, its error is not `temporary`, or the deadline has passed.
fn retry<T>(
    deadline: Instant,
    mut attempt: impl FnMut() -> Result<T>,
    temporary: impl Fn(&Error) -> bool,
) -> Result<T> {
    let mut pause = RETRY_FIRST;
    loop {
        match attempt() {
            Err(error) if Instant::now() < deadline && temporary(&error) => std::thread::sleep(pause),
            ended => return ended,
        }
        pause = (pause * 2).min(RETRY_LAST);
    }
}

impl<M: DeviceMemory> Shared<M> {
    pub(super) fn new(client: Client) -> Result<Self> {
        let failed =
            |error| Error::system(&client.link().into(), "watch the connection to its broker", error);
        let readiness = Epoll::new().map_err(failed)?;
        let bell = Doorbell::new().map_err(failed)?;
        readiness.add(&bell).and_then(|()| readiness.add(client.connection())).map_err(failed)?;
        let state = State {
            client,
            exports: HashMap::new(),
            imports: HashMap::new(),
            agreed: None,
            reconnected: 0,
            is_watched: false,
            is_over: false,
        };
        Ok(Self { state: Mutex::new(state), over: Condvar::new(), readiness, bell })
    }

    pub(super) fn readiness(&self) -> &Epoll {
        &self.readiness
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State<M>> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that reconnects whenever the connection ends.
    pub(super) fn watch(self: &Arc<Self>, state: &mut State<M>) -> Result<()> {
        if state.is_watched {
            return Ok(());
        }
        let shared = Arc::clone(self);
        let thread =
            std::thread::Builder::new().name("shmesh-keys".into()).spawn(move || shared.keep_connected());
        thread.map_err(|error| Error::system(&state.client.link().into(), "start a thread", error))?;
        state.is_watched = true;
        Ok(())
    }

    fn keep_connected(&self) {
        loop {
            let connection: Arc<OwnedFd> = Arc::clone(self.lock().client.connection());
            if poll::wait(&mut [Watch::hung_up(&connection)], None).is_err() {
                return;
            }
            drop(connection);
            let mut state = self.lock();
            let mut pause = RETRY_FIRST;
            while !state.is_over && state.client.is_hung_up() && self.reconnect(&mut state).is_err() {
                let waited = self.over.wait_timeout(state, pause);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                pause = (pause * 2).min(RETRY_LAST);
            }
            if state.is_over {
                return;
            }
        }
    }

    /// Ends the thread. It may keep the connection for a moment, which is not used any more.
    pub(super) fn end(&self, state: &mut State<M>) {
        state.is_over = true;
        socket::shut(state.client.connection());
        self.over.notify_all();
    }

    /// Stops watching a connection that has ended, so that it no longer wakes the program.
    pub(super) fn lose(&self, state: &State<M>) {
        self.readiness.remove(state.client.connection());
    }

    /// Clears the bell that announces events.
    pub(super) fn hear(&self) {
        while self.bell.take().is_ok_and(|rung| rung) {}
    }

    /// Sends a request. If the sidecar has ended, sends it to the next one, if there is one in time.
    pub(super) fn ask(
        &self,
        state: &mut State<M>,
        op: &request::Op,
        fds: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(reply::Result, Vec<OwnedFd>)> {
        let deadline = Instant::now() + AWAY_LIMIT;
        loop {
            let answer = state.client.ask(op.clone(), fds);
            if !is_away(&answer) {
                return answer;
            }
            retry(deadline, || self.reconnect(state), |_| true)?;
        }
    }

    pub(super) fn done(&self, state: &mut State<M>, op: &request::Op) -> Result<Done> {
        match self.ask(state, op, &[])? {
            (reply::Result::Done(done), _) => Ok(done),
            _ => Err(state.client.unexpected()),
        }
    }

    /// Connects to the current broker of the link, and registers the keys of this session.
    fn reconnect(&self, state: &mut State<M>) -> Result<()> {
        self.lose(state);
        state.client.reconnect()?;
        state.reconnected += 1;
        let restored = state.restore().and_then(|()| {
            let added = self.readiness.add(state.client.connection());
            added.map_err(|error| Error::system(&state.client.link().into(), "watch its broker", error))
        });
        // A connection on which not everything was registered is closed: the next attempt makes another one.
        restored.inspect_err(|_| socket::shut(state.client.connection()))?;
        if state.client.kept_events().next().is_some() {
            // An additional signal does no harm.
            let _ = self.bell.signal();
        }
        Ok(())
    }
}

/// The response of a new sidecar to a key.
enum KeyRegistration {
    Yes,
    /// The key is not ours there, or there is no room for it.
    Lost,
    /// A participant serves the link, which keeps no keys.
    NoSidecar,
}

impl<M: DeviceMemory> State<M> {
    fn restore(&mut self) -> Result<()> {
        // A refusal of the whole session is returned here; the session retries later.
        let hello = self.client.converse(request::Op::Hello(Hello {}), &[])?;
        hello.map_err(|refused| self.client.refused(refused))?;
        let of_importers: Vec<KeyBytes> = self.imports.keys().copied().collect();
        let is_lost = |client: &Client, key: &KeyBytes| {
            client.kept_events().any(|event| matches!(event, SessionEvent::RegionLost(lost) if lost == key))
        };
        let mut lost = Vec::new();
        if !self.exports.is_empty() && !self.is_who_it_was()? {
            lost.extend(self.exports.keys().copied());
        } else {
            for (key, export) in &self.exports {
                match restore_export(&mut self.client, key, export)? {
                    KeyRegistration::Yes => {}
                    KeyRegistration::Lost => lost.push(*key),
                    KeyRegistration::NoSidecar => return Ok(()),
                }
            }
        }
        for key in of_importers {
            if is_lost(&self.client, &key) {
                continue;
            }
            let claim = request::Op::Claim(Claim { key: key.to_vec() });
            match registered(&mut self.client, claim, &[])? {
                KeyRegistration::Yes => {}
                KeyRegistration::Lost => lost.push(key),
                KeyRegistration::NoSidecar => return Ok(()),
            }
        }
        for key in lost {
            self.client.happened(SessionEvent::RegionLost(key.to_vec()));
        }
        Ok(())
    }

    /// Whether the sidecar identifies this process as before. Drivers have process ids on their lists, so a sidecar
    /// with another id is useless.
    fn is_who_it_was(&mut self) -> Result<bool> {
        let Some(Some(driver)) = self.agreed else { return Ok(true) };
        let asked = self.client.converse(request::Op::BareTgid(broker::BareTgid {}), &[])?;
        Ok(matches!(asked, Ok((reply::Result::Tgid(tgid), _)) if BareTgid(tgid.bare_tgid) == driver))
    }
}

fn restore_export<M: DeviceMemory>(
    client: &mut Client,
    key: &KeyBytes,
    export: &Export<M>,
) -> Result<KeyRegistration> {
    if export.secret.is_empty() {
        return Ok(KeyRegistration::Lost);
    }
    let admitted: Vec<_> = export.admitted.values().copied().collect();
    let mut pages: Vec<_> = admitted
        .chunks(MAX_RESTORED_PIDS)
        .map(|page| Restore { admitted: page.to_vec(), ..Restore::default() })
        .collect();
    let pods: Vec<_> = export.pods.iter().cloned().collect();
    let accounts: Vec<_> = export.service_accounts.iter().cloned().collect();
    let of_pods = pods.chunks(RESTORED_NAMES).map(|page| (page.to_vec(), Vec::new()));
    let of_accounts = accounts.chunks(RESTORED_NAMES).map(|page| (Vec::new(), page.to_vec()));
    pages.extend(of_pods.chain(of_accounts).map(|(pods, service_accounts)| Restore {
        pods,
        service_accounts,
        ..Restore::default()
    }));
    if pages.is_empty() {
        pages.push(Restore::default());
    }
    let fds: Vec<_> = export.memory.fd().into_iter().collect();
    let last = pages.len() - 1;
    for (page, names) in pages.into_iter().enumerate() {
        let restore = Restore {
            key: key.to_vec(),
            secret: export.secret.clone(),
            export: Some(exported(&export.memory, export.flags)),
            closing: export.is_forced,
            more: page < last,
            ..names
        };
        match registered(client, request::Op::Restore(restore), &fds)? {
            KeyRegistration::Yes => {}
            other => return Ok(other),
        }
    }
    Ok(KeyRegistration::Yes)
}

/// Registers a key again.
fn registered(
    client: &mut Client,
    op: request::Op,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Result<KeyRegistration> {
    match client.converse(op, fds)? {
        Ok(_) => Ok(KeyRegistration::Yes),
        Err(refused) => match refused.code() {
            Code::Unsupported => Ok(KeyRegistration::NoSidecar),
            // A refusal of this connection only: another connection may succeed.
            Code::Unidentified | Code::Draining => Err(client.refused(refused)),
            _ => Ok(KeyRegistration::Lost),
        },
    }
}

/// The description of memory for a broker.
pub(super) fn exported<M: DeviceMemory>(memory: &M, flags: ExportFlags) -> ExportKey {
    ExportKey { size: memory.size(), flags: flags.0, mechanism: M::MECHANISM.into(), handle: memory.handle() }
}

/// Whether the broker has ended.
pub(super) fn is_away<T>(answer: &Result<T>) -> bool {
    answer.as_ref().is_err_and(|error| matches!(error.kind(), ErrorKind::NoBroker { .. }))
}
