//! Device memory in this process: a memfd that is mapped twice, once as addresses that the CPU cannot read, and once where
//! copies find it.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::code;
use crate::wire::KEY_BYTES;

/// The size that memory is rounded to, and the alignment of exported memory.
pub(crate) const PAGE: u64 = 2 << 20;

/// Device memory at an address.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) memory: OwnedFd,
    pub(crate) len: usize,
    pub(crate) alias: usize,
    pub(crate) device: i32,
    pub(crate) is_imported: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) spans: BTreeMap<u64, Span>,
    /// Imported memory by its key: the address, and the number of imports.
    pub(crate) imports: HashMap<[u8; KEY_BYTES], (u64, u64)>,
    /// The address of exported memory by its key.
    pub(crate) exports: HashMap<[u8; KEY_BYTES], u64>,
}

static SPACE: Mutex<Option<Space>> = Mutex::new(None);

pub(crate) fn with<T>(act: impl FnOnce(&mut Space) -> T) -> T {
    let mut space: MutexGuard<'_, _> = SPACE.lock().unwrap_or_else(PoisonError::into_inner);
    act(space.get_or_insert_with(Space::default))
}

fn map(at: usize, len: usize, rights: i32, fd: i32, offset: u64) -> Result<usize, i32> {
    let mut flags = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
    if at != 0 {
        flags |= libc::MAP_FIXED;
    }
    let offset = offset.try_into().map_err(|_| code::DRIVER)?;
    // SAFETY: a new mapping where there is room, or in the place of one of this module's own.
    let start = unsafe { libc::mmap(at as *mut libc::c_void, len, rights, flags, fd, offset) };
    if start == libc::MAP_FAILED { Err(code::OUT_OF_MEMORY) } else { Ok(start as usize) }
}

fn unmap(at: usize, len: usize) {
    // SAFETY: it is a mapping of this module that is not used any more.
    unsafe { libc::munmap(at as *mut libc::c_void, len) };
}

pub(crate) fn new_memory(len: usize) -> Result<OwnedFd, i32> {
    // SAFETY: the name ends with a zero.
    let fd = unsafe { libc::memfd_create(c"fake-npu".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(code::OUT_OF_MEMORY);
    }
    // SAFETY: it is new and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::off_t::try_from(len).map_err(|_| code::OUT_OF_MEMORY)?;
    // SAFETY: the descriptor is open.
    if unsafe { libc::posix_fallocate(fd.as_raw_fd(), 0, len) } != 0 {
        return Err(code::OUT_OF_MEMORY);
    }
    Ok(fd)
}

impl Space {
    pub(crate) fn add(
        &mut self,
        memory: OwnedFd,
        offset: u64,
        len: usize,
        device: i32,
        is_imported: bool,
    ) -> Result<u64, i32> {
        let alias = map(0, len, libc::PROT_READ | libc::PROT_WRITE, memory.as_raw_fd(), offset)?;
        let page = usize::try_from(PAGE).map_err(|_| code::DRIVER)?;
        let start = map(0, len + page, libc::PROT_NONE, -1, 0)?;
        let address = start.next_multiple_of(page);
        unmap_if_any(start, address - start);
        unmap_if_any(address + len, start + page - address);
        self.spans.insert(address as u64, Span { memory, len, alias, device, is_imported });
        Ok(address as u64)
    }

    pub(crate) fn remove(&mut self, address: u64) -> Result<Span, i32> {
        let span = self.spans.remove(&address).ok_or(code::DRIVER)?;
        unmap(span.alias, span.len);
        unmap(usize::try_from(address).map_err(|_| code::DRIVER)?, span.len);
        Ok(span)
    }

    /// The memory that an address lies in.
    pub(crate) fn span(&self, address: u64) -> Option<(u64, &Span)> {
        let (base, span) = self.spans.range(..=address).next_back()?;
        (address - base < span.len as u64).then_some((*base, span))
    }

    /// Where copies find `len` bytes.
    pub(crate) fn bytes(&self, address: u64, len: usize) -> Option<*mut u8> {
        let (base, span) = self.span(address)?;
        let inside = usize::try_from(address - base).ok()?;
        let fits = inside.checked_add(len).is_some_and(|end| end <= span.len);
        fits.then(|| (span.alias + inside) as *mut u8)
    }

    /// Gives the exporter memory of its own with the same bytes, at the same address: only importers lose theirs.
    pub(crate) fn part_from_importers(&mut self, address: u64) -> Result<(), i32> {
        let span = self.spans.get_mut(&address).ok_or(code::DRIVER)?;
        let memory = new_memory(span.len)?;
        let copy = map(0, span.len, libc::PROT_READ | libc::PROT_WRITE, memory.as_raw_fd(), 0)?;
        // SAFETY: both are mappings of this many bytes.
        unsafe { std::ptr::copy_nonoverlapping(span.alias as *const u8, copy as *mut u8, span.len) };
        unmap(copy, span.len);
        map(span.alias, span.len, libc::PROT_READ | libc::PROT_WRITE, memory.as_raw_fd(), 0)?;
        span.memory = memory;
        Ok(())
    }
}

fn unmap_if_any(at: usize, len: usize) {
    if len > 0 {
        unmap(at, len);
    }
}
