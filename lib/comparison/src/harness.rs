//! Worker processes: forked before any library starts, pinned, watched, and killed when they exceed their time.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::measure::{Ctx, Dist, Rx, Tx};

/// The time that a worker may take beyond the seconds that it measures.
const GRACE: Duration = Duration::from_secs(15);

/// The result of a system call that says -1 for failure.
pub(crate) fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Zeroed memory that stays shared with the workers forked after it.
#[derive(Debug)]
pub(crate) struct Shared {
    base: NonNull<u8>,
    len: usize,
}

impl Shared {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at a place of the kernel's choosing overlaps nothing of ours.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        ensure!(base != libc::MAP_FAILED, "mapping {len} shared bytes: {}", io::Error::last_os_error());
        let base = NonNull::new(base.cast()).context("the kernel mapped page zero")?;
        Ok(Self { base, len })
    }

    /// Takes all page faults now. Fork leaves shared pages out of the child's tables, so each worker calls this.
    pub(crate) fn prefault(&self) {
        let base = self.base.as_ptr().cast();
        // SAFETY: the range is exactly our mapping, and populating changes no byte of it.
        let rc = unsafe { libc::madvise(base, self.len, libc::MADV_POPULATE_WRITE) };
        checked(rc).expect("prefaulting shared memory (needs Linux 5.14)");
    }

    /// The address of a `T` at `offset`.
    ///
    /// # Panics
    /// If it would lie outside or misaligned.
    pub(crate) fn at<T>(&self, offset: usize, count: usize) -> *mut T {
        assert!(offset + count * size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping, checked above.
        unsafe { self.base.as_ptr().add(offset) }.cast()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; the pointers given out are used only by workers, which are gone or have their own.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A place where two workers wait for each other, as often as they like.
#[derive(Debug)]
pub(crate) struct Meet<'a> {
    arrived: &'a AtomicU32,
    round: Cell<u32>,
}

impl<'a> Meet<'a> {
    pub(crate) fn new(arrived: &'a AtomicU32) -> Self {
        Self { arrived, round: Cell::new(0) }
    }

    /// Returns when both workers have called this equally often.
    pub(crate) fn wait(&self) {
        self.round.set(self.round.get() + 1);
        self.arrived.fetch_add(1, Ordering::AcqRel);
        while self.arrived.load(Ordering::Acquire) < 2 * self.round.get() {
            std::thread::yield_now();
        }
    }
}

/// Ties the calling thread to `core`.
pub(crate) fn pin(core: usize) {
    // SAFETY: an all-zero set is a valid, empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `CPU_SET` checks the index against the size of the set.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: `set` outlives the call and its size is given; 0 is the calling thread.
    let rc = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    if let Err(error) = checked(rc) {
        panic!("pinning to core {core}: {error}");
    }
}

/// Runs `a` on the first core and `b` on the second, in a process each. One of them returns the result.
pub(crate) fn pair(
    ctx: &Ctx,
    a: impl FnOnce(&Meet<'_>) -> Option<Dist>,
    b: impl FnOnce(&Meet<'_>) -> Option<Dist>,
) -> Result<Dist> {
    let page = Shared::new(4096)?;
    // SAFETY: zeroed, aligned, atomic, and mapped for as long as `page` lives.
    let arrived = unsafe { &*page.at::<AtomicU32>(0, 1) };
    let meet = Meet::new(arrived);
    let limit = Duration::from_secs_f64(ctx.seconds) + GRACE;
    supervise(limit, vec![(ctx.cores.0, Box::new(|| a(&meet))), (ctx.cores.1, Box::new(|| b(&meet)))])
}

/// Runs `work` on the first core in a process of its own.
pub(crate) fn solo(ctx: &Ctx, work: impl FnOnce() -> Dist) -> Result<Dist> {
    let limit = Duration::from_secs_f64(ctx.seconds) + GRACE;
    supervise(limit, vec![(ctx.cores.0, Box::new(|| Some(work())))])
}

/// Measures round trips between two workers; each opens a sending and a receiving end of its own.
pub(crate) fn round_trips<T: Tx, R: Rx>(
    ctx: &Ctx,
    first: impl FnOnce(&Meet<'_>) -> Result<(T, R)>,
    second: impl FnOnce(&Meet<'_>) -> Result<(T, R)>,
) -> Result<Dist> {
    pair(
        ctx,
        |meet| {
            let (mut tx, mut rx) = first(meet).expect("setting up");
            meet.wait();
            let dist = ctx.ping(&mut tx, &mut rx);
            // Neither side closes its ends before both are done.
            meet.wait();
            Some(dist)
        },
        |meet| {
            let (mut tx, mut rx) = second(meet).expect("setting up");
            meet.wait();
            ctx.echo(&mut tx, &mut rx);
            meet.wait();
            None
        },
    )
}

/// Measures a stream from one worker to the other; each opens its end.
pub(crate) fn stream<T: Tx, R: Rx>(
    ctx: &Ctx,
    batch: u64,
    sender: impl FnOnce(&Meet<'_>) -> Result<T>,
    receiver: impl FnOnce(&Meet<'_>) -> Result<R>,
) -> Result<Dist> {
    pair(
        ctx,
        |meet| {
            let mut tx = sender(meet).expect("setting up");
            meet.wait();
            ctx.produce(&mut tx, batch);
            meet.wait();
            None
        },
        |meet| {
            let mut rx = receiver(meet).expect("setting up");
            meet.wait();
            let dist = ctx.consume(&mut rx, batch);
            meet.wait();
            Some(dist)
        },
    )
}

/// Runs `work` while `service` runs in a process of its own, on any core, which is killed at the end.
#[cfg(feature = "aeron")]
pub(crate) fn beside<T>(service: impl FnOnce(), work: impl FnOnce() -> Result<T>) -> Result<T> {
    let (_, sink) = io::pipe().context("opening a pipe")?;
    let service = Box::new(|| {
        service();
        None
    });
    let _service = Child::fork(None, service, &sink)?;
    work()
}

type Work<'a> = Box<dyn FnOnce() -> Option<Dist> + 'a>;

/// Forks every worker, sleeps until all have ended, and returns what one of them reported.
///
/// A watchdog kills the workers that are left when `limit` has passed, or when another one failed.
fn supervise(limit: Duration, workers: Vec<(usize, Work<'_>)>) -> Result<Dist> {
    let (report, sink) = io::pipe().context("opening the report pipe")?;
    let deadline = Instant::now() + limit;
    let mut children = Vec::new();
    for (core, work) in workers {
        children.push(Child::fork(Some(core), work, &sink)?);
    }
    drop(sink);
    while children.iter().any(|child| !child.reaped) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("the watchdog ended a run that took longer than {limit:?}");
        }
        let mut polled: Vec<_> = children
            .iter()
            // poll(2) skips negative descriptors.
            .map(|child| if child.reaped { -1 } else { child.pidfd.as_raw_fd() })
            .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
            .collect();
        let timeout = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY: `polled` is valid for its length throughout the call.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, timeout) };
        for (child, poll) in children.iter_mut().zip(&polled) {
            if poll.revents != 0 {
                child.reap()?;
            }
        }
    }
    let mut text = String::new();
    io::BufReader::new(report).read_to_string(&mut text)?;
    serde_json::from_str(&text).with_context(|| format!("the workers reported {text:?}"))
}

/// A forked worker; killed and reaped when dropped early.
struct Child {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    reaped: bool,
}

impl Child {
    fn fork(core: Option<usize>, work: Work<'_>, sink: &io::PipeWriter) -> Result<Self> {
        let parent = std::process::id();
        // SAFETY: this process has one thread, so the child may use all of the library.
        let pid = checked(unsafe { libc::fork() }).context("forking a worker")?;
        if pid == 0 {
            let done = catch_unwind(AssertUnwindSafe(|| Self::run(parent, core, work, sink)));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(if done.is_ok() { 0 } else { 101 }) }
        }
        // SAFETY: plain numbers; the child is not reaped yet, so the number is still its own.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = checked(fd as libc::c_int).context("opening a pidfd")?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self { pid, pidfd: unsafe { OwnedFd::from_raw_fd(fd) }, reaped: false })
    }

    /// Runs a worker to its end.
    fn run(parent: u32, core: Option<usize>, work: Work<'_>, mut sink: &io::PipeWriter) {
        // SAFETY: only sets which signal this process gets when its parent dies.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        assert!(std::os::unix::process::parent_id() == parent, "the parent died during fork");
        if let Some(core) = core {
            pin(core);
        }
        if let Some(dist) = work() {
            let text = serde_json::to_vec(&dist).expect("numbers always serialise");
            sink.write_all(&text).expect("reporting to the parent");
        }
    }

    fn reap(&mut self) -> Result<()> {
        let mut status = 0;
        // SAFETY: `status` is a valid place for the answer, and the child is ours and not reaped yet.
        checked(unsafe { libc::waitpid(self.pid, &mut status, 0) }).context("waiting for a worker")?;
        self.reaped = true;
        ensure!(status == 0, "a worker failed (wait status {status:#x}); its message is above");
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            // SAFETY: an unreaped child keeps its number, so the signal cannot hit another process.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchdog_ends_a_spinning_worker() {
        let start = Instant::now();
        let spin: Work<'_> = Box::new(|| {
            loop {
                std::hint::spin_loop()
            }
        });
        let error = supervise(Duration::from_millis(100), vec![(0, spin)]).unwrap_err();
        assert!(error.to_string().contains("watchdog"), "{error}");
        assert!(start.elapsed() >= Duration::from_millis(100));
    }

    #[test]
    fn failed_worker_takes_its_peer_along() {
        let spin: Work<'_> = Box::new(|| {
            loop {
                std::hint::spin_loop()
            }
        });
        let fail: Work<'_> = Box::new(|| panic!("on purpose"));
        let error = supervise(Duration::from_secs(60), vec![(0, spin), (1, fail)]).unwrap_err();
        assert!(error.to_string().contains("worker failed"), "{error}");
    }
}
