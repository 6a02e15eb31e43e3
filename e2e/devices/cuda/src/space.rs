//! The address space of this process: handles, reserved addresses and mappings.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::physical::{Alias, Physical};
use crate::{Outcome, code};

/// How memory came to its address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Origin {
    /// `cuMemMap`.
    Mapped,
    /// `cuMemAlloc`: this many bytes at this offset of a block.
    Allocated,
    /// `cuIpcOpenMemHandle`, so many times.
    Opened(u64),
}

/// Device memory at an address.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) size: u64,
    pub(crate) physical: Arc<Physical>,
    pub(crate) alias: Arc<Alias>,
    /// Where in the memory it begins.
    pub(crate) offset: u64,
    pub(crate) origin: Origin,
    /// Whether `cuMemSetAccess` let this process in. How it let it in is never looked at, as a device does not.
    pub(crate) access: bool,
    /// The key under which an old handle opened it, or was made.
    pub(crate) name: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) handles: HashMap<u64, (Arc<Physical>, u64)>,
    last_handle: u64,
    pub(crate) reserved: BTreeMap<u64, u64>,
    pub(crate) spans: BTreeMap<u64, Span>,
    /// Blocks of 2 MiB that small allocations come from: address, memory, alias, bytes in use.
    pub(crate) blocks: Vec<Block>,
    /// Host memory that is page-locked.
    pub(crate) locked: BTreeMap<u64, u64>,
    /// Files behind old handles, by their names.
    pub(crate) named: HashMap<u64, File>,
}

/// A block that `cuMemAlloc` cuts up.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) base: u64,
    pub(crate) physical: Arc<Physical>,
    pub(crate) alias: Arc<Alias>,
    pub(crate) used: u64,
}

static SPACE: Mutex<Option<Space>> = Mutex::new(None);

/// Does something with what the process has.
pub(crate) fn with<T>(act: impl FnOnce(&mut Space) -> T) -> T {
    let mut space: MutexGuard<'_, _> = SPACE.lock().unwrap_or_else(PoisonError::into_inner);
    act(space.get_or_insert_with(Space::default))
}

impl Space {
    pub(crate) fn add_handle(&mut self, physical: Arc<Physical>) -> u64 {
        self.last_handle += 1;
        let handle = self.last_handle << 12 | 0xca;
        self.handles.insert(handle, (physical, 1));
        handle
    }

    pub(crate) fn handle(&self, handle: u64) -> Outcome<&Arc<Physical>> {
        self.handles.get(&handle).map(|(physical, _)| physical).ok_or(code::INVALID_VALUE)
    }

    /// The memory at an address, and where it begins.
    pub(crate) fn span(&self, address: u64) -> Outcome<(u64, &Span)> {
        let (base, span) = self.spans.range(..=address).next_back().ok_or(code::INVALID_VALUE)?;
        if address - base >= span.size {
            return Err(code::INVALID_VALUE);
        }
        Ok((*base, span))
    }

    /// Addresses of a device's memory that came there in such a way.
    pub(crate) fn all_of(&self, uuid: &[u8; 16], is_such: impl Fn(Origin) -> bool) -> Vec<u64> {
        let such = self.spans.iter().filter(|(_, span)| span.physical.uuid == *uuid && is_such(span.origin));
        such.map(|(address, _)| *address).collect()
    }

    /// Where a copy finds `len` bytes of device memory. They may not run over the end of what is mapped.
    pub(crate) fn bytes(&self, address: u64, len: usize) -> Outcome<(*mut u8, Arc<Alias>)> {
        let (base, span) = self.span(address)?;
        let inside = address - base;
        if !span.access || inside.checked_add(len as u64).is_none_or(|end| end > span.size) {
            return Err(code::INVALID_VALUE);
        }
        Ok((span.alias.at(span.offset + inside, len)?, Arc::clone(&span.alias)))
    }
}

impl Space {
    /// Whether a device reaches `len` bytes. What was mapped is reached by its own device alone: `cuMemSetAccess` was called
    /// for no other.
    pub(crate) fn reached(&self, uuid: &[u8; 16], address: u64, len: usize) -> Outcome {
        self.bytes(address, len)?;
        let (_, span) = self.span(address)?;
        if span.origin == Origin::Mapped && span.physical.uuid != *uuid {
            return Err(code::INVALID_VALUE);
        }
        Ok(())
    }
}

/// Addresses that the CPU cannot read, at a multiple of `alignment`.
pub(crate) fn reserve(size: u64, alignment: u64) -> Outcome<u64> {
    let whole = size.checked_add(alignment).and_then(|whole| usize::try_from(whole).ok());
    let whole = whole.ok_or(code::OUT_OF_MEMORY)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, wherever there is room.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(code::OUT_OF_MEMORY);
    }
    let start = start as u64;
    let base = start.next_multiple_of(alignment);
    release(start, base - start);
    release(base + size, start + whole as u64 - base - size);
    Ok(base)
}

/// Frees reserved addresses again.
pub(crate) fn release(base: u64, size: u64) {
    if let Ok(len) = usize::try_from(size)
        && len > 0
    {
        // SAFETY: callers give back what `reserve` gave, or an unused part of it.
        unsafe { libc::munmap(base as *mut libc::c_void, len) };
    }
}

/// An allocation's device ordinal, as pointer attributes and properties tell it.
pub(crate) fn ordinal_of(physical: &Physical) -> Outcome<c_int> {
    physical.ordinal()
}
