//! A participant; waiting and waking.

use std::ffi::{c_char, c_int};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::Duration;

use shmesh::config::PoolId;
use shmesh::{Link, LinkOptions, Side};

use crate::config::{links, place, shmesh_config_t, text};
use crate::error::{Failed, argument, guarded, shmesh_error_t, uncancelled};
use crate::handles::{self, Refused, Table, interned};
use crate::message::Outstanding;
use shmesh_error_t::*;

/// The sides of a link.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_side_t {
    /// The side that creates it.
    SHMESH_PRIMARY = 0,
    /// The side that attaches.
    SHMESH_SECONDARY = 1,
}

/// The pools of a link.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_pool_t {
    /// No DATA part.
    SHMESH_NO_DATA = -1,
    /// MSG parts.
    SHMESH_CPU_MSG = 0,
    /// DATA parts.
    SHMESH_CPU_DATA = 1,
    /// Large DATA parts.
    SHMESH_CPU_LARGE = 2,
    /// DATA parts in memory of a device: here without an address, so not to be loaned, and NULL in what is received.
    SHMESH_CUDA_DATA = 3,
    /// The same, of a second kind.
    SHMESH_GPU_DATA = 4,
}

/// How to create a link or attach to one. All zero is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct shmesh_options_t {
    /// The IPC directory; NULL for that of `SHMESH_DIR`, or `/dev/shm`.
    pub dir: *const c_char,
    /// Nanoseconds that attaching waits for the link to exist.
    pub timeout_ns: u64,
    /// Attaching does not map all pages at once.
    pub no_prefault: bool,
    /// Attaching as a further primary beside another.
    pub allow_second_primary: bool,
    /// Creating empties a link that is found: messages and posts of an earlier run are dropped. TAKEN while any other
    /// participant is attached.
    pub fresh: bool,
}

/// A participant of a link: one handle, for one thread at a time. Another thread takes its own with `shmesh_link_clone`; a
/// child that was forked attaches its own. It points to nothing: a call with a handle that was closed gets ENDED.
#[derive(Debug)]
pub struct shmesh_link_t {
    _opaque: (),
}

static LINKS: Table<OpenLink> = Table::new();

/// What a handle stands for.
#[derive(Debug)]
pub(crate) struct OpenLink {
    /// Before the link, which they borrow.
    pub(crate) outstanding: Outstanding,
    link: LinkBox,
}

/// A link at an address that stays, so that loans and messages may borrow it for as long as it is open.
#[derive(Debug)]
struct LinkBox(NonNull<Link>);

impl Drop for LinkBox {
    fn drop(&mut self) {
        // SAFETY: made by `boxed`, and dropped once; what borrows it was dropped before.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: a link is Send. Its loans and messages, which borrow it, are here and move with it; the table gives all of them to
// one thread at a time.
unsafe impl Send for OpenLink {}

/// A handle in the hands of the thread that is in a call with it.
pub(crate) struct Entered(handles::Entered<'static, OpenLink>);

impl Entered {
    #[inline(always)]
    pub(crate) fn new(link: *const shmesh_link_t) -> Result<Self, Failed> {
        match LINKS.enter(link.cast()) {
            Ok(entered) => Ok(Self(entered)),
            Err(refused) => Err(refusal(link, refused)),
        }
    }

    /// As long as the handle is open; loans and messages of it are kept in [`OpenLink::outstanding`], which ends first.
    #[inline(always)]
    pub(crate) fn link(&self) -> &'static Link {
        // SAFETY: closing drops what was borrowed from the link before the link, and this thread alone has entered the handle.
        unsafe { self.0.link.0.as_ref() }
    }

    #[inline(always)]
    pub(crate) fn outstanding(&mut self) -> &mut Outstanding {
        &mut self.0.outstanding
    }
}

#[cold]
fn refusal(link: *const shmesh_link_t, refused: Refused) -> Failed {
    match refused {
        _ if link.is_null() => argument("link is NULL; pass what shmesh_link_create or _attach made"),
        Refused::Ended => Failed(
            SHMESH_ERROR_ENDED,
            "this link handle was closed, or never was one; create the link or attach to it again".into(),
        ),
        Refused::Busy => Failed(
            SHMESH_ERROR_BUSY,
            "another thread is in a call with this handle; take one for each thread with shmesh_link_clone"
                .into(),
        ),
    }
}

pub(crate) fn pool_of(pool: c_int) -> Result<PoolId, Failed> {
    let known = u32::try_from(pool).ok().and_then(PoolId::from_index);
    known.ok_or_else(|| argument(&format!("pool {pool} is none; they are SHMESH_CPU_MSG to SHMESH_GPU_DATA")))
}

fn side_of(side: c_int) -> Result<Side, Failed> {
    match side {
        0 => Ok(Side::Primary),
        1 => Ok(Side::Secondary),
        _ => Err(argument(&format!("side {side} is none; use SHMESH_PRIMARY or SHMESH_SECONDARY"))),
    }
}

fn opened(link: Link) -> Result<*mut shmesh_link_t, Failed> {
    let name = interned(link.name());
    let link = LinkBox(NonNull::from(Box::leak(Box::new(link))));
    let handle = LINKS.insert(name, OpenLink { outstanding: Outstanding::new(), link });
    handle.map(<*mut ()>::cast).map_err(|_| {
        let text = "this process has a million open link handles; close some with shmesh_link_close";
        Failed(SHMESH_ERROR_NO_SPACE, text.into())
    })
}

/// # Safety
/// `options` is NULL or points to options whose `dir` is NULL or ends with a NUL.
unsafe fn options_of(options: *const shmesh_options_t) -> Result<LinkOptions, Failed> {
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

/// Creates the link of this index of a configuration as its primary, or takes the place of a primary that has ended: then
/// the link, and everything that waits in it, is as it was, unless `fresh` is set. `options` may be NULL.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_create(
    config: *const shmesh_config_t,
    index: usize,
    options: *const shmesh_options_t,
    link: *mut *mut shmesh_link_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (place, options) = unsafe { (place("link", link)?, options_of(options)?) };
        let links = match links(config) {
            Some(links) => links,
            None if config.is_null() => return Err(argument("config is NULL; pass one")),
            None => {
                let text = "this configuration was freed, or never was one; read it again";
                return Err(Failed(SHMESH_ERROR_ENDED, text.into()));
            }
        };
        let Some((_, config)) = links.get(index) else {
            let len = links.len();
            return Err(argument(&format!("the configuration has {len} links, and none of index {index}")));
        };
        *place = opened(options.create(config)?)?;
        Ok(SHMESH_OK)
    })
}

/// Attaches to a link that exists. `side` is a `shmesh_side_t`; `options` may be NULL.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_attach(
    name: *const c_char,
    side: c_int,
    options: *const shmesh_options_t,
    link: *mut *mut shmesh_link_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (place, options) = unsafe { (place("link", link)?, options_of(options)?) };
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        *place = opened(options.attach(name, side_of(side)?)?)?;
        Ok(SHMESH_OK)
    })
}

/// Another handle of the same side, for another thread.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_clone(
    link: *const shmesh_link_t,
    clone: *mut *mut shmesh_link_t,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { place("clone", clone) }?;
        *place = opened(Entered::new(link)?.link().try_clone()?)?;
        Ok(SHMESH_OK)
    })
}

/// Leaves the link and ends the handle. HELD while loans or messages of it are: then it is not closed. NULL is nothing to
/// close.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_close(link: *mut shmesh_link_t) -> shmesh_error_t {
    uncancelled(|| {
        if link.is_null() {
            return Ok(SHMESH_OK);
        }
        let mut entered = Entered::new(link)?;
        let held = entered.outstanding().len();
        if held > 0 {
            let name = entered.link().name();
            let text = format!(
                "link {name}: {held} loans or messages are held; send, drop or release them, then close"
            );
            return Err(Failed(SHMESH_ERROR_HELD, text));
        }
        drop(entered.0.remove());
        Ok(SHMESH_OK)
    })
}

/// The name of the link, valid for ever; NULL for NULL and for a handle that was closed.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_name(link: *const shmesh_link_t) -> *const c_char {
    LINKS.name(link.cast())
}

/// Whether this process made the link, rather than found one: of an earlier run, of a sidecar, or of another process.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_was_created(
    link: *const shmesh_link_t,
    was_created: *mut bool,
) -> shmesh_error_t {
    guarded(|| {
        let entered = Entered::new(link)?;
        // SAFETY: the caller's promise.
        let place = unsafe { was_created.as_mut() };
        *place.ok_or_else(|| argument("was_created is NULL; pass where to put it"))? =
            entered.link().was_created();
        Ok(SHMESH_OK)
    })
}

/// Bytes of a buffer of `pool`, which is a `shmesh_pool_t`, and how many there are. NO_POOL if the link does not have it.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_pool(
    link: *const shmesh_link_t,
    pool: c_int,
    buf_size: *mut u32,
    pool_len: *mut u32,
) -> shmesh_error_t {
    guarded(|| {
        let entered = Entered::new(link)?;
        let pool = pool_of(pool)?;
        let Some((size, len)) = entered.link().pool(pool) else {
            return Err(Failed(
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

/// Does something with a handle.
#[inline(always)]
pub(crate) fn with(
    link: *const shmesh_link_t,
    act: impl FnOnce(&Link) -> Result<shmesh_error_t, Failed>,
) -> shmesh_error_t {
    uncancelled(|| act(Entered::new(link)?.link()))
}

/// Messages that were sent to this side and not received yet; a moment's view.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_queued(
    link: *const shmesh_link_t,
    queued: *mut usize,
) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { queued.as_mut() };
        *place.ok_or_else(|| argument("queued is NULL; pass where to put it"))? = link.queued();
        Ok(SHMESH_OK)
    })
}

/// Takes back what participants held that have ended. Attaching does it too.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_recover(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(link.recover().map(|_| SHMESH_OK)?))
}

/// Wakes the other side if somebody there sleeps or has taken the descriptor. Once after several messages is enough.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_notify(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(link.notify().map(|()| SHMESH_OK)?))
}

/// Negative: for ever.
pub(crate) fn limit(timeout_ns: i64) -> Option<Duration> {
    u64::try_from(timeout_ns).ok().map(Duration::from_nanos)
}

pub(crate) fn in_time(there: bool) -> shmesh_error_t {
    if there { SHMESH_OK } else { SHMESH_ERROR_TIMEOUT }
}

/// Waits until a message is there, at most so many nanoseconds; a negative number is for ever.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait(limit(timeout_ns))?)))
}

/// Posts the semaphore of the other side once, and wakes it. Posts add up.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_post(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(link.post().map(|()| SHMESH_OK)?))
}

/// Takes one post of the other side, and waits for it as `shmesh_link_wait` does for a message.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait_post(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait_tti(limit(timeout_ns))?)))
}

/// A descriptor for select, poll and epoll: readable after each notification, post and event from now on. Receive once after this
/// call, and take the signals with `shmesh_link_take_signal`. It is the handle's: not to be closed.
///
/// # Safety
/// Each pointer is NULL or what it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_fd(link: *const shmesh_link_t, fd: *mut c_int) -> shmesh_error_t {
    with(link, |link| {
        // SAFETY: the caller's promise.
        let place = unsafe { fd.as_mut() }.ok_or_else(|| argument("fd is NULL; pass where to put it"))?;
        *place = link.fd()?.as_raw_fd();
        Ok(SHMESH_OK)
    })
}

/// Takes one signal off the descriptor; EMPTY if there is none. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_take_signal(link: *const shmesh_link_t) -> shmesh_error_t {
    with(link, |link| Ok(if link.take_signal()?.is_some() { SHMESH_OK } else { SHMESH_ERROR_EMPTY }))
}
