//! Buffers on the heap, identified by address like a link's.
// UNSAFETY: copies bytes between datagrams and buffers. A buffer is private memory of this process; `held` records which
// part of the program may access it, and each function names the call of the application that it belongs to.
#![expect(unsafe_code, reason = "buffers are named by address")]

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use shmesh::config::{PoolConfig, PoolId};

use crate::held::HeldBuffers;
use crate::{Error, Result};

/// A heap-allocated pool of one endpoint.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) id: PoolId,
    pub(super) config: PoolConfig,
    base: NonNull<u8>,
    layout: Layout,
    free: Mutex<Vec<u32>>,
    held: HeldBuffers,
}

// SAFETY: `base` is plain memory without thread affinity. Only the holder of a buffer accesses its bytes.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    pub(super) fn new(id: PoolId, config: PoolConfig) -> Result<Self> {
        let too_large =
            || Error::Udp { why: "a pool exceeds the available memory; lower its pool_len or buf_size" };
        let bytes = usize::try_from(config.payload_bytes()).map_err(|_| too_large())?;
        let layout = Layout::array::<u8>(bytes).ok().filter(|layout| layout.size() > 0);
        let layout = layout.ok_or_else(too_large)?;
        // Zeroed, because C programs may send bytes that they have not written. Zeroing is left to the system, which
        // provides a page on first access: most buffers are never accessed.
        // SAFETY: the layout has more than 0 bytes.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(too_large)?;
        Ok(Self {
            id,
            config,
            base,
            layout,
            free: Mutex::new((0..config.pool_len).rev().collect()),
            held: HeldBuffers::new(config.pool_len as usize),
        })
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a buffer, the last used one first.
    pub(super) fn take(&self) -> Result<u32> {
        let index = self.free().pop();
        let index = index.ok_or(Error::Empty { pool: self.id, len: self.config.pool_len })?;
        self.held.take(index);
        Ok(index)
    }

    /// Returns a buffer. Returns `false` if it was not held.
    pub(super) fn give(&self, index: u32) -> bool {
        let given = self.held.give(index);
        if given {
            self.free().push(index);
        }
        given
    }

    pub(super) fn address(&self, index: u32) -> *mut u8 {
        self.base.as_ptr().wrapping_add(index as usize * self.config.buf_size_bytes as usize)
    }

    pub(super) fn index(&self, address: *const u8) -> Option<u32> {
        let offset = address.addr().checked_sub(self.base.addr().get())?;
        let index = u32::try_from(offset / self.config.buf_size_bytes as usize).ok()?;
        (index < self.config.pool_len).then_some(index)
    }

    pub(super) fn held_index(&self, address: *const u8) -> Result<u32> {
        let held = self.index(address).filter(|index| self.held.has(*index));
        held.ok_or(Error::NotHeld { address: address.addr(), pool: self.id })
    }

    pub(super) fn checked_len(&self, part: &'static str, len: i32) -> Result<u32> {
        let max = self.config.buf_size_bytes;
        let fits = u32::try_from(len).ok().filter(|len| *len <= max);
        fits.ok_or(Error::Length { part, len: len.into(), pool: self.id, max })
    }

    /// Copies bytes into a buffer that the assembler holds, as many as fit.
    pub(super) fn write(&self, index: u32, offset: usize, bytes: &[u8]) {
        let room = (self.config.buf_size_bytes as usize).saturating_sub(offset);
        let bytes = &bytes[..bytes.len().min(room)];
        // SAFETY: inside the buffer, which the assembler holds and has not delivered yet.
        unsafe {
            self.address(index).wrapping_add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    /// Copies bytes out of a buffer that is being sent, as many as there are.
    pub(super) fn read(&self, index: u32, offset: usize, to: &mut [u8]) {
        let there = (self.config.buf_size_bytes as usize).saturating_sub(offset).min(to.len());
        // SAFETY: inside the buffer, which its holder has handed over with `send`.
        unsafe { self.address(index).wrapping_add(offset).copy_to_nonoverlapping(to.as_mut_ptr(), there) };
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}
