//! The functions of NVIPC that take no instance, or are not in its function table.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use shmesh::config::PoolId;
use shmesh::device::CudaDevice;
use shmesh::inspect::{BufferState, View};

use crate::backend::Failure;
use crate::calls::{CallerMessage, null, with};
use crate::config;
use crate::guard::guarded;
use crate::instance::Instance;
use crate::log::say;
use crate::types::*;

/// Messages with ids below this have no frame and slot number.
const FIRST_SLOT_MESSAGE: i32 = 0x80;
/// Offset of the frame number in a MSG part, after the headers.
const SLOT_OFFSET: usize = 8;
const SFN_SLOT_INVALID: u32 = u32::MAX;

/// Returns 1 for the primary side, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn is_module_primary(module_type: c_int) -> c_int {
    (config::side_of(module_type) == Some(shmesh::Side::Primary)).into()
}

/// Returns one number of a pool's configuration, or -1 if the pool does not exist.
fn size_of_pool(
    what: &str,
    cfg: *const nv_ipc_config_t,
    pool: c_int,
    of: fn(nv_ipc_mempool_size_t) -> i32,
) -> c_int {
    guarded(what, -1, || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_ref() }) else {
            say!("{what}: cfg is NULL; pass a configuration");
            return -1;
        };
        let transport = &config.transport_config;
        // SAFETY: all bytes of the union are the caller's integers, so any bytes are valid.
        let pools = unsafe {
            match config.ipc_transport {
                NV_IPC_TRANSPORT_SHM => transport.shm.mempool_size,
                NV_IPC_TRANSPORT_DPDK => transport.dpdk.mempool_size,
                NV_IPC_TRANSPORT_DOCA => transport.doca.mempool_size,
                other => {
                    say!("{what}: ipc_transport {other} has no pools; use NV_IPC_TRANSPORT_SHM");
                    return -1;
                }
            }
        };
        match usize::try_from(pool).ok().and_then(|pool| pools.get(pool)) {
            Some(size) => of(*size),
            None => {
                say!("{what}: pool {pool} does not exist; give 0 to 4");
                -1
            }
        }
    })
}

/// Returns the configured size of a pool's buffers in bytes.
///
/// # Safety
/// `cfg` is NULL or points to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_get_buf_size(cfg: *const nv_ipc_config_t, pool_id: c_int) -> c_int {
    size_of_pool("nv_ipc_get_buf_size", cfg, pool_id, |size| size.buf_size)
}

/// Returns the configured number of a pool's buffers.
///
/// # Safety
/// `cfg` is NULL or points to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_get_pool_len(cfg: *const nv_ipc_config_t, pool_id: c_int) -> c_int {
    size_of_pool("nv_ipc_get_pool_len", cfg, pool_id, |size| size.pool_len)
}

/// Returns the frame and slot number of a message, or 0xFFFFFFFF if it has none.
///
/// # Safety
/// `msg` is NULL or points to a message whose `msg_buf` is NULL or a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_get_sfn_slot(msg: *const nv_ipc_msg_t) -> sfn_slot_t {
    let invalid = sfn_slot_t { u32: SFN_SLOT_INVALID };
    guarded("nv_ipc_get_sfn_slot", invalid, || {
        // SAFETY: guaranteed by the caller.
        let Some(msg) = (unsafe { msg.as_ref() }) else { return invalid };
        if msg.msg_id < FIRST_SLOT_MESSAGE || msg.msg_buf.is_null() {
            return invalid;
        }
        // SAFETY: a MSG buffer, as the caller guarantees; every MSG buffer has at least sixteen bytes.
        let at = unsafe { msg.msg_buf.cast::<u8>().add(SLOT_OFFSET).cast::<[u16; 2]>().read_unaligned() };
        sfn_slot_t { u16: at }
    })
}

/// Writes the handle id into the header of a message.
///
/// # Safety
/// As [`nv_ipc_get_sfn_slot`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_set_handle_id(msg: *mut nv_ipc_msg_t, handle_id: u8) {
    guarded("nv_ipc_set_handle_id", (), || {
        // SAFETY: guaranteed by the caller.
        match unsafe { msg.as_ref() } {
            // SAFETY: a MSG buffer, as the caller guarantees; every MSG buffer has at least sixteen bytes.
            Some(msg) if !msg.msg_buf.is_null() => unsafe {
                msg.msg_buf.cast::<u8>().add(1).write(handle_id)
            },
            _ => say!("nv_ipc_set_handle_id: msg or msg_buf is NULL; allocate the message first"),
        }
    });
}

/// Returns the time at which a message was sent, or -1 if it is unknown.
///
/// # Safety
/// `ipc` is NULL or an instance; `msg` is NULL or points to a message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_get_ts_send(ipc: *mut nv_ipc_t, msg: *const nv_ipc_msg_t) -> i64 {
    with("nv_ipc_get_ts_send", ipc, -1, |backend| {
        // SAFETY: guaranteed by the caller.
        let msg = unsafe { msg.as_ref() }.ok_or_else(|| null("msg"))?;
        let start = std::ptr::NonNull::new(msg.msg_buf.cast()).ok_or_else(|| null("msg_buf"))?;
        backend.sent_at(start)
    })
}

/// Sends a message to this endpoint itself.
///
/// # Safety
/// As [`nv_ipc_get_ts_send`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_shm_send_loopback(ipc: *mut nv_ipc_t, msg: *mut nv_ipc_msg_t) -> c_int {
    with("nv_ipc_shm_send_loopback", ipc, -1, |backend| {
        // SAFETY: guaranteed by the caller.
        let given = unsafe { CallerMessage::read(msg) }?;
        backend.send_loopback(given.fields, given.msg, given.data)?;
        Ok(0)
    })
}

/// Returns the approximate number of queued messages.
///
/// # Safety
/// `ipc` is NULL or an instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_shm_rx_poll(ipc: *mut nv_ipc_t) -> c_int {
    with(
        "nv_ipc_shm_rx_poll",
        ipc,
        -1,
        |backend| Ok(c_int::try_from(backend.queued()?).unwrap_or(c_int::MAX)),
    )
}

/// Sets the callback that NVIPC calls before it wipes a link. Links are never wiped here. A primary in NVIPC's layout calls
/// it before it accepts another secondary, which a negative result refuses. Links of shmesh never call it.
///
/// # Safety
/// `ipc` is NULL or an instance; `callback` may be called with `cb_args`, in another thread, until the instance is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_set_reset_callback(
    ipc: *mut nv_ipc_t,
    callback: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    cb_args: *mut c_void,
) -> c_int {
    with("nv_ipc_set_reset_callback", ipc, -1, |backend| {
        let callback = callback.ok_or_else(|| null("callback"))?;
        let args = CallbackArg(cb_args);
        // SAFETY: the callback may be called from any thread, as the caller guarantees.
        backend.ask_before_another(std::sync::Arc::new(move || unsafe { callback(args.get()) } >= 0));
        Ok(0)
    })
}

/// The argument of the application's callback.
struct CallbackArg(*mut c_void);

// SAFETY: only passed to the callback; the caller of `nv_ipc_set_reset_callback` guarantees that any thread may do so.
unsafe impl Send for CallbackArg {}
// SAFETY: as above.
unsafe impl Sync for CallbackArg {}

impl CallbackArg {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Returns the primary's configuration, or NULL if `ipc` is not an instance.
///
/// # Safety
/// `ipc` is NULL or an instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_get_primary_config(ipc: *mut nv_ipc_t) -> *mut nv_ipc_config_t {
    with("nv_ipc_get_primary_config", ipc, std::ptr::null_mut(), |_| {
        Ok(Instance::of(ipc).map_or(std::ptr::null_mut(), Instance::config))
    })
}

/// Reads the configuration of an existing link without attaching. Returns -1 on failure; then `cfg` is unchanged.
///
/// # Safety
/// `cfg` is NULL or points to a configuration; `prefix` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_lookup_config(
    cfg: *mut nv_ipc_config_t,
    prefix: *const c_char,
    module_type: c_int,
) -> c_int {
    guarded("nv_ipc_lookup_config", -1, || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_mut() }) else {
            say!("nv_ipc_lookup_config: cfg is NULL; pass a configuration");
            return -1;
        };
        if prefix.is_null() {
            say!("nv_ipc_lookup_config: prefix is NULL; pass the name of a link");
            return -1;
        }
        // SAFETY: guaranteed by the caller.
        let name = unsafe { CStr::from_ptr(prefix) }.to_string_lossy();
        match config::lookup(&name) {
            Ok(shm) => {
                config.module_type = module_type;
                config.ipc_transport = NV_IPC_TRANSPORT_SHM;
                config.transport_config.shm = shm;
                config.debug_configs = nv_ipc_config_t::zeroed().debug_configs;
                0
            }
            Err(failure) => {
                say!("nv_ipc_lookup_config: {failure}");
                -1
            }
        }
    })
}

/// Logs the queued messages and the held buffers of a link. The link stays usable.
///
/// # Safety
/// `ipc` is NULL or an instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_dump(ipc: *mut nv_ipc_t) -> c_int {
    with("nv_ipc_dump", ipc, -1, |_| {
        let name = Instance::of(ipc).and_then(Instance::name).unwrap_or_default();
        dump(&name).map_err(|text| Failure::Refused(format!("link {name}: {text}")))?;
        Ok(0)
    })
}

fn dump(name: &str) -> Result<(), String> {
    let dir = config::ipc_dir();
    let parsed = name.parse().map_err(|error: shmesh::config::NameError| error.to_string())?;
    let view = View::open(Path::new(&dir), &parsed).map_err(|error| error.to_string())?;
    let snapshot = view.snapshot();
    for seat in &snapshot.seats {
        let word = seat.participant.word;
        say!(
            "link {name}: seat {} is process {}, {:?}",
            seat.participant.seat.value(),
            word.pid(),
            seat.liveness
        );
    }
    for ring in &snapshot.rings {
        let ids: Vec<String> = ring.queued.iter().take(16).map(|queued| queued.msg_id.to_string()).collect();
        say!(
            "link {name}: ring {} has {} messages; the oldest: [{}]",
            ring.name(),
            ring.queued.len(),
            ids.join(", ")
        );
    }
    for table in &snapshot.tables {
        let pool = table.pool.map_or("inline", PoolId::name);
        let received = table.count(|hand| matches!(hand, BufferState::Borrowed(_)));
        let loaned = table.count(|hand| matches!(hand, BufferState::Loaned(_)));
        say!(
            "link {name}: pool {pool}: {} of {} free, {loaned} allocated or sent, {received} received; `shmesh dump {name}` \
             names each",
            table.free(),
            table.len
        );
    }
    Ok(())
}

/// Writes a configuration to the log.
///
/// # Safety
/// `cfg` is NULL or points to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_dump_config(cfg: *const nv_ipc_config_t) -> c_int {
    guarded("nv_ipc_dump_config", -1, || {
        // SAFETY: guaranteed by the caller.
        let Some(config) = (unsafe { cfg.as_ref() }) else {
            say!("nv_ipc_dump_config: cfg is NULL; pass a configuration");
            return -1;
        };
        let (module, transport) = (config.module_type, config.ipc_transport);
        if transport != NV_IPC_TRANSPORT_SHM {
            say!("config: module_type {module}, ipc_transport {transport}, which is not supported");
            return 0;
        }
        // SAFETY: all bytes of the union are the caller's integers, so any bytes are valid.
        let shm = unsafe { config.transport_config.shm };
        let name = config::name_of(config).unwrap_or_else(|_| "(no name)".into());
        say!("config: module_type {module}, link {name}, ring_len {}", shm.ring_len);
        for (pool, size) in PoolId::ALL.into_iter().zip(shm.mempool_size) {
            say!("config: pool {pool}: {} bytes x {}", size.buf_size, size.pool_len);
        }
        0
    })
}

/// Returns the number of GPUs that this process sees; 0 without a driver.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_get_device_count() -> c_int {
    guarded("cuda_get_device_count", 0, || {
        CudaDevice::all().map_or(0, |all| c_int::try_from(all.len()).unwrap_or(c_int::MAX))
    })
}

/// Returns whether an address lies in a DATA part in GPU memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_is_device_pointer(ptr: *const c_void) -> c_int {
    guarded("cuda_is_device_pointer", 0, || {
        c_int::from(Instance::any(|backend| backend.is_on_gpu(ptr.addr() as u64)))
    })
}

/// Returns 0 if host pools are page-locked for a GPU.
///
/// # Safety
/// `ipc` is NULL or an instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_check_host_pinned_memory(ipc: *mut nv_ipc_t) -> c_int {
    with("nv_ipc_check_host_pinned_memory", ipc, -1, |backend| {
        if backend.is_locked() {
            return Ok(0);
        }
        let text =
            "the pools are not page-locked for a GPU; set cuda_device_id to its number (layout shmesh)";
        Err(Failure::Refused(text.into()))
    })
}
