//! The old handles: 64 bytes that refer to memory, for every process that has them. They open the whole block, with its neighbours.

use std::ffi::{c_int, c_uint};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;

use crate::physical::{Physical, shared_dir};
use crate::space::{self, Origin, Space, Span};
use crate::{Outcome, code, device, done, put};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag.
const LAZY: c_uint = 1;
const MAGIC: [u8; 4] = *b"FIPC";

/// A handle is data, and goes by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Handle([u8; 64]);

fn path_of(name: u64) -> Outcome<PathBuf> {
    // Without a directory that all share there is no way to find memory by a name.
    Ok(shared_dir().ok_or(code::NOT_SUPPORTED)?.join(format!("handle-{name:016x}")))
}

fn number(handle: &Handle, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&handle.0[at..at + 8]);
    u64::from_le_bytes(bytes)
}

pub(crate) fn unpublish(space: &mut Space, name: u64) {
    space.named.remove(&name);
    if let Ok(path) = path_of(name) {
        let _ = std::fs::remove_file(path);
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(out: *mut Handle, address: u64) -> c_int {
    let make = || {
        device::current()?;
        space::with(|space| {
            let (base, span) = space.span(address)?;
            if span.origin != Origin::Allocated {
                return Err(code::INVALID_VALUE);
            }
            let (physical, offset, size) = (Arc::clone(&span.physical), span.offset, span.size);
            let name = span.name.unwrap_or_else(|| RandomState::new().hash_one(base));
            if span.name.is_none() {
                publish(&physical, name)?;
                space.named.insert(name, physical.file.try_clone().map_err(|_| code::OUT_OF_MEMORY)?);
                if let Some(span) = space.spans.get_mut(&base) {
                    span.name = Some(name);
                }
            }
            let mut bytes = [0; 64];
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4..8].copy_from_slice(&std::process::id().to_le_bytes());
            bytes[8..16].copy_from_slice(&name.to_le_bytes());
            bytes[16..24].copy_from_slice(&offset.to_le_bytes());
            bytes[24..32].copy_from_slice(&size.to_le_bytes());
            Ok(Handle(bytes))
        })
    };
    put(out, make())
}

fn publish(physical: &Physical, name: u64) -> Outcome {
    use std::os::fd::AsRawFd;
    let from = std::ffi::CString::new(format!("/proc/self/fd/{}", physical.file.as_raw_fd()));
    let path = path_of(name)?;
    let to = std::ffi::CString::new(path.into_os_string().into_encoded_bytes());
    let (Ok(from), Ok(to)) = (from, to) else { return Err(code::INVALID_VALUE) };
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both paths end with a zero.
    let linked = unsafe { libc::linkat(here, from.as_ptr(), here, to.as_ptr(), follow) };
    if linked == 0 { Ok(()) } else { Err(code::NOT_SUPPORTED) }
}

/// A process takes another with its own number for itself, whatever namespace that is from.
#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(out: *mut u64, handle: Handle, flags: c_uint) -> c_int {
    let open = || {
        device::current()?;
        if flags != LAZY || handle.0[..4] != MAGIC {
            return Err(code::INVALID_VALUE);
        }
        if handle.0[4..8] == std::process::id().to_le_bytes() {
            return Err(code::INVALID_CONTEXT);
        }
        let (name, offset, size) = (number(&handle, 8), number(&handle, 16), number(&handle, 24));
        space::with(|space| {
            let known = space.spans.iter_mut().find(|(_, span)| {
                span.name == Some(name) && span.offset == offset && matches!(span.origin, Origin::Opened(_))
            });
            if let Some((address, span)) = known {
                if let Origin::Opened(times) = &mut span.origin {
                    *times += 1;
                }
                return Ok(*address);
            }
            let file = File::options().read(true).write(true).open(path_of(name)?);
            let physical = Arc::new(Physical::of(file.map_err(|_| code::INVALID_VALUE)?)?);
            let alias = Arc::new(physical.alias()?);
            let base = space::reserve(physical.size, crate::physical::GRANULARITY)?;
            let mut span = Span {
                size,
                physical,
                alias,
                offset,
                origin: Origin::Opened(1),
                access: true,
                name: Some(name),
            };
            // The neighbours come along: an opened handle reaches the whole block.
            span.size = span.physical.size - offset;
            space.spans.insert(base + offset, span);
            Ok(base + offset)
        })
    };
    put(out, open())
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    done(device::current().and_then(|_| space::with(|space| close(space, address))))
}

fn close(space: &mut Space, address: u64) -> Outcome {
    let span = space.spans.get_mut(&address).ok_or(code::INVALID_VALUE)?;
    match &mut span.origin {
        Origin::Opened(times) if *times > 1 => *times -= 1,
        Origin::Opened(_) => {
            let (offset, size) = (span.offset, span.physical.size);
            space.spans.remove(&address);
            space::release(address - offset, size);
        }
        _ => return Err(code::INVALID_VALUE),
    }
    Ok(())
}

/// The context of a device ends, and what was opened in it.
pub(crate) fn close_all(space: &mut Space, uuid: &[u8; 16]) {
    for address in space.all_of(uuid, |origin| matches!(origin, Origin::Opened(_))) {
        while space.spans.contains_key(&address) && close(space, address).is_ok() {}
    }
}
