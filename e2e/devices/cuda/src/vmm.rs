//! Virtual memory management: physical memory and address ranges are created separately, and joined by mapping.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;

use crate::physical::{GRANULARITY, Physical};
use crate::space::{self, Origin, Span};
use crate::{Outcome, code, device, done, put, stream};

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_LOCATION_TYPE_DEVICE`.
const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: c_int = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Location {
    kind: c_int,
    id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: usize,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Access {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Access>() == 12);

/// Reads the structure behind a caller's pointer.
fn read<T: Copy>(from: *const T) -> Outcome<T> {
    if from.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: callers of the C interface pass a pointer to a `T`, and it is not null.
    Ok(unsafe { from.read_unaligned() })
}

fn checked(properties: *const Properties) -> Outcome<(Properties, [u8; 16])> {
    let wanted = read(properties)?;
    if wanted.kind != PINNED
        || wanted.location.kind != ON_DEVICE
        || !matches!(wanted.handle_types, 0 | POSIX_FD)
    {
        return Err(code::INVALID_VALUE);
    }
    Ok((wanted, device::uuid(wanted.location.id)?))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    out: *mut usize,
    properties: *const Properties,
    option: c_int,
) -> c_int {
    // The minimum and the recommended granularity, which are the same here.
    if !matches!(option, 0 | 1) {
        return code::INVALID_VALUE;
    }
    let granularity = usize::try_from(GRANULARITY).map_err(|_| code::INVALID_VALUE);
    put(out, checked(properties).and(granularity))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(
    out: *mut u64,
    size: usize,
    properties: *const Properties,
    flags: c_ulonglong,
) -> c_int {
    let make = || {
        let (wanted, uuid) = checked(properties)?;
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let physical = Physical::new(size as u64, uuid, wanted.handle_types == POSIX_FD)?;
        Ok(space::with(|space| space.add_handle(Arc::new(physical))))
    };
    put(out, make())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    done(space::with(|space| {
        let (_, references) = space.handles.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        *references -= 1;
        if *references == 0 {
            space.handles.remove(&handle);
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_int,
    handle: u64,
    kind: c_int,
    flags: c_ulonglong,
) -> c_int {
    let export = || {
        if kind != POSIX_FD || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let physical = space::with(|space| space.handle(handle).cloned())?;
        if !physical.exportable {
            return Err(code::INVALID_VALUE);
        }
        let fd = physical.file.try_clone().map_err(|_| code::OUT_OF_MEMORY)?;
        Ok(fd.into_raw_fd())
    };
    if out.is_null() { code::INVALID_VALUE } else { put(out, export()) }
}

/// Imports memory by a descriptor, which remains the caller's.
#[unsafe(no_mangle)]
extern "C" fn cuMemImportFromShareableHandle(out: *mut u64, fd: *mut c_void, kind: c_int) -> c_int {
    let import = || {
        device::started()?;
        let fd = c_int::try_from(fd as usize).map_err(|_| code::INVALID_VALUE)?;
        // SAFETY: the call only checks whether the descriptor is open.
        if kind != POSIX_FD || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: it is open, and the caller keeps it so for the time of the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let file = File::from(fd.try_clone_to_owned().map_err(|_| code::OUT_OF_MEMORY)?);
        // What NVIDIA's driver says of any other file.
        let physical = Physical::of(file)
            .map_err(|error| if error == code::INVALID_VALUE { code::UNKNOWN } else { error })?;
        Ok(space::with(|space| space.add_handle(Arc::new(physical))))
    };
    put(out, import())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(out: *mut Properties, handle: u64) -> c_int {
    let properties = || {
        let physical = space::with(|space| space.handle(handle).cloned())?;
        Ok(Properties {
            kind: PINNED,
            handle_types: if physical.exportable { POSIX_FD } else { 0 },
            location: Location { kind: ON_DEVICE, id: physical.ordinal()? },
            windows: 0,
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    };
    put(out, properties())
}

/// Returns the handle of the memory mapped at an address, with another reference to release.
#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) -> c_int {
    let retain = || {
        space::with(|space| {
            let (_, span) = space.span(address as u64)?;
            if span.origin != Origin::Mapped {
                return Err(code::INVALID_VALUE);
            }
            let physical = Arc::clone(&span.physical);
            let known =
                space.handles.iter_mut().find(|(_, (candidate, _))| Arc::ptr_eq(candidate, &physical));
            if let Some((handle, (_, references))) = known {
                *references += 1;
                return Ok(*handle);
            }
            Ok(space.add_handle(physical))
        })
    };
    put(out, retain())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(
    out: *mut u64,
    size: usize,
    alignment: usize,
    _address: u64,
    flags: c_ulonglong,
) -> c_int {
    let reserve = || {
        device::started()?;
        let (size, alignment) = (size as u64, (alignment as u64).max(GRANULARITY));
        if size == 0 || !size.is_multiple_of(GRANULARITY) || !alignment.is_power_of_two() || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let base = space::reserve(size, alignment)?;
        space::with(|space| space.reserved.insert(base, size));
        Ok(base)
    };
    put(out, reserve())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, size: usize) -> c_int {
    done(space::with(|space| {
        let size = size as u64;
        let is_mapped = space.spans.range(address..address.saturating_add(size)).next().is_some();
        if is_mapped || space.reserved.get(&address) != Some(&size) {
            return Err(code::INVALID_VALUE);
        }
        space.reserved.remove(&address);
        space::release(address, size);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) -> c_int {
    done(space::with(|space| {
        let size = size as u64;
        let physical = Arc::clone(space.handle(handle)?);
        let end = address.checked_add(size).ok_or(code::INVALID_VALUE)?;
        let is_reserved = space
            .reserved
            .range(..=address)
            .next_back()
            .is_some_and(|(base, reserved)| end <= base + reserved);
        let is_taken = space.span(address).is_ok() || space.spans.range(address..end).next().is_some();
        // The driver requires offset 0 and whole pages.
        let is_whole = size > 0 && (address | size).is_multiple_of(GRANULARITY) && size <= physical.size;
        if offset != 0 || flags != 0 || !is_whole || !is_reserved || is_taken {
            return Err(code::INVALID_VALUE);
        }
        let alias = Arc::new(physical.alias()?);
        let span =
            Span { size, physical, alias, offset: 0, origin: Origin::Mapped, access: false, name: None };
        space.spans.insert(address, span);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, size: usize) -> c_int {
    done(space::with(|space| {
        let is_mapping = |span: &Span| span.origin == Origin::Mapped && span.size == size as u64;
        if !space.spans.get(&address).is_some_and(is_mapping) {
            return Err(code::INVALID_VALUE);
        }
        stream::goes(address, size as u64);
        space.spans.remove(&address);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(address: u64, size: usize, access: *const Access, count: usize) -> c_int {
    let set = || {
        let wanted = read(access)?;
        // No access, reads, or reads and writes. A real device does not stop a reader from writing.
        if count != 1 || !matches!(wanted.flags, 0 | 1 | 3) || wanted.location.kind != ON_DEVICE {
            return Err(code::INVALID_VALUE);
        }
        let uuid = device::uuid(wanted.location.id)?;
        space::with(|space| {
            let span = space.spans.get_mut(&address).ok_or(code::INVALID_VALUE)?;
            if span.origin != Origin::Mapped || span.size != size as u64 {
                return Err(code::INVALID_VALUE);
            }
            // These devices cannot access each other's memory.
            if span.physical.uuid != uuid {
                return Err(code::INVALID_DEVICE);
            }
            span.access = wanted.flags != 0;
            Ok(())
        })
    };
    done(set())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: *mut c_void, size: usize, flags: c_uint) -> c_int {
    done(device::current().and_then(|_| {
        space::with(|space| {
            let (start, size) = (start as u64, size as u64);
            // Portable, mapped for the device, of another device, read-only.
            if start == 0 || size == 0 || flags > 0xf {
                return Err(code::INVALID_VALUE);
            }
            let overlaps = |(base, len): (&u64, &u64)| *base < start + size && start < base + len;
            if space.locked.iter().any(overlaps) {
                return Err(code::ALREADY_REGISTERED);
            }
            space.locked.insert(start, size);
            Ok(())
        })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: *mut c_void) -> c_int {
    let unlock =
        || space::with(|space| space.locked.remove(&(start as u64)).map(drop).ok_or(code::NOT_REGISTERED));
    done(device::current().and_then(|_| unlock()))
}
