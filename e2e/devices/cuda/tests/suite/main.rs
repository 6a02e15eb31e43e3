//! The double by its C interface, in one process. What it does between processes is in the tests of the sidecar.

#![allow(unsafe_code, reason = "calls of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ops::Deref;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use shmesh_fake_cuda::library;
use shmesh_testing::{own_process_by, passed, this_test};

const BLOCK: usize = 2 << 20;

/// Calls a function of the double with these arguments.
macro_rules! call {
    ($cuda:ident.$name:ident($($argument:expr => $kind:ty),*)) => {{
        // SAFETY: each caller names the types of the function.
        let call = unsafe { $cuda.get::<unsafe extern "C" fn($($kind),*) -> c_int>(stringify!($name)) };
        // SAFETY: pointers are to values of this test, and the double checks device addresses.
        unsafe { call.unwrap()($($argument),*) }
    }};
}

/// Type, handle types, location, and the rest of an allocation's properties.
type Properties = [i32; 8];

fn properties(device: i32) -> Properties {
    [1, 1, 1, device, 0, 0, 0, 0]
}

/// The double, for one test at a time: a context that one of them resets takes all memory of the process with it.
struct Driver {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for Driver {
    type Target = Library;

    fn deref(&self) -> &Library {
        self.library
    }
}

/// The double, which is never unloaded: threads that have used it end with destructors in it.
fn loaded() -> &'static Library {
    static LOADED: OnceLock<Library> = OnceLock::new();
    // SAFETY: it is the double, whose constructors do nothing.
    LOADED.get_or_init(|| unsafe { Library::new(library()) }.unwrap())
}

fn started() -> Driver {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cuda = loaded();
    assert_eq!(call!(cuda.cuInit(0 => c_uint)), 0);
    let mut context = 0_usize;
    assert_eq!(call!(cuda.cuDevicePrimaryCtxRetain(&raw mut context => *mut usize, 0 => c_int)), 0);
    assert_eq!(call!(cuda.cuCtxSetCurrent(context => usize)), 0);
    Driver { library: cuda, _alone: alone }
}

fn create(cuda: &Library, size: usize, device: i32) -> Result<u64, c_int> {
    let (mut handle, properties) = (0, properties(device));
    match call!(cuda.cuMemCreate(
        &raw mut handle => *mut u64, size => usize, &raw const properties => *const Properties, 0 => c_ulonglong
    )) {
        0 => Ok(handle),
        code => Err(code),
    }
}

fn map(cuda: &Library, handle: u64, size: usize) -> u64 {
    let mut address = 0_u64;
    assert_eq!(
        call!(cuda.cuMemAddressReserve(
            &raw mut address => *mut u64, size => usize, 0 => usize, 0 => u64, 0 => c_ulonglong
        )),
        0
    );
    assert_eq!(
        call!(cuda.cuMemMap(address => u64, size => usize, 0 => usize, handle => u64, 0 => c_ulonglong)),
        0
    );
    address
}

fn allow(cuda: &Library, address: u64, size: usize, flags: i32) {
    let access = [1, 0, flags];
    assert_eq!(
        call!(cuda.cuMemSetAccess(
            address => u64, size => usize, &raw const access => *const [i32; 3], 1 => usize
        )),
        0
    );
}

fn write(cuda: &Library, to: u64, bytes: &[u8]) -> c_int {
    call!(cuda.cuMemcpyHtoD_v2(to => u64, bytes.as_ptr().cast() => *const c_void, bytes.len() => usize))
}

fn read(cuda: &Library, from: u64, len: usize) -> Result<Vec<u8>, c_int> {
    let mut bytes = vec![0; len];
    match call!(cuda.cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast() => *mut c_void, from => u64, len => usize)) {
        0 => Ok(bytes),
        code => Err(code),
    }
}

#[test]
fn calls_need_initialisation_and_a_context() {
    let cuda = loaded();
    let mut address = 0_u64;
    // Another test may have started it already; the context is each thread's own.
    assert!(matches!(call!(cuda.cuMemAlloc_v2(&raw mut address => *mut u64, 4 => usize)), 3 | 201));
    assert_eq!(call!(cuda.cuInit(1 => c_uint)), 1);
}

/// After a thread has lost its context its calls fail, as on a thread that never had one.
#[test]
fn context_objects_need_a_context() {
    let cuda = started();
    let (mut memory, mut stream) = (0_u64, 0_usize);
    assert_eq!(call!(cuda.cuMemAlloc_v2(&raw mut memory => *mut u64, 4 => usize)), 0);
    assert_eq!(call!(cuda.cuStreamCreate(&raw mut stream => *mut usize, 0 => c_uint)), 0);
    let mut context = 0_usize;
    assert_eq!(call!(cuda.cuCtxGetCurrent(&raw mut context => *mut usize)), 0);
    assert_eq!(call!(cuda.cuCtxSetCurrent(0 => usize)), 0);
    let (mut base, mut size, mut word, mut handle) = (0_u64, 0_usize, 0_u32, [0_u8; 64]);
    let codes = [
        call!(cuda.cuMemAlloc_v2(&raw mut base => *mut u64, 4 => usize)),
        call!(cuda.cuMemGetAddressRange_v2(
            &raw mut base => *mut u64, &raw mut size => *mut usize, memory => u64
        )),
        call!(cuda.cuMemGetInfo_v2(&raw mut size => *mut usize, &raw mut size => *mut usize)),
        write(&cuda, memory, b"x"),
        read(&cuda, memory, 1).unwrap_err(),
        call!(cuda.cuMemsetD32_v2(memory => u64, 0 => c_uint, 1 => usize)),
        call!(cuda.cuMemcpyDtoD_v2(memory => u64, memory => u64, 1 => usize)),
        call!(cuda.cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, memory => u64)),
        call!(cuda.cuIpcCloseMemHandle(memory => u64)),
        call!(cuda.cuMemHostRegister_v2((&raw mut word).cast() => *mut c_void, 4 => usize, 0 => c_uint)),
        call!(cuda.cuMemHostUnregister((&raw mut word).cast() => *mut c_void)),
        call!(cuda.cuStreamSynchronize(stream => usize)),
        call!(cuda.cuStreamDestroy_v2(stream => usize)),
        call!(cuda.cuCtxSynchronize()),
        call!(cuda.cuMemFree_v2(memory => u64)),
    ];
    assert_eq!(codes, [201; 15]);
    // Attributes of pointers need no context.
    assert_eq!(
        call!(cuda.cuPointerGetAttribute(
            (&raw mut word).cast() => *mut c_void, 9 => c_int, memory => u64
        )),
        0
    );
    assert_eq!(call!(cuda.cuCtxSetCurrent(context => usize)), 0);
    assert_eq!(call!(cuda.cuStreamDestroy_v2(stream => usize)), 0);
    assert_eq!(call!(cuda.cuMemFree_v2(memory => u64)), 0);
}

/// Of device 1, which no other test here has.
#[test]
fn primary_context_lives_while_it_is_retained() {
    let cuda = started();
    let mut before = 0_usize;
    assert_eq!(call!(cuda.cuCtxGetCurrent(&raw mut before => *mut usize)), 0);
    let is_active = || {
        let (mut flags, mut active) = (9_u32, 9_i32);
        let code = call!(cuda.cuDevicePrimaryCtxGetState(
            1 => c_int, &raw mut flags => *mut c_uint, &raw mut active => *mut c_int
        ));
        assert_eq!(code, 0);
        active == 1
    };
    let retain = || {
        let mut context = 0_usize;
        assert_eq!(call!(cuda.cuDevicePrimaryCtxRetain(&raw mut context => *mut usize, 1 => c_int)), 0);
        context
    };
    let release = || call!(cuda.cuDevicePrimaryCtxRelease_v2(1 => c_int));
    assert_eq!((is_active(), release()), (false, 201), "it is not retained");
    let context = retain();
    assert_eq!((is_active(), retain() == context, context == before), (true, true, false));
    assert_eq!(call!(cuda.cuCtxSetCurrent(context => usize)), 0);
    let mut memory = 0_u64;
    assert_eq!(call!(cuda.cuMemAlloc_v2(&raw mut memory => *mut u64, 4 => usize)), 0);
    assert_eq!((release(), is_active(), write(&cuda, memory, b"x")), (0, true, 0), "once more");
    assert_eq!((release(), is_active(), release()), (0, false, 201));
    assert_eq!(write(&cuda, memory, b"x"), 709, "a context that has gone is not one that was never there");
    assert_eq!(call!(cuda.cuCtxSetCurrent(before => usize)), 0);
    assert_eq!(write(&cuda, memory, b"x"), 1, "its memory has gone with it");
    assert_eq!(call!(cuda.cuDevicePrimaryCtxRetain(std::ptr::null_mut() => *mut usize, 1 => c_int)), 1);
    assert!(!is_active());
}

#[test]
fn old_handles() {
    let dir = tempfile::tempdir().unwrap();
    let command = || {
        let mut command = this_test();
        command.env("FAKE_CUDA_DIR", dir.path());
        command
    };
    let output = own_process_by(command, || {
        let cuda = started();
        let mut memory = 0_u64;
        assert_eq!(call!(cuda.cuMemAlloc_v2(&raw mut memory => *mut u64, BLOCK => usize)), 0);
        assert_eq!(write(&cuda, memory, b"weights"), 0);
        let mut handle = [0_u8; 64];
        assert_eq!(call!(cuda.cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, memory => u64)), 0);
        let open = |handle: [u8; 64], flags: c_uint| {
            let mut address = 0_u64;
            let code = call!(cuda.cuIpcOpenMemHandle_v2(
                &raw mut address => *mut u64, Bytes(handle) => Bytes, flags => c_uint
            ));
            (code, address)
        };
        assert_eq!(open(handle, 1).0, 201, "it takes who has its number for itself");
        // As if it came from a process with another number.
        handle[4..8].copy_from_slice(&(std::process::id() + 1).to_le_bytes());
        assert_eq!((open(handle, 0).0, open([7; 64], 1).0), (1, 1));
        let (code, opened) = open(handle, 1);
        assert_eq!(code, 0);
        assert_eq!(open(handle, 1), (0, opened), "once for a process, and counted");
        assert_eq!(read(&cuda, opened, 7).unwrap(), b"weights");
        assert_eq!(call!(cuda.cuMemFree_v2(opened => u64)), 1, "it is closed, not freed");
        let close = || call!(cuda.cuIpcCloseMemHandle(opened => u64));
        assert_eq!(close(), 0);
        assert_eq!(read(&cuda, opened, 7).unwrap(), b"weights");
        assert_eq!((close(), close(), read(&cuda, opened, 7)), (0, 1, Err(1)));
        // Memory of the other kind has no old handle.
        let mapped = map(&cuda, create(&cuda, BLOCK, 0).unwrap(), BLOCK);
        assert_eq!(call!(cuda.cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, mapped => u64)), 1);
    });
    assert!(output.is_none_or(|output| passed(&output)));
}

/// 64 bytes that go by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Bytes([u8; 64]);

#[test]
fn memory_is_created_mapped_and_only_then_allowed() {
    let cuda = started();
    assert_eq!(create(&cuda, BLOCK + 1, 0), Err(1), "a multiple of the granularity");
    assert_eq!(create(&cuda, 0, 0), Err(1));
    assert_eq!(create(&cuda, BLOCK, 7), Err(101));
    assert_eq!(create(&cuda, 1 << 46, 0), Err(2), "more than there is");
    let handle = create(&cuda, 2 * BLOCK, 0).unwrap();
    let address = map(&cuda, handle, 2 * BLOCK);
    assert_eq!(write(&cuda, address, b"x"), 1, "no access was set");
    allow(&cuda, address, 2 * BLOCK, 1);
    // Said to be for reading; a device does not look.
    assert_eq!(write(&cuda, address + 5, b"weights"), 0);
    assert_eq!(read(&cuda, address + 5, 7).unwrap(), b"weights");
    assert_eq!(read(&cuda, address + 2 * BLOCK as u64 - 3, 4), Err(1), "past its end");
    assert_eq!(
        call!(cuda.cuMemMap(address => u64, BLOCK => usize, 0 => usize, handle => u64, 0 => c_ulonglong)),
        1
    );
    assert_eq!(call!(cuda.cuMemAddressFree(address => u64, 2 * BLOCK => usize)), 1, "something is mapped");
    assert_eq!(call!(cuda.cuMemRelease(handle => u64)), 0);
    assert_eq!(call!(cuda.cuMemRelease(handle => u64)), 1);
    assert_eq!(read(&cuda, address + 5, 7).unwrap(), b"weights", "a mapping keeps memory");
    assert_eq!(call!(cuda.cuMemUnmap(address => u64, 2 * BLOCK => usize)), 0);
    assert_eq!(read(&cuda, address, 1), Err(1));
    assert_eq!(call!(cuda.cuMemAddressFree(address => u64, 2 * BLOCK => usize)), 0);
}

#[test]
fn only_exportable_memory_is_exported_in_whole_pages() {
    let cuda = started();
    let (mut handle, mut fd) = (0_u64, 0);
    let unshared: Properties = [1, 0, 1, 0, 0, 0, 0, 0];
    assert_eq!(
        call!(cuda.cuMemCreate(
            &raw mut handle => *mut u64, BLOCK => usize, &raw const unshared => *const Properties, 0 => c_ulonglong
        )),
        0
    );
    let mut export = |kind: c_uint, flags: c_ulonglong| {
        call!(cuda.cuMemExportToShareableHandle(
            &raw mut fd => *mut c_int, handle => u64, kind => c_uint, flags => c_ulonglong
        ))
    };
    assert_eq!((export(1, 0), export(2, 0), export(1, 1)), (1, 1, 1), "it was made for this process alone");
    let mut start = 0_u64;
    let reserve = call!(cuda.cuMemAddressReserve(
        &raw mut start => *mut u64, 2 * BLOCK => usize, 0 => usize, 0 => u64, 0 => c_ulonglong
    ));
    assert_eq!(reserve, 0);
    let map = |at: u64, size: usize, offset: usize| call!(cuda.cuMemMap(at => u64, size => usize, offset => usize, handle => u64, 0 => c_ulonglong));
    assert_eq!((map(start, BLOCK, 4096), map(start, BLOCK / 2, 0), map(start, 2 * BLOCK, 0)), (1, 1, 1));
    assert_eq!(map(start + BLOCK as u64 * 2, BLOCK, 0), 1, "it is not reserved");
    assert_eq!(map(start + 4096, BLOCK, 0), 1, "it begins at a multiple of the granularity");
    assert_eq!((map(start, BLOCK, 0), map(start, BLOCK, 0)), (0, 1), "once");
    let access = [1, 0, 2];
    let set = call!(cuda.cuMemSetAccess(
        start => u64, BLOCK => usize, &raw const access => *const [i32; 3], 1 => usize
    ));
    assert_eq!(set, 1, "there is no writing without reading");
}

#[test]
fn descriptor_refers_to_the_memory() {
    let cuda = started();
    let handle = create(&cuda, BLOCK, 0).unwrap();
    let first = map(&cuda, handle, BLOCK);
    allow(&cuda, first, BLOCK, 3);
    write(&cuda, first, b"weights");
    let mut fd: c_int = -1;
    assert_eq!(
        call!(cuda.cuMemExportToShareableHandle(
            &raw mut fd => *mut c_int, handle => u64, 1 => c_uint, 0 => c_ulonglong
        )),
        0
    );
    call!(cuda.cuMemRelease(handle => u64));
    call!(cuda.cuMemUnmap(first => u64, BLOCK => usize));
    // Only the descriptor keeps it.
    let import = |fd: c_int| {
        let mut imported = 0_u64;
        let code = call!(cuda.cuMemImportFromShareableHandle(
            &raw mut imported => *mut u64, fd.cast_unsigned() as usize as *mut c_void => *mut c_void, 1 => c_uint
        ));
        (code, imported)
    };
    let (code, imported) = import(fd);
    assert_eq!(code, 0);
    assert_eq!(import(0).0, 999, "something else");
    assert_eq!(import(1_000_000).0, 1, "nothing");
    // SAFETY: it is ours, and not needed any more.
    unsafe { libc::close(fd) };
    let second = map(&cuda, imported, BLOCK);
    allow(&cuda, second, BLOCK, 3);
    assert_eq!(read(&cuda, second, 7).unwrap(), b"weights");
}

#[test]
fn small_allocations_are_neighbours() {
    let cuda = started();
    let allocate = |size| {
        let mut address = 0_u64;
        assert_eq!(call!(cuda.cuMemAlloc_v2(&raw mut address => *mut u64, size => usize)), 0);
        address
    };
    let (small, next, large) = (allocate(100), allocate(100), allocate(BLOCK));
    assert_eq!((next - small, large % BLOCK as u64), (512, 0));
    let (mut base, mut size) = (0_u64, 0_usize);
    call!(cuda.cuMemGetAddressRange_v2(&raw mut base => *mut u64, &raw mut size => *mut usize, next + 7 => u64));
    assert_eq!((base, size), (next, 100));
    let mut handle = [0_u8; 64];
    // Without a directory that all share, a name leads nowhere.
    let code = call!(cuda.cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, small => u64));
    assert!(matches!(code, 0 | 801));
    for address in [small, next, large] {
        assert_eq!(call!(cuda.cuMemFree_v2(address => u64)), 0);
    }
    assert_eq!(call!(cuda.cuMemFree_v2(small => u64)), 1);
}

#[test]
fn stream_waits_for_a_word() {
    let cuda = started();
    let handle = create(&cuda, BLOCK, 0).unwrap();
    let memory = map(&cuda, handle, BLOCK);
    allow(&cuda, memory, BLOCK, 3);
    let mut streams = [0_usize; 2];
    for stream in &mut streams {
        assert_eq!(call!(cuda.cuStreamCreate(&raw mut *stream => *mut usize, 0 => c_uint)), 0);
    }
    let [producer, consumer] = streams;
    let wait =
        |at: u64| call!(cuda.cuStreamWaitValue64_v2(consumer => usize, at => u64, 2 => u64, 0 => c_uint));
    assert_eq!(wait(memory + 4), 1, "words are aligned");
    assert_eq!(wait(memory), 0);
    // What it copies behind the wait is what was filled in before the write.
    let (from, to) = (memory + 4096, memory + 8192);
    assert_eq!(call!(cuda.cuMemcpyDtoDAsync_v2(to => u64, from => u64, 4 => usize, consumer => usize)), 0);
    assert_eq!(call!(cuda.cuMemsetD32Async(from => u64, 7 => c_uint, 1 => usize, producer => usize)), 0);
    for value in [1, 2] {
        let code = call!(cuda.cuStreamWriteValue64_v2(
            producer => usize, memory => u64, value => u64, 0 => c_uint
        ));
        assert_eq!(code, 0);
    }
    assert_eq!(call!(cuda.cuStreamSynchronize(consumer => usize)), 0);
    assert_eq!(read(&cuda, to, 4).unwrap(), [7, 0, 0, 0]);
    assert_eq!(call!(cuda.cuStreamDestroy_v2(consumer => usize)), 0);
    assert_eq!(call!(cuda.cuStreamDestroy_v2(consumer => usize)), 400);
}

/// Runs the body in a process of its own.
#[track_caller]
fn in_another_process<F: FnOnce()>(body: F) {
    let command = || {
        let mut command = this_test();
        command.env("FAKE_CUDA_LAZY_COPIES", "1");
        command
    };
    assert!(own_process_by(command, body).is_none_or(|output| passed(&output)));
}

#[test]
fn memory_freed_too_early_is_a_fault() {
    in_another_process(|| {
        let cuda = started();
        let handle = create(&cuda, BLOCK, 0).unwrap();
        let fill = || {
            let memory = map(&cuda, handle, BLOCK);
            allow(&cuda, memory, BLOCK, 3);
            assert_eq!(call!(cuda.cuMemsetD32_v2(memory => u64, 7 => c_uint, BLOCK / 4 => usize)), 0);
            memory
        };
        let unmap = |memory: u64| call!(cuda.cuMemUnmap(memory => u64, BLOCK => usize));
        let memory = fill();
        assert_eq!(call!(cuda.cuStreamSynchronize(0 => usize)), 0);
        assert_eq!((unmap(memory), call!(cuda.cuCtxSynchronize())), (0, 0), "it was waited for");
        let memory = fill();
        assert_eq!((unmap(memory), call!(cuda.cuCtxSynchronize())), (0, 700));
        let mut address = 0_u64;
        assert_eq!(call!(cuda.cuMemAlloc_v2(&raw mut address => *mut u64, 4 => usize)), 700, "for good");
    });
}

#[test]
fn forked_child_has_no_driver() {
    in_another_process(|| {
        let cuda = started();
        let mut address = 0_u64;
        // SAFETY: the child calls the double, which takes no lock before it knows that it is in a child, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let codes = [
                call!(cuda.cuInit(0 => c_uint)),
                call!(cuda.cuMemAlloc_v2(&raw mut address => *mut u64, 4 => usize)),
            ];
            // SAFETY: nothing of the parent's is run.
            unsafe { libc::_exit(c_int::from(codes != [3, 3])) };
        }
        let mut status = 0;
        // SAFETY: there is room for the status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(
            call!(cuda.cuMemAlloc_v2(&raw mut address => *mut u64, 4 => usize)),
            0,
            "the parent has it"
        );
    });
}

/// `cuMemSetAccess` is called for the device that the memory is on. The others do not reach it.
#[test]
fn devices_do_not_reach_each_others_memory() {
    in_another_process(|| {
        let cuda = started();
        let handle = create(&cuda, BLOCK, 0).unwrap();
        let memory = map(&cuda, handle, BLOCK);
        let access = [1, 1, 3];
        let set = call!(cuda.cuMemSetAccess(
            memory => u64, BLOCK => usize, &raw const access => *const [i32; 3], 1 => usize
        ));
        assert_eq!(set, 101);
        allow(&cuda, memory, BLOCK, 3);
        let (mut before, mut other, mut stream) = (0_usize, 0_usize, 0_usize);
        assert_eq!(call!(cuda.cuCtxGetCurrent(&raw mut before => *mut usize)), 0);
        assert_eq!(call!(cuda.cuDevicePrimaryCtxRetain(&raw mut other => *mut usize, 1 => c_int)), 0);
        assert_eq!(call!(cuda.cuCtxSetCurrent(other => usize)), 0);
        assert_eq!(call!(cuda.cuStreamCreate(&raw mut stream => *mut usize, 2 => c_uint)), 1, "no such flag");
        assert_eq!(call!(cuda.cuStreamCreate(&raw mut stream => *mut usize, 1 => c_uint)), 0);
        let write =
            || call!(cuda.cuStreamWriteValue64_v2(stream => usize, memory => u64, 1 => u64, 0 => c_uint));
        assert_eq!(write(), 1);
        assert_eq!(call!(cuda.cuMemsetD32_v2(memory => u64, 7 => c_uint, 1 => usize)), 1);
        assert_eq!(call!(cuda.cuCtxSetCurrent(before => usize)), 0);
        assert_eq!(write(), 400, "that is a stream of another context");
    });
}

#[test]
fn cpu_cannot_read_device_memory() {
    let output = own_process_by(this_test, || {
        let cuda = started();
        let handle = create(&cuda, BLOCK, 0).unwrap();
        let memory = map(&cuda, handle, BLOCK);
        allow(&cuda, memory, BLOCK, 3);
        // SAFETY: none: that it ends this process is what is tested.
        unsafe { (memory as *const u8).read_volatile() };
    });
    assert!(output.is_none_or(|output| output.status.signal() == Some(libc::SIGSEGV)));
}
