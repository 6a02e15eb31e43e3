//! NVIPC's functions for a tap.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::{Duration, UNIX_EPOCH};

use shmesh_sys::errno;
use shmesh_sys::time::timespec;

use crate::backend::Failure;
use crate::calls::{self, CallerMessage, null, waiting, with};
use crate::cancel;
use crate::instance::{Instance, OpenInstance};
use crate::tap::{Forward, TapOutcome};
use crate::types::*;

/// The tap of an instance, if the transport has one.
fn tap_of(open: &OpenInstance) -> Result<&Forward, Failure> {
    let no_tap = || Failure::Refused("the tap is not available over UDP; use NV_IPC_TRANSPORT_SHM".into());
    open.can_copy().then_some(&open.forward).ok_or_else(no_tap)
}

/// Starts the tap for `count` messages, or for all messages if it is 0. Returns -1 if it is started already, and over UDP.
///
/// The filters are read now from the configuration that `nv_ipc_get_primary_config` returns.
///
/// # Safety
/// `ipc` is NULL or an instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_start(ipc: *mut nv_ipc_t, count: u32) -> c_int {
    with("nvipc_fw_start", ipc, -1, |open| {
        let forward = tap_of(open)?;
        let config = Instance::of(ipc).map(Instance::config).ok_or_else(|| null("ipc"))?;
        // SAFETY: the table is never freed, and any bytes are valid filters. The application writes them before this call.
        let filters = unsafe {
            let debug = &raw const (*config).debug_configs;
            ((*debug).msg_filter, (*debug).cell_filter)
        };
        forward.start(count, filters.0, filters.1).map(|()| 0)
    })
}

/// Stops the tap. Messages in it can still be read.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_stop(ipc: *mut nv_ipc_t) -> c_int {
    with("nvipc_fw_stop", ipc, -1, |open| {
        open.forward.stop();
        Ok(0)
    })
}

/// Stops the tap and resets the count of lost messages. Messages in it can still be read.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_reset(ipc: *mut nv_ipc_t) -> c_int {
    with("nvipc_fw_reset", ipc, -1, |open| {
        open.forward.reset();
        Ok(0)
    })
}

/// Returns 1 while the tap is started, else 0.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_get_started(ipc: *mut nv_ipc_t) -> c_int {
    with("nvipc_fw_get_started", ipc, -1, |open| Ok(open.forward.is_started().into()))
}

/// Returns the number of messages for which there was no room.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_get_lost(ipc: *mut nv_ipc_t) -> u32 {
    with("nvipc_fw_get_lost", ipc, 0, |open| Ok(open.forward.lost()))
}

/// Waits until there is a message to read. Returns -1 once the instance is destroyed.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvipc_fw_sem_wait(ipc: *mut nv_ipc_t) -> c_int {
    cancel::again(|| {
        waiting("nvipc_fw_sem_wait", ipc, Some(-1), |open| Ok(tap_of(open)?.wait(None)?.map(|_| 0)))
    })
}

/// As [`nvipc_fw_sem_wait`], until a time of the real-time clock; NULL means no limit. On timeout returns -1 and sets
/// `errno` to ETIMEDOUT.
///
/// # Safety
/// As [`nvipc_fw_start`]; `ts_abs` is NULL or points to a time.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvipc_fw_sem_timedwait(ipc: *mut nv_ipc_t, ts_abs: *const timespec) -> c_int {
    let slice = || {
        waiting("nvipc_fw_sem_timedwait", ipc, Some(-1), |open| {
            // SAFETY: guaranteed by the caller.
            let until = unsafe { ts_abs.as_ref() }.map(|time| {
                let nanos = u32::try_from(time.tv_nsec).ok().filter(|nanos| *nanos < 1_000_000_000);
                let nanos = nanos.ok_or_else(|| {
                    let text = format!("tv_nsec is {}; give 0 to 999999999", time.tv_nsec);
                    Failure::Refused(text)
                })?;
                // A time before 1970 has passed as well.
                let since = Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanos);
                // A time that the clock never reaches means no limit.
                Ok(UNIX_EPOCH.checked_add(since))
            });
            let there = tap_of(open)?.wait(until.transpose()?.flatten())?;
            if there == Some(false) {
                errno::set(errno::ETIMEDOUT);
            }
            Ok(there.map(|there| if there { 0 } else { -1 }))
        })
    };
    cancel::again(slice)
}

/// Copies a held message into the tap, as sending it would. Returns -1 if the tap is not started or full.
///
/// # Safety
/// As [`nvipc_fw_start`]; `msg` is NULL or points to a message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_enqueue(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    with("nvipc_fw_enqueue", ipc, -1, |open| {
        // SAFETY: guaranteed by the caller.
        let given = unsafe { CallerMessage::read(msg) }?;
        let Some(mut tap) = tap_of(open)?.tap() else {
            return Err(Failure::Refused("the tap is not started; call nvipc_fw_start first".into()));
        };
        let message = tap.copy(&**open, given.fields, given.msg, given.data)?;
        let done = if matches!(message, TapOutcome::Lost) { -1 } else { 0 };
        tap.put(message);
        Ok(done)
    })
}

/// Takes the oldest message from the tap, or returns -1 if it is empty. The message is unchanged until it is freed.
///
/// # Safety
/// As [`nvipc_fw_enqueue`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_dequeue(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    with("nvipc_fw_dequeue", ipc, -1, |open| {
        // SAFETY: guaranteed by the caller.
        let msg = unsafe { msg.as_mut() }.ok_or_else(|| null("msg"))?;
        let Some((fields, buffers)) = open.forward.read() else { return Ok(-1) };
        *msg = calls::described(fields, buffers);
        Ok(0)
    })
}

/// Frees a message of the tap. Returns -1 if it is not one.
///
/// # Safety
/// As [`nvipc_fw_enqueue`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_free(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    with("nvipc_fw_free", ipc, -1, |open| {
        // SAFETY: guaranteed by the caller.
        let msg = unsafe { msg.as_ref() }.ok_or_else(|| null("msg"))?;
        let start = NonNull::new(msg.msg_buf.cast()).ok_or_else(|| null("msg_buf"))?;
        open.forward.free(start).map(|()| 0)
    })
}
