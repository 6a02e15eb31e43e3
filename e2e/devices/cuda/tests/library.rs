//! The double by its C interface, in one process. What it does between processes is in the tests of the sidecar.

#![allow(unsafe_code, reason = "calls of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::process::Command;

use libloading::Library;
use shmesh_fake_cuda::library;

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

fn started() -> Library {
    // SAFETY: it is the double, whose constructors do nothing.
    let cuda = unsafe { Library::new(library()) }.unwrap();
    assert_eq!(call!(cuda.cuInit(0 => c_uint)), 0);
    let mut context = 0_usize;
    assert_eq!(call!(cuda.cuDevicePrimaryCtxRetain(&raw mut context => *mut usize, 0 => c_int)), 0);
    assert_eq!(call!(cuda.cuCtxSetCurrent(context => usize)), 0);
    cuda
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
fn nothing_works_before_it_is_started_and_without_a_context() {
    // SAFETY: as above.
    let cuda = unsafe { Library::new(library()) }.unwrap();
    let mut address = 0_u64;
    // Another test may have started it already; the context is each thread's own.
    assert!(matches!(call!(cuda.cuMemAlloc_v2(&raw mut address => *mut u64, 4 => usize)), 3 | 201));
    assert_eq!(call!(cuda.cuInit(1 => c_uint)), 1);
}

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
fn a_descriptor_is_the_memory() {
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
    // Nobody has it but the descriptor.
    let import = |fd: c_int| {
        let mut imported = 0_u64;
        let code = call!(cuda.cuMemImportFromShareableHandle(
            &raw mut imported => *mut u64, fd.cast_unsigned() as usize as *mut c_void => *mut c_void, 1 => c_uint
        ));
        (code, imported)
    };
    let (code, imported) = import(fd);
    assert_eq!(code, 0);
    assert_eq!(import(0).0, 1, "something else");
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
fn a_stream_waits_for_a_word() {
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

#[test]
fn the_cpu_cannot_read_device_memory() {
    let body = ["read_as_the_cpu", "--exact", "--ignored"];
    let status = Command::new(std::env::current_exe().unwrap()).args(body).status().unwrap();
    assert!(!status.success());
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGSEGV));
}

#[test]
#[ignore = "the body of another process"]
fn read_as_the_cpu() {
    let cuda = started();
    let handle = create(&cuda, BLOCK, 0).unwrap();
    let memory = map(&cuda, handle, BLOCK);
    allow(&cuda, memory, BLOCK, 3);
    // SAFETY: none: that it ends this process is what is tested.
    unsafe { (memory as *const u8).read_volatile() };
}
