//! Handles: numbers in the form of pointers, made of the index of a slot in a table and the generation of its value.
//!
//! A handle is never dereferenced, and slots are never freed, so any bits can be looked up: a closed handle, a handle of
//! another process and garbage are refused. Entering a handle costs one atomic exchange.

use std::cell::{RefCell, UnsafeCell};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use shmesh_sys::fork;

static NO_FORK: Mutex<()> = Mutex::new(());

thread_local! {
    static FORKING: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Delays forks of this process. Taken before each change of a table that all threads share: otherwise a child could inherit
/// a lock that is held by a thread of its parent.
pub(crate) fn no_fork() -> MutexGuard<'static, ()> {
    static IS_WATCHED: AtomicBool = AtomicBool::new(false);
    if cfg!(not(miri)) && !IS_WATCHED.swap(true, Ordering::Relaxed) {
        fork::around(before_fork, after_fork);
    }
    NO_FORK.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    // A thread that is ending cannot store the guard. It forks without the lock.
    let _ = FORKING.try_with(|held| {
        *held.borrow_mut() = Some(NO_FORK.lock().unwrap_or_else(PoisonError::into_inner));
    });
}

extern "C" fn after_fork() {
    let _ = FORKING.try_with(|held| held.take());
}

/// The tag of handles. No address of a process has this bit, so no pointer of the application looks like a handle.
const TAG: usize = 1 << 63;
const INDEX_BITS: u32 = 20;
const GENERATION_BITS: u32 = 63 - INDEX_BITS;

/// Number of slots in the first chunk. Each further chunk has twice as many as the one before it.
const FIRST_CHUNK: usize = 64;
const CHUNKS: usize = 14;
const _: () = assert!(FIRST_CHUNK << CHUNKS <= 1 << INDEX_BITS && usize::BITS == 64);

/// States of a slot, below the generation in its word.
const VACANT: usize = 0;
const IDLE: usize = 1;
const BUSY: usize = 2;
const STATE_BITS: u32 = 2;

/// Why [`HandleTable::enter`] refused a handle.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum EnterError {
    /// The handle was removed, or was never valid.
    Ended,
    /// Another thread is in a call with the handle.
    Busy,
}

/// A slot of the table, on cache lines of its own: other threads use its neighbours.
#[repr(align(128))]
struct HandleSlot<T> {
    /// `| generation 43 | state 2 |`. The generation grows by one each time a value is removed.
    word: AtomicUsize,
    /// Readable without entering. Interned, so the pointer is never freed.
    name: AtomicPtr<c_char>,
    /// Owned by the thread that set the state to `BUSY`, or, while `VACANT`, by the thread that took the index from the free list.
    value: UnsafeCell<Option<T>>,
}

/// The values behind the handles.
pub(crate) struct HandleTable<T> {
    chunks: [OnceLock<Box<[HandleSlot<T>]>>; CHUNKS],
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    indices: Vec<usize>,
    /// Index of the first slot that was never used.
    unused: usize,
}

// SAFETY: the state of a slot gives its value to one thread at a time, and Acquire and Release order those.
unsafe impl<T: Send> Sync for HandleTable<T> {}

impl<T> HandleTable<T> {
    pub(crate) const fn new() -> Self {
        Self {
            chunks: [const { OnceLock::new() }; CHUNKS],
            free: Mutex::new(Free { indices: Vec::new(), unused: 0 }),
        }
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        // Each change is one step.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline(always)]
    fn position(index: usize) -> (usize, usize) {
        let shifted = index + FIRST_CHUNK;
        let chunk = (shifted / FIRST_CHUNK).ilog2() as usize;
        (chunk, shifted - (FIRST_CHUNK << chunk))
    }

    /// The slot of a handle, its index, and the generation of the handle.
    #[inline(always)]
    fn slot(&self, handle: *const ()) -> Option<(&HandleSlot<T>, usize, usize)> {
        let bits = handle.addr();
        let index = bits & ((1 << INDEX_BITS) - 1);
        let (chunk, offset) = Self::position(index);
        let slot = self.chunks.get(chunk)?.get()?.get(offset)?;
        (bits & TAG != 0).then_some((slot, index, (bits & !TAG) >> INDEX_BITS))
    }

    /// Stores a value and returns its handle. Returns the value if the table is full.
    pub(crate) fn insert(&self, name: &'static CStr, value: T) -> Result<*mut (), T> {
        let no_fork = no_fork();
        let index = {
            let mut free = self.free();
            match free.indices.pop() {
                Some(index) => index,
                None if free.unused < FIRST_CHUNK * ((1 << CHUNKS) - 1) => {
                    free.unused += 1;
                    free.unused - 1
                }
                None => return Err(value),
            }
        };
        let (chunk, offset) = Self::position(index);
        let vacant = || HandleSlot {
            word: AtomicUsize::new(VACANT),
            name: AtomicPtr::new(std::ptr::null_mut()),
            value: UnsafeCell::new(None),
        };
        let chunk = self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| vacant()).collect());
        drop(no_fork);
        let slot = &chunk[offset];
        // SAFETY: the slot is vacant and its index was in the free list, from which this thread took it.
        unsafe { *slot.value.get() = Some(value) };
        let generation = slot.word.load(Ordering::Relaxed) >> STATE_BITS;
        slot.name.store(name.as_ptr().cast_mut(), Ordering::Relaxed);
        // Release pairs with the Acquire of `enter`: the thread that enters sees the value.
        slot.word.store(generation << STATE_BITS | IDLE, Ordering::Release);
        Ok(std::ptr::without_provenance_mut(TAG | generation << INDEX_BITS | index))
    }

    /// Gives this thread exclusive access to the value of a handle, until the guard is dropped.
    #[inline(always)]
    pub(crate) fn enter(&self, handle: *const ()) -> Result<HandleGuard<'_, T>, EnterError> {
        let Some((slot, index, generation)) = self.slot(handle) else { return Err(EnterError::Ended) };
        let (idle, busy) = (generation << STATE_BITS | IDLE, generation << STATE_BITS | BUSY);
        // Acquire pairs with the Release of the guard's drop: a handle may move from thread to thread.
        let entered = slot.word.compare_exchange(idle, busy, Ordering::Acquire, Ordering::Relaxed);
        match entered {
            // SAFETY: the state is now BUSY, and this thread made it so.
            Ok(_) => match unsafe { (*slot.value.get()).as_mut() } {
                Some(value) => {
                    Ok(HandleGuard { table: self, slot, index, idle, value: NonNull::from(value) })
                }
                None => Err(EnterError::Ended),
            },
            Err(now) if now == busy => Err(EnterError::Busy),
            Err(_) => Err(EnterError::Ended),
        }
    }

    /// The name of a handle, also while another thread is in a call with it. NULL if the handle has ended.
    pub(crate) fn name(&self, handle: *const ()) -> *const c_char {
        let Some((slot, _, generation)) = self.slot(handle) else { return std::ptr::null() };
        let lives = || {
            let word = slot.word.load(Ordering::Acquire);
            word >> STATE_BITS == generation && word & ((1 << STATE_BITS) - 1) != VACANT
        };
        let before = lives();
        // Acquire: the second check of the word comes after it.
        let name = slot.name.load(Ordering::Acquire);
        if before && lives() { name } else { std::ptr::null() }
    }
}

/// Exclusive access to the value of a handle, until dropped.
pub(crate) struct HandleGuard<'a, T> {
    table: &'a HandleTable<T>,
    slot: &'a HandleSlot<T>,
    index: usize,
    idle: usize,
    value: NonNull<T>,
}

impl<T> HandleGuard<'_, T> {
    /// Removes the value and ends the handle.
    pub(crate) fn remove(self) -> Option<T> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: the state is still BUSY, so the value is this thread's, and nothing borrows it from `self`.
        let value = unsafe { (*this.slot.value.get()).take() };
        let generation = (this.idle >> STATE_BITS) + 1;
        // Release pairs with the lock of the free list for the next one, and with `name`.
        this.slot.word.store(generation << STATE_BITS | VACANT, Ordering::Release);
        // A slot without unused generations is not used again.
        if generation >> GENERATION_BITS == 0 {
            let _no_fork = no_fork();
            this.table.free().indices.push(this.index);
        }
        value
    }
}

impl<T> Deref for HandleGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the state is BUSY, so the value is there and this thread's; the guard is borrowed as long as the value.
        unsafe { self.value.as_ref() }
    }
}

impl<T> DerefMut for HandleGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed exclusively.
        unsafe { self.value.as_mut() }
    }
}

impl<T> Drop for HandleGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.slot.word.store(self.idle, Ordering::Release);
    }
}

impl<T> fmt::Debug for HandleTable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("free", &self.free).finish_non_exhaustive()
    }
}

impl<T: fmt::Debug> fmt::Debug for HandleGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Interns a string that is never freed, because C may keep the pointer longer than the handle. Equal strings share one.
pub(crate) fn interned(text: &str) -> &'static CStr {
    static TEXTS: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    // Names of links hold no NUL.
    let text = CString::new(text).unwrap_or_default();
    let _no_fork = no_fork();
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    match texts.get(text.as_c_str()) {
        Some(known) => known,
        None => {
            let text: &'static CStr = Box::leak(text.into_boxed_c_str());
            texts.insert(text);
            text
        }
    }
}
