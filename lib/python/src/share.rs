//! Sharing memory with other processes: a thread that sends descriptors to processes that have a handle or know a name.
//!
//! A handle is an abstract socket address, which vanishes with this process, and a token of 128 random bits. It works for
//! processes of the same user in the same network namespace. A name is a socket in the IPC directory, whose mode determines
//! which users may connect. It works for processes that have that directory. In both cases the memory itself has no name,
//! so the kernel frees it when the last process with it ends, in whatever way.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::{PyResult, Python};
use shmesh_sys::eventfd::Doorbell;
use shmesh_sys::file::{Locked, random};
use shmesh_sys::poll::{self, Watch};
use shmesh_sys::signal::Blocked;
use shmesh_sys::{errno, socket as packets, user};

use crate::error::{error, system};
use crate::fork::ForkGuard;

pub(crate) const TOKEN_BYTES: usize = 16;
/// Maximum length of the description of a named array.
const META_BYTES_MAX: usize = 8192;
/// How long a peer may take to answer, and other processes to work in the directory. The death of a process is detected at
/// once, so only a stopped process takes this long, or one on an overloaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a wait continues before it checks for signals for Python, and for clients that have timed out.
const SLICE: Duration = Duration::from_millis(100);
/// Maximum number of connected clients that have not sent a request. Then the oldest is disconnected.
const CLIENTS_MAX: usize = 64;
/// The suffix of the file names of named arrays.
const SUFFIX: &str = ".array";
const STACK_BYTES: usize = 128 * 1024;

type Token = [u8; TOKEN_BYTES];

struct SharedFile {
    file: Weak<File>,
    /// Number of handles that were not fetched yet, and the file that they need.
    promised: Option<(usize, Arc<File>)>,
}

struct NamedFile {
    file: Weak<File>,
    meta: Vec<u8>,
    place: SocketFile,
}

/// The socket of a name: its file, and not only its path. If the file was removed, the path can be another process's.
#[derive(Clone, Debug)]
struct SocketFile {
    path: PathBuf,
    file: (u64, u64),
}

impl SocketFile {
    fn of(path: PathBuf) -> io::Result<Self> {
        let there = std::fs::symlink_metadata(&path)?;
        Ok(Self { path, file: (there.dev(), there.ino()) })
    }

    fn remove(&self) {
        if Self::of(self.path.clone()).is_ok_and(|there| there.file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[derive(Default)]
struct State {
    entries: HashMap<Token, SharedFile>,
    /// Tokens by the address of the file.
    tokens: HashMap<usize, Token>,
    named: Vec<(Arc<OwnedFd>, NamedFile)>,
}

struct Server {
    made: ForkGuard,
    address: String,
    listener: OwnedFd,
    wake: Doorbell,
    state: Mutex<State>,
}

/// This process's server. Only locked by threads that hold the interpreter, so that no thread has the lock while Python
/// forks.
static SERVER: Mutex<Option<Arc<Server>>> = Mutex::new(None);
/// Descriptors on which only this process may listen. A child closes them. Locked as `SERVER` is.
static LISTENERS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called in a forked child: because of the child's copies, its parent's sockets would look alive after the parent's death.
#[expect(
    unsafe_code,
    reason = "copies of descriptors that the parent's objects own, which are never dropped here"
)]
pub(crate) fn after_fork_in_child() {
    std::mem::forget(lock(&SERVER).take());
    for listener in lock(&LISTENERS).drain(..) {
        // SAFETY: its owner belongs to the parent's server, which was just forgotten.
        drop(unsafe { OwnedFd::from_raw_fd(listener) });
    }
}

fn server() -> io::Result<Arc<Server>> {
    let mut place = lock(&SERVER);
    if let Some(server) = place.as_ref().filter(|server| server.made.is_here()) {
        return Ok(Arc::clone(server));
    }
    // A server from before a fork that Python did not make.
    std::mem::forget(place.take());
    let address = format!("shmesh-{:032x}", u128::from_ne_bytes(random()?));
    let listener = packets::listen_abstract(&address)?;
    let number = listener.as_raw_fd();
    let wake = Doorbell::new()?;
    let server =
        Arc::new(Server { made: ForkGuard::here(), address, listener, wake, state: Mutex::default() });
    let blocked = Blocked::all();
    let its = Arc::clone(&server);
    let thread = std::thread::Builder::new().name("shmesh-share".into()).stack_size(STACK_BYTES);
    let started = thread.spawn(move || its.run());
    drop(blocked);
    started?;
    lock(&LISTENERS).push(number);
    *place = Some(Arc::clone(&server));
    Ok(server)
}

/// A connected client that has not sent its request yet.
struct NewClient {
    fd: OwnedFd,
    since: Instant,
}

impl Server {
    fn run(&self) {
        let mut clients: Vec<NewClient> = Vec::new();
        loop {
            let named: Vec<_> = lock(&self.state).named.iter().map(|(fd, _)| Arc::clone(fd)).collect();
            let mut fds = vec![Watch::readable(&self.wake), Watch::readable(&self.listener)];
            fds.extend(named.iter().map(|fd| Watch::readable(fd.as_ref())));
            fds.extend(clients.iter().map(|client| Watch::readable(&client.fd)));
            let limit = (!clients.is_empty()).then_some(SLICE);
            if poll::wait_once(&mut fds, limit).is_err() {
                continue;
            }
            let ready: Vec<_> = fds.iter().map(Watch::is_ready).collect();
            let (of_named, of_clients) = ready[2..].split_at(named.len());
            if ready[0] {
                let _ = self.wake.take();
            }
            for (listener, _) in named.iter().zip(of_named).filter(|(_, ready)| **ready) {
                // An error of a client only affects that client.
                let _ = self.answer_name(listener);
            }
            let mut asked = of_clients.iter();
            clients.retain(|client| {
                let asks = asked.next().is_some_and(|ready| *ready);
                if asks {
                    let _ = self.answer_token(&client.fd);
                }
                !asks && client.since.elapsed() < PATIENCE
            });
            if ready[1]
                && let Ok(client) = self.admit()
            {
                if clients.len() == CLIENTS_MAX {
                    clients.remove(0);
                }
                clients.extend(client);
            }
        }
    }

    /// Accepts a client that connects to a handle's address, if it has the same user.
    fn admit(&self) -> io::Result<Option<NewClient>> {
        let fd = accept(&self.listener)?;
        let uid = packets::peer(&fd)?.uid;
        let admitted = uid == 0 || uid == user::effective();
        Ok(admitted.then(|| NewClient { fd, since: Instant::now() }))
    }

    fn answer_token(&self, client: &OwnedFd) -> io::Result<()> {
        packets::limit_wait(&client, SLICE)?;
        let (bytes, _) = packets::receive(client)?;
        let file = Token::try_from(bytes.as_slice()).ok().and_then(|token| self.redeem(token));
        match file {
            Some(file) => packets::send(client, b"+", &[file.as_fd()]),
            None => packets::send(client, b"-", &[]),
        }
    }

    fn redeem(&self, token: Token) -> Option<Arc<File>> {
        let mut state = lock(&self.state);
        let entry = state.entries.get_mut(&token)?;
        match entry.promised.take() {
            Some((count, file)) => {
                if count > 1 {
                    entry.promised = Some((count - 1, Arc::clone(&file)));
                }
                Some(file)
            }
            None => entry.file.upgrade(),
        }
    }

    fn answer_name(&self, listener: &Arc<OwnedFd>) -> io::Result<()> {
        let client = accept(listener)?;
        packets::limit_wait(&client, SLICE)?;
        let found = {
            let state = lock(&self.state);
            let named = state.named.iter().find(|(fd, _)| Arc::ptr_eq(fd, listener));
            named.and_then(|(_, named)| Some((named.file.upgrade()?, named.meta.clone())))
        };
        match found {
            Some((file, meta)) => packets::send(&client, &meta, &[file.as_fd()]),
            None => packets::send(&client, b"-", &[]),
        }
    }
}

/// Accepts a connection. Without a free descriptor the connection stays in the queue, so the caller must not retry at once.
fn accept(listener: &impl AsFd) -> io::Result<OwnedFd> {
    packets::accept(listener).inspect_err(|failed| {
        if errno::is_exhausted(failed) {
            std::thread::sleep(SLICE);
        }
    })
}

/// Promises memory to one more process. Returns the address and token with which it gets the memory.
pub(crate) fn handle(file: &Arc<File>) -> PyResult<(String, Vec<u8>)> {
    let failed = |source: io::Error| system("listen for processes that fetch the array", &source);
    let server = server().map_err(failed)?;
    let fresh = random().map_err(failed)?;
    let mut state = lock(&server.state);
    let State { entries, tokens, .. } = &mut *state;
    // Entries without memory are removed, so that the tables stay small.
    entries.retain(|_, entry| entry.promised.is_some() || entry.file.strong_count() > 0);
    tokens.retain(|_, token| entries.contains_key(token));
    let key = Arc::as_ptr(file).addr();
    let token = *tokens.entry(key).or_insert(fresh);
    let entry =
        entries.entry(token).or_insert_with(|| SharedFile { file: Arc::downgrade(file), promised: None });
    let count = entry.promised.as_ref().map_or(0, |(count, _)| *count);
    entry.promised = Some((count + 1, Arc::clone(file)));
    Ok((server.address.clone(), token.to_vec()))
}

/// Connects, sends a request, and waits for the answer: for at most `patience`, or until a signal handler raises an
/// exception.
fn ask(
    py: Python<'_>,
    connect: impl Fn() -> io::Result<OwnedFd> + Sync,
    question: &[u8],
    patience: Duration,
) -> PyResult<io::Result<(Vec<u8>, Vec<OwnedFd>)>> {
    let start = Instant::now();
    let mut connection = None;
    loop {
        let answer = py.detach(|| {
            let fd = match connection.take() {
                Some(fd) => fd,
                None => {
                    let fd = connect()?;
                    packets::limit_wait(&fd, SLICE)?;
                    if !question.is_empty() {
                        packets::send(&fd, question, &[])?;
                    }
                    fd
                }
            };
            packets::receive(connection.insert(fd))
        });
        match answer {
            Err(failed) if failed.kind() == io::ErrorKind::WouldBlock => {
                py.check_signals()?;
                if start.elapsed() >= patience {
                    return Ok(Err(io::ErrorKind::TimedOut.into()));
                }
            }
            answer => return Ok(answer),
        }
    }
}

#[cold]
fn silent(what: &str, patience: Duration) -> pyo3::PyErr {
    error(
        "Timeout",
        format_args!(
            "{what}: the process that has it did not answer within {} s; check whether it is stopped",
            patience.as_secs_f64()
        ),
    )
}

/// Gets memory by its handle.
pub(crate) fn fetch(py: Python<'_>, address: &str, token: Token) -> PyResult<OwnedFd> {
    let gone = || {
        error(
            "NotFound",
            "the array of this handle is gone: the process that sent it has ended, or has dropped it after another fetched \
             this handle; keep it there until it has arrived (another network namespace, or user? give the array a name)",
        )
    };
    let connect = || -> io::Result<OwnedFd> { packets::connect_abstract(address, SLICE) };
    match ask(py, connect, &token, PATIENCE)? {
        Ok((_, fds)) => fds.into_iter().next().ok_or_else(gone),
        Err(source) if source.kind() == io::ErrorKind::TimedOut => {
            Err(silent("the array of this handle", PATIENCE))
        }
        Err(source)
            if matches!(
                source.raw_os_error(),
                Some(errno::ECONNREFUSED | errno::ECONNRESET | errno::EPIPE)
            ) =>
        {
            Err(gone())
        }
        Err(source) => Err(system("fetch the array of this handle", &source)),
    }
}

fn socket_path(directory: &Path, name: &str) -> PyResult<PathBuf> {
    // All names in the directory have the same alphabet.
    let name: shmesh::config::LinkName =
        name.parse().map_err(|wrong| crate::error::of_link(shmesh::ErrorKind::Name(wrong).into()))?;
    Ok(directory.join(format!("{name}{SUFFIX}")))
}

/// Locks a directory, so that one process at a time adds or removes names.
fn lock_directory(py: Python<'_>, directory: &Path) -> PyResult<Locked> {
    let failed = |source: &io::Error| match source.raw_os_error() {
        Some(errno::ENOENT | errno::ENOTDIR) => error(
            "NotFound",
            format_args!(
                "the IPC directory {} does not exist; create it (in a pod: mount a volume there), or set SHMESH_DIR",
                directory.display()
            ),
        ),
        _ => system(&format!("lock {}", directory.display()), source),
    };
    let start = Instant::now();
    let mut file = File::open(directory).map_err(|source| failed(&source))?;
    loop {
        match Locked::try_lock(file) {
            Ok(lock) => return Ok(lock),
            Err((_, error)) if error.kind() == io::ErrorKind::WouldBlock && start.elapsed() > PATIENCE => {
                return Err(silent(&format!("the lock of {}", directory.display()), PATIENCE));
            }
            Err((same, error))
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
            {
                file = same;
            }
            Err((_, error)) => return Err(failed(&error)),
        }
        py.detach(|| std::thread::sleep(Duration::from_millis(1)));
        py.check_signals()?;
    }
}

/// Removes the name of this user at `path`, if no process listens there any more. The directory must be locked.
fn remove_stale(directory: &Path, path: &Path) {
    let is_ours =
        |metadata: std::fs::Metadata| metadata.file_type().is_socket() && metadata.uid() == user::effective();
    let refused = |source: io::Error| source.raw_os_error() == Some(errno::ECONNREFUSED);
    // Not followed: the target of a symbolic link is not a name of ours. A connection to a plain file is refused, too.
    if std::fs::symlink_metadata(path).is_ok_and(is_ours) && packets::connect_now(path).is_err_and(refused) {
        let _ = std::fs::remove_file(path);
        forget_queue(directory, &path.file_name().unwrap_or_default().to_string_lossy());
    }
}

/// Removes names of this user whose processes were killed. The directory must be locked.
fn sweep(directory: &Path) {
    for found in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if found.file_name().to_str().is_some_and(|name| name.ends_with(SUFFIX)) {
            remove_stale(directory, &found.path());
        }
    }
}

/// Removes the link of a queue whose processes were all killed: a lock file and a socket, without memory.
fn forget_queue(directory: &Path, file: &str) {
    let Ok(name) = file.trim_end_matches(SUFFIX).parse() else { return };
    if let Ok(remains) = shmesh::inspect::Remains::of(directory, &name) {
        let dead = |seat: &shmesh::inspect::SeatView| seat.liveness == shmesh::Liveness::Dead;
        // A link with segments in files does not belong to a queue, and its queued messages are for later participants.
        if !remains.is_held && remains.queued.is_none() && remains.seats.iter().all(dead) {
            let _ = remains.remove();
        }
    }
}

/// A name in the IPC directory, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct PublishedName {
    place: SocketFile,
    made: ForkGuard,
    listener: Arc<OwnedFd>,
}

/// Gives memory a name.
pub(crate) fn publish(
    py: Python<'_>,
    file: &Arc<File>,
    directory: &Path,
    name: &str,
    meta: Vec<u8>,
    mode: u32,
) -> PyResult<PublishedName> {
    if meta.len() > META_BYTES_MAX {
        return Err(error(
            "TooLong",
            format_args!(
                "the dtype of a named array takes {} bytes, at most {META_BYTES_MAX}; use fewer fields",
                meta.len()
            ),
        ));
    }
    let path = socket_path(directory, name)?;
    let server = server().map_err(|source| system("listen for processes that open the array", &source))?;
    let locked = lock_directory(py, directory)?;
    let listening = py.detach(|| {
        sweep(directory);
        let listening = packets::listen_on(&path, mode);
        listening.and_then(|listener| Ok((listener, SocketFile::of(path.clone())?)))
    });
    // Before an exception is created: a finalizer that runs meanwhile may lock the directory.
    drop(locked);
    let (listener, place) = listening.map_err(|source| match source.raw_os_error() {
        Some(errno::EADDRINUSE) => error(
            "AlreadyExists",
            format_args!(
                "an array named {name} is there already ({}); open it, or use another name",
                path.display()
            ),
        ),
        _ => system(&format!("listen at {}", path.display()), &source),
    })?;
    let listener = Arc::new(listener);
    lock(&LISTENERS).push(listener.as_raw_fd());
    let named = NamedFile { file: Arc::downgrade(file), meta, place: place.clone() };
    lock(&server.state).named.push((Arc::clone(&listener), named));
    let _ = server.wake.signal();
    Ok(PublishedName { place, made: ForkGuard::here(), listener })
}

impl PublishedName {
    pub(crate) fn path(&self) -> &Path {
        &self.place.path
    }

    /// Whether this process answers for the name. A forked child has its parent's value, and does not answer.
    pub(crate) fn is_here(&self) -> bool {
        self.made.is_here()
    }
}

/// Whether a process answers for a name.
pub(crate) fn is_answered(directory: &Path, name: &str) -> PyResult<bool> {
    let path = socket_path(directory, name)?;
    let nobody =
        |source: io::Error| matches!(source.raw_os_error(), Some(errno::ECONNREFUSED | errno::ENOENT));
    Ok(!packets::connect_now(&path).is_err_and(nobody))
}

impl Drop for PublishedName {
    fn drop(&mut self) {
        if !self.made.is_here() {
            // The name belongs to the parent; the descriptor was closed after the fork.
            std::mem::forget(Arc::clone(&self.listener));
            return;
        }
        self.place.remove();
        lock(&LISTENERS).retain(|listener| *listener != self.listener.as_raw_fd());
        if let Some(server) = lock(&SERVER).clone() {
            lock(&server.state).named.retain(|(listener, _)| !Arc::ptr_eq(listener, &self.listener));
            let _ = server.wake.signal();
        }
    }
}

/// Opens memory by its name. Returns it with its description.
pub(crate) fn open(
    py: Python<'_>,
    directory: &Path,
    name: &str,
    patience: Duration,
) -> PyResult<(OwnedFd, Vec<u8>)> {
    let path = socket_path(directory, name)?;
    let absent = || {
        error(
            "NotFound",
            format_args!(
                "no array named {name} in {}: its owner has ended, or did not start yet",
                directory.display()
            ),
        )
    };
    match ask(py, || packets::connect_to(&path), b"", patience)? {
        Ok((meta, fds)) => fds.into_iter().next().map(|fd| (fd, meta)).ok_or_else(absent),
        Err(source) if source.kind() == io::ErrorKind::TimedOut => {
            Err(silent(&format!("the array at {}", path.display()), patience))
        }
        Err(source) => Err(match source.raw_os_error() {
            Some(errno::ECONNREFUSED) => {
                // The rest of a killed process: a plain file.
                if let Ok(_locked) = lock_directory(py, directory) {
                    py.detach(|| remove_stale(directory, &path));
                }
                absent()
            }
            // The process ended, or dropped the array, before it had answered.
            Some(errno::ECONNRESET) => absent(),
            Some(errno::ENOENT) => absent(),
            _ => system(&format!("open the array at {}", path.display()), &source),
        }),
    }
}

/// Called at the end of the process: removes the names of arrays that are still alive.
pub(crate) fn at_exit() {
    let server = lock(&SERVER).clone();
    if let Some(server) = server.filter(|server| server.made.is_here()) {
        for (_, named) in lock(&server.state).named.drain(..) {
            named.place.remove();
        }
    }
}
