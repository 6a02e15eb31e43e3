//! The tap of NVIPC: a third reader of all messages. Links of shmesh have none that an application could read here.

use std::ffi::{c_int, c_void};

use crate::backend::Failure;
use crate::calls::with;
use crate::types::{nv_ipc_msg_t, nv_ipc_t};

fn no_tap(what: &str, ipc: *mut nv_ipc_t) -> c_int {
    with(what, ipc, -1, |_| {
        Err(Failure::Refused(
            "links have no tap to forward messages to; look at them with `shmesh dump`".into(),
        ))
    })
}

/// Refused.
///
/// # Safety
/// `ipc` is NULL or an instance, as in all functions here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_start(ipc: *mut nv_ipc_t, _count: u32) -> c_int {
    no_tap("nvipc_fw_start", ipc)
}

/// 0: nothing was started.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_stop(ipc: *mut nv_ipc_t) -> c_int {
    with("nvipc_fw_stop", ipc, -1, |_| Ok(0))
}

/// 0: nothing is counted.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_reset(ipc: *mut nv_ipc_t) -> c_int {
    with("nvipc_fw_reset", ipc, -1, |_| Ok(0))
}

/// 0: it was not started.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_get_started(ipc: *mut nv_ipc_t) -> c_int {
    with("nvipc_fw_get_started", ipc, -1, |_| Ok(0))
}

/// 0: nothing is lost where nothing is forwarded.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_get_lost(ipc: *mut nv_ipc_t) -> u32 {
    with("nvipc_fw_get_lost", ipc, 0, |_| Ok(0))
}

/// Refused, at once: nobody would ever wake the caller.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_sem_wait(ipc: *mut nv_ipc_t) -> c_int {
    no_tap("nvipc_fw_sem_wait", ipc)
}

/// Refused, at once.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_sem_timedwait(ipc: *mut nv_ipc_t, _ts_abs: *const c_void) -> c_int {
    no_tap("nvipc_fw_sem_timedwait", ipc)
}

/// Refused.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_enqueue(ipc: *mut nv_ipc_t, _msg: *mut nv_ipc_msg_t) -> c_int {
    no_tap("nvipc_fw_enqueue", ipc)
}

/// Refused.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_dequeue(ipc: *mut nv_ipc_t, _msg: *mut nv_ipc_msg_t) -> c_int {
    no_tap("nvipc_fw_dequeue", ipc)
}

/// Refused.
///
/// # Safety
/// As [`nvipc_fw_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvipc_fw_free(ipc: *mut nv_ipc_t, _msg: *mut nv_ipc_msg_t) -> c_int {
    no_tap("nvipc_fw_free", ipc)
}
