//! The creation of an instance, and its sixteen functions.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use shmesh_sys::cancel::Uncancelled;

use crate::backend::{Buffers, Direction, Failure, Fields, PoolId};
use crate::cancel::{self, WaitStep};
use crate::config;
use crate::guard::{guarded, unwinding};
use crate::instance::{self, Instance, Lookup, OpenInstance};
use crate::log::{ordinary, say};
use crate::tap::TapOutcome;
use crate::types::{nv_ipc_config_t, nv_ipc_msg_t, nv_ipc_t};

const API: nv_ipc_t = nv_ipc_t {
    ipc_destroy,
    tx_allocate,
    tx_release,
    rx_allocate: tx_allocate,
    rx_release: tx_release,
    tx_send_msg,
    tx_tti_sem_post,
    rx_tti_sem_wait,
    rx_recv_msg,
    get_fd,
    notify,
    get_value,
    cuda_memcpy_to_host: memcpy_to_host,
    cuda_memcpy_to_device: memcpy_to_device,
    gdr_memcpy_to_host: memcpy_to_host,
    gdr_memcpy_to_device: memcpy_to_device,
};

#[cold]
fn refused(what: &str, failure: &Failure) {
    match failure {
        Failure::Exhausted(..) => ordinary(format_args!("{what}: {failure}")),
        Failure::PrimaryLeft(text) | Failure::Refused(text) => say!("{what}: {text}"),
    }
}

#[cold]
fn no_instance(what: &str, ipc: *const nv_ipc_t) {
    if ipc.is_null() {
        say!("{what}: ipc is NULL; pass the pointer from create_nv_ipc_interface");
    } else {
        say!(
            "{what}: {ipc:p} is not an instance; pass the pointer from create_nv_ipc_interface, not a copy of the structure"
        );
    }
}

#[cold]
fn destroyed(what: &str) {
    say!("{what}: this instance was destroyed; create another");
}

/// Runs a call on an instance that is open. If another thread destroys the instance, the call runs either before or after
/// that.
pub(crate) fn with<T>(
    what: &str,
    ipc: *const nv_ipc_t,
    failed: T,
    act: impl FnOnce(&OpenInstance) -> Result<T, Failure>,
) -> T
where
    T: Copy,
{
    let _uncancelled = Uncancelled::new();
    with_message(what, ipc, failed, act)
}

/// As [`with`], for the calls of each message.
#[inline(always)]
fn with_message<T>(
    what: &str,
    ipc: *const nv_ipc_t,
    failed: T,
    act: impl FnOnce(&OpenInstance) -> Result<T, Failure>,
) -> T
where
    T: Copy,
{
    unwinding(what, failed, || {
        Instance::call(ipc, |found| match found {
            Lookup::Open(open) => act(open).unwrap_or_else(|failure| {
                refused(what, &failure);
                failed
            }),
            Lookup::Destroyed => {
                destroyed(what);
                failed
            }
            Lookup::Unknown => {
                no_instance(what, ipc);
                failed
            }
        })
    })
}

/// As [`with`], for calls that may wait. The instance can be destroyed meanwhile.
pub(crate) fn waiting<T: Copy>(
    what: &str,
    ipc: *const nv_ipc_t,
    failed: T,
    act: impl FnOnce(&OpenInstance) -> Result<T, Failure>,
) -> T {
    guarded(what, failed, || {
        // Ends the previous sleep.
        cancel::awake();
        let Some(instance) = Instance::of(ipc) else {
            no_instance(what, ipc);
            return failed;
        };
        let Some(open) = instance.open().as_ref().map(Arc::clone) else {
            destroyed(what);
            return failed;
        };
        act(&open).unwrap_or_else(|failure| {
            refused(what, &failure);
            failed
        })
    })
}

#[cold]
pub(crate) fn null(what: &'static str) -> Failure {
    Failure::Refused(format!("{what} is NULL; pass a valid pointer"))
}

/// A caller's message, checked as far as is possible without its buffers.
pub(crate) struct CallerMessage {
    pub(crate) fields: Fields,
    pub(crate) msg: NonNull<u8>,
    pub(crate) data: Option<NonNull<u8>>,
}

/// The pool of a DATA part. NVIPC treats invalid numbers as "no DATA"; numbers that are too large only when it allocates.
#[inline(always)]
pub(crate) fn pool_of(id: i32) -> Option<PoolId> {
    PoolId::from_index(u32::try_from(id).ok()?).filter(|&pool| pool != PoolId::CpuMsg)
}

fn id_of(pool: PoolId) -> i32 {
    i32::try_from(pool.index()).unwrap_or(0)
}

/// Describes a message to the caller.
pub(crate) fn described(fields: Fields, buffers: Buffers) -> nv_ipc_msg_t {
    let signed = |len: u32| i32::try_from(len).unwrap_or(i32::MAX);
    nv_ipc_msg_t {
        msg_id: fields.msg_id,
        cell_id: fields.cell_id,
        msg_len: signed(fields.msg_len),
        data_len: signed(fields.data_len),
        data_pool: fields.data_pool.map_or(0, id_of),
        msg_buf: buffers.msg.as_ptr().cast(),
        data_buf: buffers.data.map_or(std::ptr::null_mut(), |data| data.as_ptr().cast()),
    }
}

#[inline(always)]
fn known_pool(id: i32) -> Result<Option<PoolId>, Failure> {
    if id >= 0 && u32::try_from(id).ok().and_then(PoolId::from_index).is_none() {
        return Err(unknown_pool(id));
    }
    Ok(pool_of(id))
}

#[cold]
fn unknown_pool(id: i32) -> Failure {
    Failure::Refused(format!("data_pool {id} does not exist; give 1 to 4, or 0 or -1 for no DATA"))
}

#[inline(always)]
fn length(what: &str, len: i32) -> Result<u32, Failure> {
    u32::try_from(len).map_err(|_| negative(what, len))
}

#[cold]
fn negative(what: &str, len: i32) -> Failure {
    Failure::Refused(format!("{what} is {len}; set it to the number of bytes, 0 or more"))
}

impl CallerMessage {
    /// Inline, as are the functions of backends that get or return its parts: fields that are stored one by one, and soon after
    /// loaded together as a part of a structure, are not forwarded from the store buffer of the processor. That load takes as
    /// long as half of the call.
    ///
    /// # Safety
    /// `msg` is NULL or points to a message.
    #[inline(always)]
    pub(crate) unsafe fn read(msg: *const nv_ipc_msg_t) -> Result<Self, Failure> {
        // SAFETY: guaranteed by the caller.
        let given = unsafe { msg.as_ref() }.ok_or_else(|| null("msg"))?;
        let msg = NonNull::new(given.msg_buf.cast()).ok_or_else(|| null("msg_buf"))?;
        let data_pool = known_pool(given.data_pool)?;
        let fields = Fields {
            msg_id: given.msg_id,
            cell_id: given.cell_id,
            msg_len: length("msg_len", given.msg_len)?,
            // Without DATA the length is ignored, because not every caller sets it.
            data_len: match data_pool {
                Some(_) => length("data_len", given.data_len)?,
                None => u32::try_from(given.data_len).unwrap_or(0),
            },
            data_pool,
        };
        Ok(Self { fields, msg, data: NonNull::new(given.data_buf.cast()) })
    }
}

unsafe extern "C" fn ipc_destroy(ipc: *mut nv_ipc_t) -> c_int {
    guarded("ipc_destroy", -1, || {
        // A cleanup handler of a thread that was cancelled during a wait may call this. Destroying waits until no thread
        // sleeps.
        cancel::awake();
        match Instance::of(ipc) {
            Some(instance) if instance.close() => 0,
            Some(_) => {
                destroyed("ipc_destroy");
                -1
            }
            None => {
                no_instance("ipc_destroy", ipc);
                -1
            }
        }
    })
}

/// Creates an instance: the primary creates or adopts the link, the secondary waits for it and attaches. Returns NULL on
/// failure.
///
/// # Safety
/// `cfg` is NULL or points to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn create_nv_ipc_interface(cfg: *mut nv_ipc_config_t) -> *mut nv_ipc_t {
    guarded("create_nv_ipc_interface", std::ptr::null_mut(), || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_mut() }) else {
            say!(
                "create_nv_ipc_interface: cfg is NULL; pass a configuration, filled in by set_nv_ipc_default_config"
            );
            return std::ptr::null_mut();
        };
        match config::open(config) {
            Ok((name, backend, primary)) => instance::open(&API, backend, &name, &primary),
            Err(failure) => {
                say!("{failure}");
                std::ptr::null_mut()
            }
        }
    })
}

unsafe extern "C" fn tx_allocate(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t, _options: u32) -> c_int {
    with_message("tx_allocate", ipc, -1, |backend| {
        // SAFETY: NULL or a message, as the header requires.
        let msg = unsafe { msg.as_mut() }.ok_or_else(|| null("msg"))?;
        (msg.msg_buf, msg.data_buf) = (std::ptr::null_mut(), std::ptr::null_mut());
        let buffers =
            backend.allocate(pool_of(msg.data_pool)).inspect_err(|_| backend.idle.found_nothing())?;
        msg.msg_buf = buffers.msg.as_ptr().cast();
        msg.data_buf = buffers.data.map_or(std::ptr::null_mut(), |data| data.as_ptr().cast());
        Ok(0)
    })
}

unsafe extern "C" fn tx_release(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    with_message("release", ipc, -1, |backend| {
        // SAFETY: NULL or a message, as the header requires.
        let given = unsafe { msg.as_ref() }.ok_or_else(|| null("msg"))?;
        let start = NonNull::new(given.msg_buf.cast()).ok_or_else(|| null("msg_buf"))?;
        let pool = known_pool(given.data_pool)?;
        let data = NonNull::new(given.data_buf.cast());
        // Without a DATA address the pool is ignored, because not every caller resets it.
        backend.release(start, data, pool.filter(|_| data.is_some()))?;
        Ok(0)
    })
}

unsafe extern "C" fn tx_send_msg(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    with_message("tx_send_msg", ipc, -1, |open| {
        // SAFETY: NULL or a message, as the header requires.
        let given = unsafe { CallerMessage::read(msg) }?;
        // Copied before it is sent, because then it is the receiver's. If it cannot be copied, `send` fails as well and
        // logs why.
        let tapped = open.forward.tap().map(|tap| {
            let message = tap.copy(&**open, given.fields, given.msg, given.data);
            (tap, message.unwrap_or(TapOutcome::Lost))
        });
        open.send(given.fields, given.msg, given.data)?;
        if let Some((mut tap, message)) = tapped {
            tap.put(message);
        }
        Ok(0)
    })
}

unsafe extern "C" fn rx_recv_msg(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    // Most polls find nothing, and need none of what follows: this cannot panic.
    if !msg.is_null() && Instance::is_known_empty(ipc) {
        return -1;
    }
    with_message("rx_recv_msg", ipc, -1, |open| {
        // SAFETY: NULL or a message, as the header requires.
        let msg = unsafe { msg.as_mut() }.ok_or_else(|| null("msg"))?;
        let tap = open.forward.tap();
        let Some(received) = open.receive()? else {
            drop(tap);
            open.idle.found_nothing();
            return Ok(-1);
        };
        let (fields, buffers) = (received.fields, received.buffers);
        if let Some(mut tap) = tap {
            let message = tap.copy(&**open, fields, buffers.msg, buffers.data);
            tap.put(message.unwrap_or(TapOutcome::Lost));
        }
        *msg = described(fields, buffers);
        Ok(0)
    })
}

unsafe extern "C" fn tx_tti_sem_post(ipc: *mut nv_ipc_t) -> c_int {
    with("tx_tti_sem_post", ipc, -1, |backend| backend.post().map(|()| 0))
}

unsafe extern "C" fn notify(ipc: *mut nv_ipc_t, _value: c_int) -> c_int {
    with("notify", ipc, -1, |backend| backend.post().map(|()| 0))
}

/// One step of a wait: consumes a post, or prepares this thread to sleep. `done` is the result of the call.
fn take_or_sleep(
    what: &str,
    ipc: *const nv_ipc_t,
    done: c_int,
    take: impl Fn(&OpenInstance) -> Result<bool, Failure>,
) -> WaitStep {
    waiting(what, ipc, WaitStep::Done(-1), |open| {
        if take(open)? {
            return Ok(WaitStep::Done(done));
        }
        let sleep = open.backend().sleep()?;
        Ok(sleep.map_or(WaitStep::Done(done), cancel::asleep))
    })
}

unsafe extern "C-unwind" fn rx_tti_sem_wait(ipc: *mut nv_ipc_t) -> c_int {
    cancel::sleeping(|| take_or_sleep("rx_tti_sem_wait", ipc, 0, |open| open.take()))
}

unsafe extern "C-unwind" fn get_value(ipc: *mut nv_ipc_t) -> c_int {
    cancel::sleeping(|| take_or_sleep("get_value", ipc, 1, |open| open.take_signal()))
}

unsafe extern "C" fn get_fd(ipc: *mut nv_ipc_t) -> c_int {
    with("get_fd", ipc, -1, |backend| backend.fd())
}

fn copy(
    what: &str,
    ipc: *mut nv_ipc_t,
    direction: Direction,
    host: *mut c_void,
    device: u64,
    size: usize,
) -> c_int {
    with(what, ipc, -1, |backend| {
        let host = NonNull::new(host.cast()).ok_or_else(|| null("the host address"))?;
        if size > isize::MAX.unsigned_abs() {
            return Err(Failure::Refused(format!(
                "size {size} is out of range; give the number of bytes to copy"
            )));
        }
        backend.copy(direction, host, device, size).map(|()| 0)
    })
}

unsafe extern "C" fn memcpy_to_host(
    ipc: *mut nv_ipc_t,
    host: *mut c_void,
    device: *const c_void,
    size: usize,
) -> c_int {
    copy("memcpy_to_host", ipc, Direction::ToHost, host, device.addr() as u64, size)
}

unsafe extern "C" fn memcpy_to_device(
    ipc: *mut nv_ipc_t,
    device: *mut c_void,
    host: *const c_void,
    size: usize,
) -> c_int {
    copy("memcpy_to_device", ipc, Direction::ToDevice, host.cast_mut(), device.addr() as u64, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_pool_numbers() {
        assert_eq!(pool_of(1), Some(PoolId::CpuData));
        for none in [0, -1, 5, i32::MIN, i32::MAX] {
            assert_eq!(pool_of(none), None);
        }
        assert!(known_pool(5).is_err() && known_pool(i32::MAX).is_err());
        assert!(known_pool(-1).is_ok() && known_pool(0).is_ok());
    }
}
