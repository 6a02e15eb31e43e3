//! A session with the broker of a link: one connection for requests, answers and events. Blocking, without threads.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shmesh_proto::broker::{
    Code, Event, Hello, ListKeys, ListProcesses, Refused, Reply, Request, reply, request,
};
use shmesh_proto::limits::ANSWER_MILLIS;
use shmesh_proto::packet;

pub use shmesh_proto::broker::event::SessionEvent;
pub use shmesh_proto::broker::{KeyInfo, Mechanism, Process, Seat};
pub use shmesh_proto::identity::{PeerIdentity, Pod};

use shmesh_sys::poll::{self, Watch};
use shmesh_sys::{errno, socket};

use crate::config::{LinkConfig, LinkName};
use crate::error::{Error, ErrorKind, Result};
use crate::link::host::{find, lock_path, proof};
use crate::segment::lock::Lock;
use crate::segment::store::Store;

/// Time limit for an answer of the broker, which may have to ask others first, for as long as a grant lives.
pub(crate) const ANSWER_LIMIT: Duration =
    Duration::from_millis(shmesh_proto::limits::GRANT_MILLIS + 2 * ANSWER_MILLIS);
/// Maximum number of events that were not taken yet; older ones are dropped.
const EVENTS_MAX: usize = 1024;

/// All processes that a sidecar has identified.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessList {
    /// Processes, by their bare thread-group ids.
    pub processes: Vec<Process>,
    /// Connections of unidentified processes.
    pub unidentified: u32,
    /// Seats of the link that none of the processes has claimed.
    pub unclaimed: Vec<Seat>,
}

/// A session with the broker of a link.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let mut config = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::client::Client;
/// config.backing = shmesh::config::Backing::Memfd;
/// let phy = options.create(&config)?;
/// let mut client = Client::connect(dir.path(), "fronthaul")?;
/// assert!(client.identity()?.is_none(), "a participant serves this link, and identifies no process; a sidecar does");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Client {
    link: Arc<str>,
    dir: PathBuf,
    path: PathBuf,
    connection: Arc<OwnedFd>,
    last_id: u64,
    events: VecDeque<SessionEvent>,
}

impl Client {
    /// Connects to the broker of `link` in the IPC directory `dir`.
    ///
    /// # Errors
    /// [`Name`](ErrorKind::Name); [`NoBroker`](ErrorKind::NoBroker) if the link has no broker;
    /// [`System`](ErrorKind::System).
    pub fn connect(dir: impl AsRef<Path>, link: &str) -> Result<Self> {
        let name: LinkName = link.parse()?;
        let link: Arc<str> = name.as_str().into();
        let dir = dir.as_ref().to_owned();
        let (path, connection) = dial(&dir, &link)?;
        Ok(Self { link, dir, path, connection, last_id: 0, events: VecDeque::new() })
    }

    /// Connects again. Events that were not taken yet are kept.
    pub(crate) fn reconnect(&mut self) -> Result<()> {
        (self.path, self.connection) = dial(&self.dir, &self.link)?;
        Ok(())
    }

    /// The connection, until [`reconnect`](Self::reconnect).
    pub(crate) fn connection(&self) -> &Arc<OwnedFd> {
        &self.connection
    }

    /// Whether the broker has closed the connection.
    pub(crate) fn is_hung_up(&self) -> bool {
        let ready = poll::wait(&mut [Watch::hung_up(&*self.connection)], Some(Instant::now()));
        ready.is_ok_and(|ready| ready > 0)
    }

    /// The name of the link.
    #[must_use]
    pub fn link(&self) -> &str {
        &self.link
    }

    /// The identity of this process as the broker knows it; `None` if a participant serves the link, which identifies
    /// no process.
    ///
    /// # Errors
    /// [`Refused`](ErrorKind::Refused); [`NoBroker`](ErrorKind::NoBroker) if it has ended.
    pub fn identity(&mut self) -> Result<Option<PeerIdentity>> {
        match self.ask(request::Op::Hello(Hello {}), &[])? {
            (reply::Result::Welcome(welcome), _) => Ok(welcome.identity),
            _ => Err(self.unexpected()),
        }
    }

    /// All processes that the sidecar of the link knows; `None` without a sidecar: a participant that serves the link
    /// identifies no process.
    ///
    /// Only an operator may ask: a process in the sidecar's pid namespace that runs as its user or root, such as one
    /// that `kubectl exec` starts in its container.
    ///
    /// # Errors
    /// [`Denied`](ErrorKind::Denied) for all other processes; [`NoBroker`](ErrorKind::NoBroker) if the sidecar has
    /// ended.
    pub fn processes(&mut self) -> Result<Option<ProcessList>> {
        let mut all = ProcessList::default();
        loop {
            let skip = u32::try_from(all.processes.len()).unwrap_or(u32::MAX);
            let page = match self.ask_sidecar(request::Op::ListProcesses(ListProcesses { skip }))? {
                None => return Ok(None),
                Some(reply::Result::Processes(page)) => page,
                Some(_) => return Err(self.unexpected()),
            };
            if skip == 0 {
                (all.unidentified, all.unclaimed) = (page.unidentified, page.unclaimed);
            }
            let is_last = page.processes.is_empty();
            all.processes.extend(page.processes);
            if is_last || all.processes.len() >= page.total as usize {
                return Ok(Some(all));
            }
        }
    }

    /// All device keys of the sidecar, without the keys themselves. `None` without a sidecar, and only for an operator,
    /// as with [`processes`](Self::processes).
    ///
    /// # Errors
    /// As [`processes`](Self::processes).
    pub fn all_keys(&mut self) -> Result<Option<Vec<KeyInfo>>> {
        let mut all = Vec::new();
        loop {
            let skip = u32::try_from(all.len()).unwrap_or(u32::MAX);
            let page = match self.ask_sidecar(request::Op::ListKeys(ListKeys { skip }))? {
                None => return Ok(None),
                Some(reply::Result::AllKeys(page)) => page,
                Some(_) => return Err(self.unexpected()),
            };
            let is_last = page.keys.is_empty();
            all.extend(page.keys);
            if is_last || all.len() >= page.total as usize {
                return Ok(Some(all));
            }
        }
    }

    /// Sends a request to the sidecar. `None` if this broker is not a sidecar.
    fn ask_sidecar(&mut self, op: request::Op) -> Result<Option<reply::Result>> {
        match self.converse(op, &[])? {
            Ok((result, _)) => Ok(Some(result)),
            Err(refused) if refused.code() == Code::Unsupported => Ok(None),
            Err(refused) => Err(self.refused(refused)),
        }
    }

    /// Takes the oldest event. Never waits.
    ///
    /// # Errors
    /// [`NoBroker`](ErrorKind::NoBroker) if it has ended: connect again.
    pub fn event(&mut self) -> Result<Option<SessionEvent>> {
        while self.is_readable(Duration::ZERO)? {
            let (reply, _) = self.receive()?;
            self.keep_event(reply)?;
        }
        Ok(self.events.pop_front())
    }

    /// Takes the oldest received event, even if the broker has ended.
    pub(crate) fn kept_event(&mut self) -> Option<SessionEvent> {
        self.events.pop_front()
    }

    /// Received events that were not taken yet.
    pub(crate) fn kept_events(&self) -> impl Iterator<Item = &SessionEvent> {
        self.events.iter()
    }

    /// Adds an event on behalf of a broker that has ended.
    pub(crate) fn happened(&mut self, happened: SessionEvent) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(happened);
    }

    /// Drops received events that were not taken yet.
    pub(crate) fn forget(&mut self, is_old: impl Fn(&SessionEvent) -> bool) {
        self.events.retain(|happened| !is_old(happened));
    }

    fn keep_event(&mut self, reply: Reply) -> Result<()> {
        match reply.result {
            Some(reply::Result::Challenge(challenge)) => {
                socket::send(&*self.connection, &proof(challenge), &[]).map_err(|error| self.lost(error))?;
            }
            Some(reply::Result::Event(Event { happened: Some(happened) })) => {
                self.happened(happened);
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends a request, and waits for the answer. Events that come first are kept.
    pub(crate) fn ask(
        &mut self,
        op: request::Op,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(reply::Result, Vec<OwnedFd>)> {
        self.converse(op, fds)?.map_err(|refused| self.refused(refused))
    }

    /// As [`ask`](Self::ask), but returns a refusal as a value.
    pub(crate) fn converse(
        &mut self,
        op: request::Op,
        fds: &[BorrowedFd<'_>],
    ) -> Result<std::result::Result<(reply::Result, Vec<OwnedFd>), Refused>> {
        self.last_id += 1;
        let request = packet::encode(&Request::new(self.last_id, op));
        socket::send(&*self.connection, &request, fds).map_err(|error| self.lost(error))?;
        let deadline = Instant::now() + ANSWER_LIMIT;
        loop {
            if !self.is_readable(deadline.saturating_duration_since(Instant::now()))? {
                return Err(self.lost(std::io::ErrorKind::TimedOut.into()));
            }
            let (reply, fds) = self.receive()?;
            match reply {
                Reply { result: Some(reply::Result::Refused(refused)), id }
                    if id == self.last_id || id == 0 =>
                {
                    return Ok(Err(refused));
                }
                Reply { result: Some(result), id } if id == self.last_id => return Ok(Ok((result, fds))),
                event => self.keep_event(event)?,
            }
        }
    }

    fn receive(&self) -> Result<(Reply, Vec<OwnedFd>)> {
        let (bytes, fds) = socket::receive(&*self.connection).map_err(|error| self.lost(error))?;
        if bytes.is_empty() {
            return Err(self.lost(std::io::ErrorKind::ConnectionReset.into()));
        }
        let reply = packet::decode(&bytes).map_err(|_| self.unexpected())?;
        Ok((reply, fds))
    }

    fn is_readable(&self, limit: Duration) -> Result<bool> {
        let deadline = Instant::now() + limit;
        let ready = poll::wait(&mut [Watch::readable(&*self.connection)], Some(deadline));
        let ready = ready.map_err(|error| Error::system(&self.link, "wait for its broker", error))?;
        Ok(ready > 0)
    }

    pub(crate) fn refused(&self, refused: Refused) -> Error {
        let link = Arc::clone(&self.link);
        match refused.code() {
            Code::Busy => ErrorKind::Busy { link, importers: refused.importers },
            Code::Denied => ErrorKind::Denied { link, text: refused.text },
            _ => ErrorKind::Refused { link, text: refused.text },
        }
        .into()
    }

    fn lost(&self, error: std::io::Error) -> Error {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => {
                ErrorKind::NoBroker { link: Arc::clone(&self.link), path: self.path.clone() }.into()
            }
            _ => Error::system(&self.link, "talk to its broker", error),
        }
    }

    pub(crate) fn unexpected(&self) -> Error {
        let what = "sent an unexpected answer; run the same version on both sides";
        ErrorKind::Host { link: Arc::clone(&self.link), path: self.path.clone(), what }.into()
    }
}

/// Whether a link of this name exists, or has left its lock file.
pub(crate) fn link_exists(dir: &Path, link: &str) -> bool {
    let Ok(name) = link.parse() else { return false };
    lock_path(&Store::new(&LinkConfig::new(name), dir)).exists()
}

fn dial(dir: &Path, link: &Arc<str>) -> Result<(PathBuf, Arc<OwnedFd>)> {
    let store = Store::new(&LinkConfig::new(link.parse()?), dir);
    let lock =
        Lock::open(&lock_path(&store)).map_err(|error| Error::system(link, "open its lock file", error))?;
    let found = lock.map(|lock| find(&store, &lock)).transpose()?.flatten();
    let Some(path) = found else {
        return Err(ErrorKind::NoBroker { link: Arc::clone(link), path: dir.to_owned() }.into());
    };
    match socket::connect_to(&path) {
        Ok(connection) => Ok((path, Arc::new(connection))),
        Err(error) if matches!(error.raw_os_error(), Some(errno::ENOENT | errno::ECONNREFUSED)) => {
            Err(ErrorKind::NoBroker { link: Arc::clone(link), path }.into())
        }
        Err(error) => Err(Error::system(link, "connect to its broker", error)),
    }
}

impl AsFd for Client {
    /// Readable if there is an event. Events that were received during a request are not visible here: call
    /// [`event`](Self::event) until there is none after each request, and before waiting.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
