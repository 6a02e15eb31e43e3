//! `cuMemAlloc`, which cuts small allocations out of blocks of 2 MiB; copies; and what a pointer is.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::physical::{GRANULARITY, Physical};
use crate::space::{self, Block, Origin, Space, Span};
use crate::{Outcome, code, device, done, put, stream};

/// The size that small allocations are rounded to.
const SMALL: u64 = 512;

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(out: *mut u64, size: usize) -> c_int {
    let allocate = || {
        let uuid = device::uuid(device::current()?)?;
        if size == 0 {
            return Err(code::INVALID_VALUE);
        }
        if size as u64 > 1 << 48 {
            return Err(code::OUT_OF_MEMORY);
        }
        let wanted = (size as u64).next_multiple_of(SMALL);
        space::with(|space| {
            let fits = |block: &&mut Block| {
                wanted < GRANULARITY && block.physical.uuid == uuid && block.used + wanted <= GRANULARITY
            };
            if space.blocks.iter_mut().find(fits).is_none() {
                let whole = wanted.next_multiple_of(GRANULARITY);
                let physical = Arc::new(Physical::new(whole, uuid, false)?);
                let alias = Arc::new(physical.alias()?);
                let base = space::reserve(whole, GRANULARITY)?;
                space.blocks.push(Block { base, physical, alias, used: 0 });
            }
            let block = if wanted < GRANULARITY {
                space.blocks.iter_mut().find(fits)
            } else {
                space.blocks.last_mut()
            };
            let block = block.ok_or(code::OUT_OF_MEMORY)?;
            let span = Span {
                size: size as u64,
                physical: Arc::clone(&block.physical),
                alias: Arc::clone(&block.alias),
                offset: block.used,
                origin: Origin::Allocated,
                access: true,
                name: None,
            };
            let address = block.base + block.used;
            block.used += wanted;
            space.spans.insert(address, span);
            Ok(address)
        })
    };
    put(out, allocate())
}

/// As the driver does, it waits for all that the device has to do.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    let free = || {
        stream::drain_all(device::current()?)?;
        space::with(|space| free(space, address))
    };
    done(free())
}

fn free(space: &mut Space, address: u64) -> Outcome {
    if !space.spans.get(&address).is_some_and(|span| span.origin == Origin::Allocated) {
        return Err(code::INVALID_VALUE);
    }
    let Some(span) = space.spans.remove(&address) else { return Err(code::INVALID_VALUE) };
    if let Some(name) = span.name {
        crate::ipc::unpublish(space, name);
    }
    let is_used = space.spans.values().any(|other| Arc::ptr_eq(&other.physical, &span.physical));
    if !is_used && let Some(at) = space.blocks.iter().position(|b| Arc::ptr_eq(&b.physical, &span.physical)) {
        let block = space.blocks.swap_remove(at);
        space::release(block.base, block.physical.size);
    }
    Ok(())
}

/// The context of a device ends, and what was allocated in it.
pub(crate) fn free_all(space: &mut Space, uuid: &[u8; 16]) {
    for address in space.all_of(uuid, |origin| origin == Origin::Allocated) {
        let _ = free(space, address);
    }
}

fn to_device(to: u64, from: *const c_void, len: usize) -> Outcome {
    stream::drain_default()?;
    let (target, _held) = space::with(|space| space.bytes(to, len))?;
    if from.is_null() {
        return Err(code::INVALID_VALUE);
    }
    if stream::is_lazy() {
        // SAFETY: the caller gives `len` bytes.
        let staged = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) }.to_vec();
        return stream::later(to, staged);
    }
    // SAFETY: the caller gives `len` bytes; the target lies in a mapping that is held here.
    unsafe { std::ptr::copy(from.cast(), target, len) };
    Ok(())
}

/// Writes staged bytes to their target.
pub(crate) fn arrive(to: u64, staged: &[u8]) -> Outcome {
    let (target, _held) = space::with(|space| space.bytes(to, staged.len()))?;
    // SAFETY: the target lies in a mapping that is held here.
    unsafe { std::ptr::copy(staged.as_ptr(), target, staged.len()) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> c_int {
    done(to_device(to, from, len))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> c_int {
    let copy = || {
        stream::drain_default()?;
        let (source, _held) = space::with(|space| space.bytes(from, len))?;
        if to.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller has room for `len` bytes; the source lies in a mapping that is held here.
        unsafe { std::ptr::copy(source.cast_const(), to.cast(), len) };
        Ok(())
    };
    done(copy())
}

pub(crate) fn on_device(to: u64, from: u64, len: usize) -> Outcome {
    let (target, _to) = space::with(|space| space.bytes(to, len))?;
    let (source, _from) = space::with(|space| space.bytes(from, len))?;
    // SAFETY: both lie in mappings that are held here.
    unsafe { std::ptr::copy(source.cast_const(), target, len) };
    Ok(())
}

/// It returns at once, as does the next.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) -> c_int {
    done(stream::copy(to, from, len))
}

pub(crate) fn fill(to: u64, value: c_uint, words: usize) -> Outcome {
    let len = words.checked_mul(4).ok_or(code::INVALID_VALUE)?;
    let (target, _held) = space::with(|space| space.bytes(to, len))?;
    for word in 0..words {
        // SAFETY: all words lie in a mapping that is held here.
        unsafe { target.wrapping_add(4 * word).cast::<c_uint>().write_unaligned(value) };
    }
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, words: usize) -> c_int {
    done(stream::fill(to, value, words))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) -> c_int {
    let range = device::current()
        .and_then(|_| space::with(|space| space.span(address).map(|(base, span)| (base, span.size))));
    if !base.is_null() {
        let code = put(base, range.map(|(base, _)| base));
        if code != code::SUCCESS {
            return code;
        }
    }
    let size_of = |(_, size): (u64, u64)| usize::try_from(size).map_err(|_| code::INVALID_VALUE);
    if size.is_null() { done(range.map(drop)) } else { put(size, range.and_then(size_of)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(out: *mut c_void, attribute: c_int, address: u64) -> c_int {
    let found = space::with(|space| {
        let (_, span) = space.span(address)?;
        Ok((space::ordinal_of(&span.physical)?, span.origin))
    });
    match attribute {
        // The kind of memory: a device's.
        2 => put(out.cast::<c_int>(), found.map(|_| 2)),
        // Its device.
        9 => put(out.cast::<c_int>(), found.map(|(ordinal, _)| ordinal)),
        // Whether an old handle can be made of it.
        10 => put(out.cast::<c_int>(), found.map(|(_, origin)| c_int::from(origin == Origin::Allocated))),
        _ => code::NOT_SUPPORTED,
    }
}
