//! Link handles: creating, attaching, waiting and waking.

use std::ffi::{c_char, c_int};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::Duration;

use shmesh::config::PoolId;
use shmesh::{Link, LinkOptions, Side};

use crate::borrows::Borrows;
use crate::config::{links, output, shmesh_config_t, text};
use crate::error::{CallError, argument, guarded, shmesh_error_t, uncancelled};
use crate::handles::{self, EnterError, HandleTable, interned};
use shmesh_error_t::*;

/// The two sides of a link.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_side_t {
    /// The side that creates the link.
    SHMESH_PRIMARY = 0,
    /// The side that attaches to the link.
    SHMESH_SECONDARY = 1,
}

/// The buffer pools of a link.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_pool_t {
    /// No pool: the message has no DATA part.
    SHMESH_NO_DATA = -1,
    /// Buffers for MSG parts.
    SHMESH_CPU_MSG = 0,
    /// Buffers for DATA parts.
    SHMESH_CPU_DATA = 1,
    /// Buffers for large DATA parts.
    SHMESH_CPU_LARGE = 2,
    /// Buffers in device memory. This interface has no addresses for them: they cannot be loaned, and `data` of received
    /// messages is NULL.
    SHMESH_CUDA_DATA = 3,
    /// A second pool of buffers in device memory.
    SHMESH_GPU_DATA = 4,
}

/// Options for creating a link or attaching to one. All zero is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct shmesh_options_t {
    /// The IPC directory. NULL: the value of `SHMESH_DIR`, or `/dev/shm` if that is not set.
    pub dir: *const c_char,
    /// How long attaching waits for the link to exist, in nanoseconds.
    pub timeout_ns: u64,
    /// Attach without mapping all pages in advance.
    pub no_prefault: bool,
    /// Allow several processes on the primary side.
    pub allow_second_primary: bool,
    /// Empty a link that already exists: messages and posts of an earlier run are dropped. Creating fails with TAKEN while any
    /// other participant is attached.
    pub fresh: bool,
}

/// A handle of a link, for one thread at a time. Other threads use their own handles, from `shmesh_link_clone`; a forked child
/// attaches again. The handle is never dereferenced: a call with a closed handle returns ENDED.
#[derive(Debug)]
pub struct shmesh_link_t {
    _opaque: (),
}

static LINKS: HandleTable<OpenHandle> = HandleTable::new();

/// An open link and the loans and messages that borrow it.
#[derive(Debug)]
pub(crate) struct OpenHandle {
    /// Dropped before the link, which they borrow.
    pub(crate) borrows: Borrows,
    link: LinkBox,
}

/// A link at a fixed address, so that loans and messages can borrow it while it is open.
#[derive(Debug)]
struct LinkBox(NonNull<Link>);

impl Drop for LinkBox {
    fn drop(&mut self) {
        // SAFETY: made by `opened`, and dropped once; its loans and messages were dropped before.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: a link is Send. Its loans and messages, which borrow it, are here and move with it; the table gives all of them to
// one thread at a time.
unsafe impl Send for OpenHandle {}

/// Exclusive access of the calling thread to an open link, until dropped.
pub(crate) struct LinkGuard(handles::HandleGuard<'static, OpenHandle>);

impl LinkGuard {
    #[inline(always)]
    pub(crate) fn new(link: *const shmesh_link_t) -> Result<Self, CallError> {
        match LINKS.enter(link.cast()) {
            Ok(entered) => Ok(Self(entered)),
            Err(refused) => Err(refusal(link, refused)),
        }
    }

    /// The link, valid while the handle is open. Its loans and messages are in [`OpenHandle::borrows`], which is dropped first.
    #[inline(always)]
    pub(crate) fn link(&self) -> &'static Link {
        // SAFETY: closing drops what was borrowed from the link before the link, and this thread alone has entered the handle.
        unsafe { self.0.link.0.as_ref() }
    }

    #[inline(always)]
    pub(crate) fn borrows(&mut self) -> &mut Borrows {
        &mut self.0.borrows
    }
}

#[cold]
fn refusal(link: *const shmesh_link_t, refused: EnterError) -> CallError {
    match refused {
        _ if link.is_null() => {
            argument("link is NULL; pass a handle from shmesh_link_create or shmesh_link_attach")
        }
        EnterError::Ended => CallError(
            SHMESH_ERROR_ENDED,
            "this link handle was closed, or was never valid; create the link or attach to it again".into(),
        ),
        EnterError::Busy => CallError(
            SHMESH_ERROR_BUSY,
            "another thread is in a call with this handle; use one handle per thread, from shmesh_link_clone"
                .into(),
        ),
    }
}

pub(crate) fn pool_of(pool: c_int) -> Result<PoolId, CallError> {
    let known = u32::try_from(pool).ok().and_then(PoolId::from_index);
    known.ok_or_else(|| {
        argument(&format!("pool {pool} does not exist; use SHMESH_CPU_MSG to SHMESH_GPU_DATA"))
    })
}

fn side_of(side: c_int) -> Result<Side, CallError> {
    match side {
        0 => Ok(Side::Primary),
        1 => Ok(Side::Secondary),
        _ => Err(argument(&format!("side {side} does not exist; use SHMESH_PRIMARY or SHMESH_SECONDARY"))),
    }
}

fn opened(link: Link) -> Result<*mut shmesh_link_t, CallError> {
    let name = interned(link.name());
    let link = LinkBox(NonNull::from(Box::leak(Box::new(link))));
    let handle = LINKS.insert(name, OpenHandle { borrows: Borrows::new(), link });
    handle.map(<*mut ()>::cast).map_err(|_| {
        let text = "this process has a million open link handles; close some with shmesh_link_close";
        CallError(SHMESH_ERROR_NO_SPACE, text.into())
    })
}

/// # Safety
/// `options` is NULL or points to options whose `dir` is NULL or ends with a NUL.
unsafe fn options_of(options: *const shmesh_options_t) -> Result<LinkOptions, CallError> {
    let mut made = LinkOptions::new();
    // SAFETY: the caller's promise.
    if let Some(given) = unsafe { options.as_ref() } {
        if !given.dir.is_null() {
            // SAFETY: the caller's promise.
            made = made.dir(unsafe { text("dir", given.dir) }?);
        }
        made = made.timeout(Duration::from_nanos(given.timeout_ns));
        made = made
            .prefault(!given.no_prefault)
            .allow_second_primary(given.allow_second_primary)
            .fresh(given.fresh);
    }
    Ok(made)
}

/// Creates the link with this index in a configuration, and attaches as its primary. If the link exists and its primary has
/// ended, attaches to it; queued messages are kept unless `fresh` is set. `options` may be NULL.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_create(
    config: *const shmesh_config_t,
    index: usize,
    options: *const shmesh_options_t,
    link: *mut *mut shmesh_link_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (place, options) = unsafe { (output("link", link)?, options_of(options)?) };
        let links = match links(config) {
            Some(links) => links,
            None if config.is_null() => return Err(argument("config is NULL; pass a configuration")),
            None => {
                let text = "this configuration was freed, or was never valid; read it again";
                return Err(CallError(SHMESH_ERROR_ENDED, text.into()));
            }
        };
        let Some((_, config)) = links.get(index) else {
            let len = links.len();
            return Err(argument(&format!(
                "index {index} is out of range: the configuration has {len} links, numbered from 0"
            )));
        };
        *place = opened(options.create(config)?)?;
        Ok(SHMESH_OK)
    })
}

/// Attaches to an existing link. `side` is a `shmesh_side_t`; `options` may be NULL.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_attach(
    name: *const c_char,
    side: c_int,
    options: *const shmesh_options_t,
    link: *mut *mut shmesh_link_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (place, options) = unsafe { (output("link", link)?, options_of(options)?) };
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        *place = opened(options.attach(name, side_of(side)?)?)?;
        Ok(SHMESH_OK)
    })
}

/// Creates another handle on the same side, for another thread.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_clone(
    link: *const shmesh_link_t,
    clone: *mut *mut shmesh_link_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { output("clone", clone) }?;
        *place = opened(LinkGuard::new(link)?.link().try_clone()?)?;
        Ok(SHMESH_OK)
    })
}

/// Detaches from the link and closes the handle. Returns HELD, and does not close the handle, while it has loans or messages.
/// Does nothing for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_close(link: *mut shmesh_link_t) -> shmesh_error_t {
    uncancelled(|| {
        if link.is_null() {
            return Ok(SHMESH_OK);
        }
        let mut entered = LinkGuard::new(link)?;
        let held = entered.borrows().len();
        if held > 0 {
            let name = entered.link().name();
            let text = format!(
                "link {name}: {held} loans or messages have not ended; send, drop or release them, then close"
            );
            return Err(CallError(SHMESH_ERROR_HELD, text));
        }
        drop(entered.0.remove());
        Ok(SHMESH_OK)
    })
}

/// The name of the link, valid for the life of the process. NULL for NULL and for a closed handle.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_name(link: *const shmesh_link_t) -> *const c_char {
    LINKS.name(link.cast())
}

/// Whether this handle created the link. `false` if the link existed: an earlier run, a sidecar or another process created it.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_was_created(
    link: *const shmesh_link_t,
    was_created: *mut bool,
) -> shmesh_error_t {
    guarded(|| {
        let entered = LinkGuard::new(link)?;
        // SAFETY: the caller's promise.
        let place = unsafe { was_created.as_mut() };
        *place.ok_or_else(|| argument("was_created is NULL; pass the address of a variable for it"))? =
            entered.link().was_created();
        Ok(SHMESH_OK)
    })
}

/// The size of a buffer of `pool` in bytes, and the number of buffers. `pool` is a `shmesh_pool_t`. Returns NO_POOL if the link
/// does not have the pool.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_pool(
    link: *const shmesh_link_t,
    pool: c_int,
    buf_size: *mut u32,
    pool_len: *mut u32,
) -> shmesh_error_t {
    guarded(|| {
        let entered = LinkGuard::new(link)?;
        let pool = pool_of(pool)?;
        let Some((size, len)) = entered.link().pool(pool) else {
            return Err(CallError(
                SHMESH_ERROR_NO_POOL,
                format!("link {}: pool {pool} is not configured", entered.link().name()),
            ));
        };
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(place) = buf_size.as_mut() {
                *place = size;
            }
            if let Some(place) = pool_len.as_mut() {
                *place = len;
            }
        }
        Ok(SHMESH_OK)
    })
}

/// Runs the body of a call with the link of a handle.
#[inline(always)]
pub(crate) fn with(
    link: *const shmesh_link_t,
    act: impl FnOnce(&Link) -> Result<shmesh_error_t, CallError>,
) -> shmesh_error_t {
    uncancelled(|| act(LinkGuard::new(link)?.link()))
}

/// Reports to the receivers of the other side that so many messages for them were lost before they reached the link, for programs that
/// forward messages of others. They are in `shmesh_link_lost` before a message that is sent later can be received.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_report_lost(link: *const shmesh_link_t, messages: u64) -> shmesh_error_t {
    with(link, |link| {
        link.report_lost(messages);
        Ok(SHMESH_OK)
    })
}

/// The number of messages that this handle did not get: the writer of a broadcast ring overtook it, or they were lost between nodes
/// (`SHMESH_EVENT_LOST`). Those are counted before the first message after them can be received.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_lost(link: *const shmesh_link_t, lost: *mut u64) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { lost.as_mut() };
        *place.ok_or_else(|| argument("lost is NULL; pass the address of a variable for it"))? = link.lost();
        Ok(SHMESH_OK)
    })
}

/// The number of readers that receive the messages of this broadcast ring's writer; 0 on other links.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_readers(
    link: *const shmesh_link_t,
    readers: *mut usize,
) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { readers.as_mut() };
        *place.ok_or_else(|| argument("readers is NULL; pass the address of a variable for it"))? =
            link.readers();
        Ok(SHMESH_OK)
    })
}

/// Waits until this broadcast ring has `count` readers, with a timeout as in `shmesh_link_wait`: for a writer that must not send
/// before all readers are attached.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait_for_readers(
    link: *const shmesh_link_t,
    count: usize,
    timeout_ns: i64,
) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait_for_readers(count, limit(timeout_ns))?)))
}

/// The number of messages that are queued for this side; it may change at any time.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_queued(
    link: *const shmesh_link_t,
    queued: *mut usize,
) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { queued.as_mut() };
        *place.ok_or_else(|| argument("queued is NULL; pass the address of a variable for it"))? =
            link.queued();
        Ok(SHMESH_OK)
    })
}

/// Recovers the buffers of participants that have died. Attaching does the same.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_recover(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(link.recover().map(|_| SHMESH_OK)?))
}

/// Wakes the receivers of the other side that sleep or use the descriptor. One call after several messages suffices.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_notify(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(link.notify().map(|()| SHMESH_OK)?))
}

/// The timeout of a wait; negative numbers mean none.
pub(crate) fn limit(timeout_ns: i64) -> Option<Duration> {
    u64::try_from(timeout_ns).ok().map(Duration::from_nanos)
}

pub(crate) fn in_time(there: bool) -> shmesh_error_t {
    if there { SHMESH_OK } else { SHMESH_ERROR_TIMEOUT }
}

/// Waits for a message, at most `timeout_ns` nanoseconds; negative: without a limit.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait(limit(timeout_ns))?)))
}

/// Posts the semaphore of the other side once, and wakes it. Posts add up.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_post(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(link.post().map(|()| SHMESH_OK)?))
}

/// Waits for a post of the other side and takes it, with a timeout as in `shmesh_link_wait`.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait_post(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait_tti(limit(timeout_ns))?)))
}

/// A descriptor for select, poll and epoll, readable after each notification, post and event from now on. Receive once after
/// this call, because earlier messages do not make it readable; take its signals with `shmesh_link_take_signal`. It belongs to
/// the handle: do not close it.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_fd(link: *const shmesh_link_t, fd: *mut c_int) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { fd.as_mut() }
            .ok_or_else(|| argument("fd is NULL; pass the address of a variable for it"))?;
        *place = link.fd()?.as_raw_fd();
        Ok(SHMESH_OK)
    })
}

/// Takes one signal from the descriptor. Returns EMPTY if there is none. Never blocks.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_take_signal(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(if link.take_signal()?.is_some() { SHMESH_OK } else { SHMESH_ERROR_EMPTY }))
}
