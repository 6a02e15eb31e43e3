//! The instances of this process.
//!
//! An instance is an entry of a table that is never freed. So a pointer is valid if it points to an entry, and a call on a
//! destroyed instance is detected, even while another thread destroys it.

use std::ffi::{CStr, c_char};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use crate::backend::Backend;
use crate::guard::guarded;
use crate::idle::IdleCalls;
use crate::log::say;
use crate::tap::{BYTES_MAX, Forward};
use crate::types::{nv_ipc_config_t, nv_ipc_t};

/// Maximum number of instances in one process.
pub(crate) const MAX_INSTANCES: usize = 64;

/// One entry of the table.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Instance {
    /// The first field, so that its address is the instance's.
    api: nv_ipc_t,
    /// Read by every call, and replaced as a whole.
    open: RwLock<Option<Arc<OpenInstance>>>,
    /// The primary's configuration. Written while the entry is free; the application may change it later.
    config: ConfigCell,
}

/// The state of an open instance: its transport, and the tap.
#[derive(Debug)]
pub(crate) struct OpenInstance {
    backend: Arc<dyn Backend>,
    pub(crate) forward: Forward,
    pub(crate) idle: IdleCalls,
}

impl OpenInstance {
    /// The transport, for use beyond one call.
    pub(crate) fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend)
    }
}

impl Deref for OpenInstance {
    type Target = dyn Backend;

    #[inline]
    fn deref(&self) -> &(dyn Backend + 'static) {
        &*self.backend
    }
}

/// The configuration, whose address the application may ask for.
#[derive(Debug)]
#[repr(transparent)]
struct ConfigCell(std::cell::UnsafeCell<nv_ipc_config_t>);

// SAFETY: this library writes it only in `open`, before any caller has the address of the entry. It reads filters in it
// only when the application, which writes them, starts the tap.
unsafe impl Sync for ConfigCell {}

/// Which entries of the table are in use.
#[derive(Debug)]
struct Register {
    /// For each entry, the name and the sequence number of its creation.
    taken: [Option<(String, u64)>; MAX_INSTANCES],
    turns: u64,
    /// Where to look for a free entry. The entry that was freed last is reused last, so that stale pointers are detected.
    next: usize,
}

static REGISTER: Mutex<Register> =
    Mutex::new(Register { taken: [const { None }; MAX_INSTANCES], turns: 0, next: 0 });

fn register() -> MutexGuard<'static, Register> {
    REGISTER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The table, which is made for the first instance.
static PLACES: OnceLock<Box<[Instance]>> = OnceLock::new();

fn places() -> &'static [Instance] {
    PLACES.get().map_or(&[], |places| places)
}

fn places_for(api: &nv_ipc_t) -> &'static [Instance] {
    PLACES.get_or_init(|| {
        let place = |_| Instance {
            api: *api,
            open: RwLock::new(None),
            config: ConfigCell(std::cell::UnsafeCell::new(nv_ipc_config_t::zeroed())),
        };
        (0..MAX_INSTANCES).map(place).collect()
    })
}

impl Instance {
    /// The entry that `ipc` points to; `None` if it is not one.
    pub(crate) fn of(ipc: *const nv_ipc_t) -> Option<&'static Self> {
        let places = places();
        let offset = ipc.addr().checked_sub(places.as_ptr().addr())?;
        if !offset.is_multiple_of(size_of::<Self>()) {
            return None;
        }
        places.get(offset / size_of::<Self>())
    }

    #[inline]
    pub(crate) fn open(&self) -> RwLockReadGuard<'_, Option<Arc<OpenInstance>>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the instance. Returns `false` if it was not open.
    pub(crate) fn close(&self) -> bool {
        let open = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(open) = open else { return false };
        // Without the lock: detaching from a link takes long, and peers may have to be notified.
        open.forward.close();
        open.close();
        drop(open);
        let mut register = register();
        let place = self.place();
        if let Some(taken) = register.taken.get_mut(place) {
            *taken = None;
        }
        register.next = (place + 1) % MAX_INSTANCES;
        true
    }

    /// Whether `so` returns true for any open instance.
    pub(crate) fn any(mut so: impl FnMut(&dyn Backend) -> bool) -> bool {
        places().iter().any(|place| place.open().as_deref().is_some_and(|open| so(&**open)))
    }

    fn place(&self) -> usize {
        (std::ptr::from_ref(self).addr() - places().as_ptr().addr()) / size_of::<Self>()
    }

    /// The name of the link; `None` once the instance is destroyed.
    pub(crate) fn name(&self) -> Option<String> {
        register().taken.get(self.place())?.as_ref().map(|(name, _)| name.clone())
    }

    pub(crate) fn config(&self) -> *mut nv_ipc_config_t {
        self.config.0.get()
    }

    /// The pointer comes from the table, so that the application may write where it is allowed to.
    fn handle(&'static self) -> *mut nv_ipc_t {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

/// Stores a backend in a free entry. `api` has the functions of an instance, the same for all.
pub(crate) fn open(
    api: &nv_ipc_t,
    backend: Arc<dyn Backend>,
    name: &str,
    config: &nv_ipc_config_t,
) -> *mut nv_ipc_t {
    let mut register = register();
    let start = register.next;
    let free = (0..MAX_INSTANCES).map(|i| (start + i) % MAX_INSTANCES).find(|&i| register.taken[i].is_none());
    let Some(place) = free else {
        drop(register);
        say!(
            "link {name}: this process has {MAX_INSTANCES} instances, which is the limit; destroy one first"
        );
        backend.close();
        return std::ptr::null_mut();
    };
    register.turns += 1;
    let turn = register.turns;
    register.taken[place] = Some((name.to_owned(), turn));
    let instance = &places_for(api)[place];
    // SAFETY: the entry is free, so no caller has its address since it was destroyed.
    unsafe { instance.config().write(*config) };
    let forward = Forward::new(BYTES_MAX);
    if backend.can_copy() {
        forward.start_as_configured(&config.debug_configs);
    }
    *instance.open.write().unwrap_or_else(PoisonError::into_inner) =
        Some(Arc::new(OpenInstance { backend, forward, idle: IdleCalls::default() }));
    instance.handle()
}

/// Returns the instance with this name, or with NULL the instance that was created first. Returns NULL if there is none.
///
/// # Safety
/// `prefix` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nv_ipc_get_instance(prefix: *const c_char) -> *mut nv_ipc_t {
    guarded("nv_ipc_get_instance", std::ptr::null_mut(), || {
        let wanted = if prefix.is_null() {
            None
        } else {
            // SAFETY: guaranteed by the caller.
            Some(unsafe { CStr::from_ptr(prefix) })
        };
        let register = register();
        let oldest = register
            .taken
            .iter()
            .enumerate()
            .filter_map(|(place, taken)| taken.as_ref().map(|(name, turn)| (turn, place, name)))
            .filter(|(_, _, name)| wanted.is_none_or(|wanted| wanted.to_bytes() == name.as_bytes()))
            .min();
        match oldest {
            Some((_, place, _)) => places()[place].handle(),
            None => {
                let name = wanted.map_or("any name".into(), |name| name.to_string_lossy());
                say!("nv_ipc_get_instance: no instance has the name {name}; create it first");
                std::ptr::null_mut()
            }
        }
    })
}
