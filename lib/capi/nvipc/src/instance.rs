//! The instances of this process.
//!
//! An instance is an entry of a table that is never freed. So a pointer is valid if it points to an entry, and a call on a
//! destroyed instance is detected, even while another thread destroys it.
//!
//! A call takes no lock of its instance: each thread keeps the state of the instances that it called last. An entry says
//! which state is the current one, by a number that is never used twice. The state of a destroyed instance refuses every
//! call, and stays in memory until each thread that has it makes another call or ends.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::ops::Deref;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use shmesh_sys::cancel::Uncancelled;

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
    /// The number of the creation that `open` is of; 0 while the instance is not open.
    turn: AtomicUsize,
    /// Replaced as a whole.
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

/// Number of instances whose state a thread keeps.
const KEPT: usize = 8;

/// An instance, the number of its creation, and its state.
type CalledInstance = Option<(&'static Instance, usize, Arc<OpenInstance>)>;

thread_local! {
    /// The instances that this thread called last, each at its [`kept_at`].
    static CALLED: [RefCell<CalledInstance>; KEPT] = const { [const { RefCell::new(None) }; KEPT] };
}

/// Where a thread keeps the instance that is at this address.
fn kept_at(ipc: *const nv_ipc_t) -> usize {
    // Entries are adjacent, and about as long as this.
    (ipc.addr() >> size_of::<Instance>().ilog2()) % KEPT
}

/// The result of a search for the instance that a pointer names.
pub(crate) enum Lookup<'a> {
    Open(&'a OpenInstance),
    Destroyed,
    /// The pointer does not point to an instance.
    Unknown,
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
    taken: [Option<(String, usize)>; MAX_INSTANCES],
    turns: usize,
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
            turn: AtomicUsize::new(0),
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

    /// Runs `act` with the state of the instance that `ipc` points to. If another thread destroys the instance meanwhile, the
    /// backend refuses what `act` has not begun.
    #[inline(always)]
    pub(crate) fn call<T>(ipc: *const nv_ipc_t, act: impl FnOnce(Lookup<'_>) -> T) -> T {
        let mut act = Some(act);
        let done = CALLED.try_with(|called| {
            let kept = called[kept_at(ipc)].try_borrow().ok()?;
            let (instance, turn, open) = kept.as_ref()?;
            let is_current = std::ptr::eq(*instance, ipc.cast()) && instance.turn.load(Acquire) == *turn;
            act.take_if(|_| is_current).map(|act| act(Lookup::Open(open)))
        });
        match (done, act) {
            (Ok(Some(done)), _) => done,
            (_, Some(act)) => Self::first_call(ipc, act),
            (_, None) => unreachable!("`act` has run, and `done` has what it returned"),
        }
    }

    /// Whether the instance, which this thread has called before, is open and has no message. `false` says nothing.
    #[inline(always)]
    pub(crate) fn is_known_empty(ipc: *const nv_ipc_t) -> bool {
        let is_empty = CALLED.try_with(|called| {
            let Ok(kept) = called[kept_at(ipc)].try_borrow() else { return false };
            let Some((instance, turn, open)) = kept.as_ref() else { return false };
            let is_empty = std::ptr::eq(*instance, ipc.cast())
                && instance.turn.load(Acquire) == *turn
                && open.backend.is_known_empty();
            if is_empty {
                open.idle.found_nothing();
            }
            is_empty
        });
        is_empty.unwrap_or(false)
    }

    /// As [`call`](Self::call), for the first call of a thread, or a call that fails.
    #[cold]
    fn first_call<T>(ipc: *const nv_ipc_t, act: impl FnOnce(Lookup<'_>) -> T) -> T {
        let Some(instance) = Self::of(ipc) else { return act(Lookup::Unknown) };
        // The end of a state that was kept closes files, where a thread could be cancelled.
        let uncancelled = Uncancelled::new();
        let (turn, open) = {
            let open = instance.open();
            // Changed only with the lock held.
            (instance.turn.load(Acquire), open.as_ref().map(Arc::clone))
        };
        let Some(open) = open else { return act(Lookup::Destroyed) };
        if open.backend.may_linger() {
            instance.keep(Some((instance, turn, Arc::clone(&open))));
        }
        drop(uncancelled);
        act(Lookup::Open(&open))
    }

    /// Makes this thread keep the state of this instance, or nothing in its place.
    fn keep(&self, kept: CalledInstance) {
        // What was kept before is dropped last: the end of a link takes long.
        let before = CALLED.try_with(|called| {
            let mut place = called[kept_at(std::ptr::from_ref(self).cast())].try_borrow_mut().ok()?;
            Some(std::mem::replace(&mut *place, kept))
        });
        drop(before);
    }

    /// Closes the instance. Returns `false` if it was not open.
    pub(crate) fn close(&self) -> bool {
        let mut place = self.open.write().unwrap_or_else(PoisonError::into_inner);
        self.turn.store(0, Release);
        let open = place.take();
        drop(place);
        let Some(open) = open else { return false };
        self.keep(None);
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
    let mut place = instance.open.write().unwrap_or_else(PoisonError::into_inner);
    *place = Some(Arc::new(OpenInstance { backend, forward, idle: IdleCalls::new() }));
    instance.turn.store(turn, Release);
    drop(place);
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
