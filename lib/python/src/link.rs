//! [`Link`]: a participant of a link.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use numpy::PyUntypedArray;
use pyo3::prelude::*;
use shmesh::config::{PoolId, from_yaml};
use shmesh::{ErrorKind, LinkOptions, Participant, PeerEvent, SeatIndex, SeatWord, Side};
use shmesh_sys::process::{Liveness, ProcessIdentity};

use crate::batch::{self, Batch, BatchLayout, KnownLayouts};
use crate::error::{error, forked, of_link, system};
use crate::fork::ForkGuard;
use crate::handle::Handle;
use crate::loan::Loan;
use crate::message::Message;
use crate::pending::PendingReply;
use crate::request::Request;
use crate::waiting::{LOOK_FOR_SIGNALS, SLICE, WaitCount, WaitingWith, duration_of, is_ending};

/// Seat, side, process, and whether it is alive.
type Seat = (u8, &'static str, u32, Option<bool>);

/// Kind, seat, side, process, and number of missed participants or lost messages.
type Event = (&'static str, u8, &'static str, u32, u64);

/// Whether there are free buffers for a message, with a DATA part in `pool` if it is given. Also true if that cannot be
/// determined, because sending reports why.
fn has_room(link: &shmesh::Link, pool: Option<PoolId>) -> bool {
    let loaned = match pool {
        Some(pool) => link.loan_with(pool),
        None => link.loan(),
    };
    !matches!(loaned, Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }))
}

fn name_of(side: Side) -> &'static str {
    if side == Side::Primary { "primary" } else { "secondary" }
}

struct OpenLink {
    /// The participant that sends and receives.
    handle: Arc<Handle>,
    /// Another participant for waiting, so that other threads can send meanwhile. Created on first use.
    waiter: Option<Arc<Handle>>,
    /// The waiter in the table of participants.
    waiter_seat: Option<(SeatIndex, SeatWord)>,
}

/// A participant of a link. Any thread may use it.
#[pyclass(frozen, subclass, module = "shmesh._shmesh")]
pub(crate) struct Link {
    open: Mutex<Option<OpenLink>>,
    layouts: KnownLayouts,
    made: ForkGuard,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    directory: PathBuf,
    #[pyo3(get)]
    side: &'static str,
}

fn side_of(name: &str) -> PyResult<Side> {
    match name {
        "primary" => Ok(Side::Primary),
        "secondary" => Ok(Side::Secondary),
        _ => Err(error(
            "Invalid",
            format_args!("side {name:?} does not exist; pass \"primary\" or \"secondary\""),
        )),
    }
}

fn pool_of(name: &str) -> PyResult<PoolId> {
    PoolId::ALL.into_iter().find(|pool| pool.name() == name).ok_or_else(|| {
        let names: Vec<_> = PoolId::ALL.iter().map(|pool| pool.name()).collect();
        error("Invalid", format_args!("pool {name:?} does not exist; pass one of {}", names.join(", ")))
    })
}

/// The kind of an event, and its participant, if it has one.
fn peer_of(event: &PeerEvent) -> Option<(&'static str, Participant)> {
    match *event {
        PeerEvent::Attached(peer) => Some(("attached", peer)),
        PeerEvent::Detached(peer) => Some(("detached", peer)),
        PeerEvent::Died(peer) => Some(("died", peer)),
        PeerEvent::Evicted(peer) => Some(("evicted", peer)),
        _ => None,
    }
}

/// Attaches as soon as the link exists. A signal handler may end the wait.
fn attach(
    py: Python<'_>,
    options: &LinkOptions,
    name: &str,
    side: Side,
    timeout: Duration,
) -> PyResult<shmesh::Result<shmesh::Link>> {
    let start = Instant::now();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let attached = py.detach(|| options.clone().timeout(left.min(SLICE)).attach(name, side));
        py.check_signals()?;
        match attached {
            Err(failed) if !left.is_zero() && may_come(&failed) => {}
            attached => return Ok(attached),
        }
    }
}

fn may_come(failed: &shmesh::Error) -> bool {
    matches!(
        failed.kind(),
        ErrorKind::NotFound { .. } | ErrorKind::NoDirectory { .. } | ErrorKind::Host { .. }
    )
}

impl Link {
    fn state(&self) -> MutexGuard<'_, Option<OpenLink>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self) -> PyResult<Arc<Handle>> {
        if !self.made.is_here() {
            return Err(forked("Link"));
        }
        let handle = self.state().as_ref().map(|open| Arc::clone(&open.handle));
        handle.ok_or_else(|| self.was_closed())
    }

    #[cold]
    fn was_closed(&self) -> PyErr {
        error("Closed", format_args!("link {}: this handle was closed; attach again", self.name))
    }

    /// Calls `act` with the participant. It must not block.
    fn with<T>(&self, act: impl FnOnce(&shmesh::Link) -> shmesh::Result<T>) -> PyResult<T> {
        let handle = self.handle()?;
        let done = act(&handle.lock());
        done.map_err(of_link)
    }

    fn waiter(&self) -> PyResult<Arc<Handle>> {
        let handle = self.handle()?;
        // Another seat would be another reader, which never reads and would block the writer.
        if self.side == name_of(Side::Secondary) && handle.lock().readers() > 0 {
            return Ok(handle);
        }
        let waiter = self.state().as_ref().and_then(|open| open.waiter.clone());
        if let Some(waiter) = waiter {
            return Ok(waiter);
        }
        let cloned = handle.lock().try_clone();
        let cloned = cloned.map_err(of_link)?;
        let seat = cloned.participants().find(|other| other.seat == cloned.seat());
        let seat = seat.map(|other| (other.seat, other.word));
        let made = Arc::new(Handle::new(cloned));
        let mut state = self.state();
        Ok(match state.as_mut() {
            Some(open) => {
                if open.waiter.is_none() {
                    open.waiter_seat = seat;
                }
                Arc::clone(open.waiter.get_or_insert(made))
            }
            None => made,
        })
    }

    fn wait_for(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        wait: fn(&shmesh::Link, Option<Duration>) -> shmesh::Result<bool>,
    ) -> PyResult<bool> {
        if self.with(|link| wait(link, Some(Duration::ZERO)))? {
            return Ok(true);
        }
        self.sleep_until(py, timeout, wait)
    }

    /// Waits with the waiter until `wait` returns true.
    fn sleep_until(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        wait: fn(&shmesh::Link, Option<Duration>) -> shmesh::Result<bool>,
    ) -> PyResult<bool> {
        let deadline = match timeout {
            Some(seconds) => Instant::now().checked_add(duration_of(seconds)?),
            None => None,
        };
        let waiter = WaitingWith::new(self.waiter()?);
        let waiting = WaitCount::new();
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let there = py.detach(|| wait(&waiter.0.lock(), Some(slice)));
            if there.map_err(of_link)? {
                return Ok(true);
            }
            if is_ending() {
                self.leave(py, waiter, waiting);
            }
            py.check_signals()?;
            // Another thread may have closed it meanwhile.
            drop(self.handle()?);
        }
    }

    /// Waits until `ready`, without a seat of its own and without holding the handle. Returns false if it timed out.
    fn wait_until(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        ready: impl Fn(&shmesh::Link) -> bool + Sync,
    ) -> PyResult<bool> {
        let deadline = match timeout {
            Some(seconds) => Instant::now().checked_add(duration_of(seconds)?),
            None => None,
        };
        loop {
            let handle = WaitingWith::new(self.handle()?);
            let waiting = WaitCount::new();
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let slice = left.map_or(LOOK_FOR_SIGNALS, |left| left.min(LOOK_FOR_SIGNALS));
            let there = py.detach(|| handle.0.wait_until(slice, &ready));
            if is_ending() {
                self.leave(py, handle, waiting);
            }
            py.check_signals()?;
            // Another thread may have closed it meanwhile.
            drop(self.handle()?);
            if there.map_err(of_link)? {
                return Ok(true);
            }
            // Not by the slice, which a signal may have cut short.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
        }
    }

    /// Ends a thread that waits when the interpreter ends: it detaches from the link, and never returns.
    fn leave(&self, py: Python<'_>, handle: impl Send, waiting: WaitCount) -> ! {
        let open = self.state().take();
        py.detach(|| {
            drop((handle, open));
            drop(waiting);
            // The thread is not needed any more.
            loop {
                std::thread::park();
            }
        })
    }
}

#[pymethods]
impl Link {
    /// Creates the link of `config` (YAML, or JSON, which is YAML), or attaches to an existing one. A mistake in the text of
    /// a file is shown with its line.
    #[new]
    #[pyo3(signature = (name, directory, *, side="secondary", config=None, config_path=None, timeout=0.0, allow_second_primary=false, fresh=false))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        py: Python<'_>,
        name: &str,
        directory: PathBuf,
        side: &str,
        config: Option<&str>,
        config_path: Option<PathBuf>,
        timeout: f64,
        allow_second_primary: bool,
        fresh: bool,
    ) -> PyResult<Self> {
        let options =
            LinkOptions::new().dir(&directory).allow_second_primary(allow_second_primary).fresh(fresh);
        let side = side_of(side)?;
        let link = match config {
            None => attach(py, &options, name, side, duration_of(timeout)?)?,
            Some(text) => {
                let loaded = from_yaml(text).map_err(|wrong| match config_path {
                    Some(path) => error("Invalid", wrong.shown_in(&path.display().to_string(), text)),
                    None => of_link(ErrorKind::Config(wrong).into()),
                })?;
                let names: Vec<_> = loaded.links.iter().map(|link| link.name.to_string()).collect();
                let Some(config) = loaded.links.into_iter().find(|link| link.name.as_str() == name) else {
                    return Err(error(
                        "Invalid",
                        format_args!("the configuration has no link {name:?}; it has {}", names.join(", ")),
                    ));
                };
                py.detach(|| options.create(&config))
            }
        };
        let link = link.map_err(of_link)?;
        let (name, side) = (link.name().to_owned(), name_of(link.side()));
        let open = OpenLink { handle: Arc::new(Handle::new(link)), waiter: None, waiter_seat: None };
        let layouts = KnownLayouts::default();
        Ok(Self { open: Mutex::new(Some(open)), layouts, made: ForkGuard::here(), name, directory, side })
    }

    /// Loans buffers for a message.
    #[pyo3(signature = (msg=0, data=None, *, pool="cpu_data"))]
    fn loan(&self, msg: usize, data: Option<usize>, pool: &str) -> PyResult<Loan> {
        let data = data.map(|len| pool_of(pool).map(|pool| (pool, len))).transpose()?;
        Loan::take(&self.handle()?, msg, data).map_err(of_link)
    }

    /// Sends up to 112 bytes in the ring.
    #[pyo3(signature = (msg, *, msg_id=0, cell_id=0, notify=true))]
    fn send_inline(&self, msg: &[u8], msg_id: i32, cell_id: i32, notify: bool) -> PyResult<()> {
        self.with(|link| {
            link.send_inline(msg_id, cell_id, msg)?;
            match if notify { link.notify() } else { Ok(()) } {
                Err(error) if matches!(error.kind(), ErrorKind::NoNotification { .. }) => Ok(()),
                told => told,
            }
        })
    }

    /// Sends a copy of bytes that fit into a MSG buffer. False while all are in use.
    fn try_send(&self, msg: &[u8]) -> PyResult<bool> {
        self.with(|link| {
            let mut loan = match link.loan() {
                Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => return Ok(false),
                loaned => loaned?,
            };
            loan.resize_msg(msg.len())?.copy_from_slice(msg);
            loan.send()?;
            match link.notify() {
                Err(error) if !matches!(error.kind(), ErrorKind::NoNotification { .. }) => Err(error),
                _ => Ok(true),
            }
        })
    }

    /// Receives the oldest message, or None. Never waits.
    fn try_receive(&self) -> PyResult<Option<Message>> {
        Message::take(&self.handle()?).map_err(of_link)
    }

    #[pyo3(signature = (max=64))]
    fn receive_batch(&self, max: usize) -> PyResult<Vec<Message>> {
        Message::take_batch(&self.handle()?, max).map_err(of_link)
    }

    /// Sends a request of up to 104 bytes, without a buffer.
    #[pyo3(signature = (msg, *, msg_id=0, cell_id=0))]
    fn request_inline(&self, msg: &[u8], msg_id: i32, cell_id: i32) -> PyResult<PendingReply> {
        let handle = self.handle()?;
        let pending =
            handle.lock().request_inline(msg_id, cell_id, msg).map(shmesh::PendingReply::into_owned);
        Ok(PendingReply::new(&handle, pending.map_err(of_link)?))
    }

    /// Receives the oldest request, or None. Never waits.
    fn try_receive_request(&self) -> PyResult<Option<Request>> {
        let handle = self.handle()?;
        let request = handle.lock().receive_request().map(|found| found.map(shmesh::Request::into_owned));
        Ok(request.map_err(of_link)?.map(|request| Request::new(&handle, request)))
    }

    /// Sleeps until a request can be received. Returns False if it timed out.
    #[pyo3(signature = (timeout=None))]
    fn wait_request(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.wait_for(py, timeout, shmesh::Link::wait_request)
    }

    #[getter]
    fn has_request(&self) -> PyResult<bool> {
        self.with(|link| Ok(link.has_request()))
    }

    /// Starts a batch to be written in place. Returns None while all buffers are in use.
    fn begin_batch(&self, layout: &BatchLayout, meta: Py<PyAny>, extra: &[u8]) -> PyResult<Option<Batch>> {
        batch::begin(&self.handle()?, layout, meta, extra).map_err(of_link)
    }

    /// Sends a copy of arrays with the types and shapes of the layout. Returns False while all buffers are in use.
    #[expect(clippy::needless_pass_by_value, reason = "Python gives a list of its own")]
    fn put_batch(
        &self,
        py: Python<'_>,
        layout: &BatchLayout,
        extra: &[u8],
        sources: Vec<Bound<'_, PyUntypedArray>>,
    ) -> PyResult<bool> {
        batch::put(py, &self.handle()?, layout, extra, &sources)
    }

    /// Receives the oldest message as a batch, or None. Never waits.
    fn try_receive_batch(
        &self,
        py: Python<'_>,
        decode: &Bound<'_, PyAny>,
        load: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Batch>> {
        batch::receive(py, &self.handle()?, &self.layouts, &self.name, decode, load)
    }

    /// From now on, batches can no longer be sent.
    fn finish(&self) -> PyResult<()> {
        self.handle()?.finish();
        Ok(())
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.wait_for(py, timeout, shmesh::Link::wait)
    }

    fn notify(&self) -> PyResult<()> {
        self.with(shmesh::Link::notify)
    }

    fn post(&self) -> PyResult<()> {
        self.with(shmesh::Link::post)
    }

    #[pyo3(signature = (timeout=None))]
    fn wait_tti(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.wait_for(py, timeout, shmesh::Link::wait_tti)
    }

    /// Sleeps until there is a message or an event. Returns False if it timed out.
    #[pyo3(signature = (timeout=None))]
    fn wait_any(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.wait_until(py, timeout, |link| link.has_message() || link.has_event())
    }

    /// Sleeps until there is room for a message whose DATA part is in `pool`, or a message or an event. Returns False
    /// if it timed out.
    ///
    /// The receivers must notify of released messages: `notify_releases`.
    #[pyo3(signature = (pool=None, timeout=None))]
    fn wait_room(&self, py: Python<'_>, pool: Option<&str>, timeout: Option<f64>) -> PyResult<bool> {
        let pool = pool.map(pool_of).transpose()?;
        self.wait_until(py, timeout, |link| link.has_message() || link.has_event() || has_room(link, pool))
    }

    #[pyo3(signature = (pool=None))]
    fn has_room(&self, pool: Option<&str>) -> PyResult<bool> {
        let pool = pool.map(pool_of).transpose()?;
        self.with(|link| Ok(has_room(link, pool)))
    }

    /// From now on, notifies the other side of each released message.
    fn notify_releases(&self) -> PyResult<()> {
        self.handle()?.notify_releases();
        Ok(())
    }

    /// Takes the next event of another participant, or None. Never waits.
    fn try_next_event(&self) -> PyResult<Option<Event>> {
        let waiter = self.state().as_ref().and_then(|open| open.waiter_seat);
        self.with(|link| {
            // The waiter belongs to this link as well.
            let is_waiter = |event: &PeerEvent| {
                // By its seat word: another participant with this process id may have had the seat before.
                peer_of(event).is_some_and(|(_, peer)| Some((peer.seat, peer.word)) == waiter)
            };
            let event = std::iter::from_fn(|| link.next_event()).find(|event| !is_waiter(event));
            Ok(event.map(|event| match (peer_of(&event), event) {
                (Some((kind, peer)), _) => {
                    (kind, peer.seat.value(), name_of(peer.word.side()), peer.word.pid(), 0)
                }
                (None, PeerEvent::Missed(missed)) => ("missed", 0, "", 0, missed.into()),
                (None, PeerEvent::Lost(lost)) => ("lost", 0, "", 0, lost),
                (None, _) => ("missed", 0, "", 0, 1),
            }))
        })
    }

    /// Sleeps until there may be an event. Returns False if it timed out.
    #[pyo3(signature = (timeout=None))]
    fn wait_event(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        if self.has_event()? {
            return Ok(true);
        }
        self.sleep_until(py, timeout, |waiter, limit| {
            let woken = waiter.wait_event(limit)?;
            // The waiter gets the same events, which only serve to wake it.
            while waiter.next_event().is_some() {}
            Ok(woken)
        })
    }

    #[getter]
    fn has_event(&self) -> PyResult<bool> {
        self.with(|link| Ok(link.has_event()))
    }

    /// A descriptor that is readable after a message or event has arrived.
    fn fileno(&self) -> PyResult<i32> {
        self.with(|link| Ok(link.fd()?.as_raw_fd()))
    }

    /// Consumes one signal of the descriptor; False if there is none. Receive after this, not before.
    fn take_signal(&self) -> PyResult<bool> {
        self.with(|link| Ok(link.take_signal()?.is_some()))
    }

    /// Consumes all pending posts.
    fn take_posts(&self) -> PyResult<()> {
        self.with(|link| {
            while link.wait_tti(Some(Duration::ZERO))? {}
            Ok(())
        })
    }

    /// From now on, posts after every `after` released messages, for senders that wait for buffers.
    fn post_releases(&self, after: usize) -> PyResult<()> {
        self.handle()?.post_releases(after);
        Ok(())
    }

    /// Posts for all messages released since the last post.
    fn post_now(&self) -> PyResult<()> {
        let handle = self.handle()?;
        handle.post_now(&handle.lock());
        Ok(())
    }

    /// User and mode of the lock file that this handle has open, which decide which processes may attach.
    fn lock_file_owner(&self) -> PyResult<(u32, u32)> {
        self.with(shmesh::Link::lock_file_owner)
    }

    /// Becomes the host of a link without names whose host has ended. Returns whether it did.
    fn become_host(&self) -> PyResult<bool> {
        self.with(shmesh::Link::become_host)
    }

    /// Recovers dead participants. Returns their number, and the numbers of their messages and DATA buffers.
    fn recover(&self) -> PyResult<(u32, u32, u32)> {
        let done = self.with(shmesh::Link::recover)?;
        Ok((done.participants, done.messages, done.data_buffers))
    }

    /// All participants of the link. Whether one is alive is None if that cannot be determined.
    fn participants(&self) -> PyResult<Vec<Seat>> {
        let me = ProcessIdentity::me().map_err(|source| system("read /proc/self", &source))?;
        self.with(|link| {
            let known = link.participants().map(|other| {
                let side = name_of(other.word.side());
                let lives = match other.liveness(&me) {
                    Liveness::Alive => Some(true),
                    Liveness::Dead => Some(false),
                    Liveness::Unknown => None,
                };
                (other.seat.value(), side, other.word.pid(), lives)
            });
            Ok(known.collect())
        })
    }

    #[getter]
    fn has_message(&self) -> PyResult<bool> {
        self.with(|link| Ok(link.has_message()))
    }

    #[getter]
    fn queued(&self) -> PyResult<usize> {
        self.with(|link| Ok(link.queued()))
    }

    /// Number of readers of a broadcast link; 0 on other links.
    #[getter]
    fn readers(&self) -> PyResult<usize> {
        self.with(|link| Ok(link.readers()))
    }

    /// Waits until a broadcast link has as many readers, without the GIL. Returns false if it timed out.
    #[pyo3(signature = (count, timeout=None))]
    fn wait_for_readers(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<bool> {
        self.wait_until(py, timeout, |link| link.readers() >= count)
    }

    /// Number of messages that this handle did not get: the writer of a broadcast link overtook it, or they were lost between nodes.
    #[getter]
    fn lost(&self) -> PyResult<u64> {
        self.with(|link| Ok(link.lost()))
    }

    /// Reports to the other side's receivers that so many messages for them were lost before they reached the link.
    fn report_lost(&self, messages: u64) -> PyResult<()> {
        self.with(|link| {
            link.report_lost(messages);
            Ok(())
        })
    }

    #[getter]
    fn ring_len(&self) -> PyResult<u32> {
        self.with(|link| Ok(link.ring_len()))
    }

    #[getter]
    fn seat(&self) -> PyResult<u8> {
        self.with(|link| Ok(link.seat().value()))
    }

    /// Whether this process created the link.
    #[getter]
    fn was_created(&self) -> PyResult<bool> {
        self.with(|link| Ok(link.was_created()))
    }

    /// Size and number of the buffers of a pool; None if the link does not have it.
    fn pool(&self, name: &str) -> PyResult<Option<(u32, u32)>> {
        let pool = pool_of(name)?;
        self.with(|link| Ok(link.pool(pool)))
    }

    /// Detaches from the link. Loans and messages that are alive keep its memory mapped, and the seat taken.
    #[pyo3(signature = (*, strict=true))]
    fn close(&self, py: Python<'_>, strict: bool) -> PyResult<()> {
        if !self.made.is_here() {
            // The parent stays attached.
            return Ok(());
        }
        let (open, held) = {
            let mut state = self.state();
            let held = state.as_ref().map_or(0, |open| {
                (Arc::strong_count(&open.handle) - 1).saturating_sub(WaitingWith::references(&open.handle))
            });
            (if held == 0 || !strict { state.take() } else { None }, held)
        };
        if let Some(open) = &open {
            open.handle.stop_waiting();
        }
        // Detaching may have to remove the link.
        py.detach(|| drop(open));
        if held == 0 || !strict {
            return Ok(());
        }
        Err(error(
            "StillViewed",
            format_args!(
                "link {}: {held} loan(s) or message(s), or arrays over them, are still alive; send, release or `del` them, then close",
                self.name
            ),
        ))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.state().is_none()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The last process on a link removes it, which can take long.
        Python::try_attach(|py| py.detach(|| drop(open)));
    }
}
