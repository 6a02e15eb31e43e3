//! The double by its C interface, in one process: what the library checks itself, and what a process may do with its own
//! keys. What processes may do with each other's is in the tests of the sidecar.

#![allow(unsafe_code, reason = "calls of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ffi::{c_char, c_int, c_void};
use std::os::unix::process::ExitStatusExt;
use std::process::Output;

use libloading::Library;
use shmesh_fake_ascend::{Npud, library};
use shmesh_testing::{own_process_by, passed, this_test};

const MIB: usize = 1 << 20;

struct Acl(Library);

impl Acl {
    fn load() -> Self {
        // SAFETY: it is the double, whose constructors do nothing.
        Self(unsafe { Library::new(library()) }.unwrap())
    }

    fn call<F: Copy>(&self, name: &str) -> F {
        // SAFETY: each caller names the type of the function.
        *unsafe { self.0.get::<F>(name) }.unwrap()
    }

    fn set_device(&self, device: i32) -> c_int {
        // SAFETY: it takes a number.
        unsafe { self.call::<unsafe extern "C" fn(i32) -> c_int>("aclrtSetDevice")(device) }
    }

    fn malloc(&self, size: usize) -> Result<*mut c_void, c_int> {
        let mut address = std::ptr::null_mut();
        let call: unsafe extern "C" fn(*mut *mut c_void, usize, c_int) -> c_int = self.call("aclrtMalloc");
        // SAFETY: there is room for the address.
        let code = unsafe { call(&raw mut address, size, 0) };
        if code == 0 { Ok(address) } else { Err(code) }
    }

    fn export(&self, address: *mut c_void, size: usize, len: usize, flags: u64) -> Result<[u8; 65], c_int> {
        let mut key = [0; 65];
        let call: unsafe extern "C" fn(*mut c_void, usize, *mut c_char, usize, u64) -> c_int =
            self.call("aclrtIpcMemGetExportKey");
        // SAFETY: there is room for the key.
        let code = unsafe { call(address, size, key.as_mut_ptr().cast(), len, flags) };
        if code == 0 { Ok(key) } else { Err(code) }
    }

    fn admit(&self, key: &[u8; 65], pids: &mut [i32]) -> c_int {
        let call: unsafe extern "C" fn(*const c_char, *mut i32, usize) -> c_int =
            self.call("aclrtIpcMemSetImportPid");
        // SAFETY: the key ends with a zero, and there are so many numbers.
        unsafe { call(key.as_ptr().cast(), pids.as_mut_ptr(), pids.len()) }
    }

    fn import(&self, key: &[u8; 65], flags: u64) -> Result<*mut c_void, c_int> {
        let mut address = std::ptr::null_mut();
        let call: unsafe extern "C" fn(*mut *mut c_void, *const c_char, u64) -> c_int =
            self.call("aclrtIpcMemImportByKey");
        // SAFETY: there is room for the address, and the key ends with a zero.
        let code = unsafe { call(&raw mut address, key.as_ptr().cast(), flags) };
        if code == 0 { Ok(address) } else { Err(code) }
    }

    fn close(&self, key: &[u8; 65]) -> c_int {
        let call: unsafe extern "C" fn(*const c_char) -> c_int = self.call("aclrtIpcMemClose");
        // SAFETY: the key ends with a zero.
        unsafe { call(key.as_ptr().cast()) }
    }

    fn free(&self, address: *mut c_void) -> c_int {
        // SAFETY: the double checks it.
        unsafe { self.call::<unsafe extern "C" fn(*mut c_void) -> c_int>("aclrtFree")(address) }
    }

    fn copy(&self, to: *mut c_void, from: *const c_void, len: usize, kind: c_int) -> c_int {
        let call: unsafe extern "C" fn(*mut c_void, usize, *const c_void, usize, c_int) -> c_int =
            self.call("aclrtMemcpy");
        // SAFETY: callers give bytes for one side; the double checks the other.
        unsafe { call(to, len, from, len, kind) }
    }

    fn bare_tgid(&self) -> (c_int, i32) {
        let mut tgid = 0;
        let call: unsafe extern "C" fn(*mut i32) -> c_int = self.call("aclrtDeviceGetBareTgid");
        // SAFETY: there is room for the answer.
        (unsafe { call(&raw mut tgid) }, tgid)
    }
}

/// Runs the body in a process of its own, with a daemon here. Returns what became of it.
fn in_a_process_by<F: FnOnce()>(variables: &[(&str, &str)], body: F) -> Option<Output> {
    let mut daemon = None;
    let command = || {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("npud");
        let (_, npud) = daemon.insert((dir, Npud::start(&socket).unwrap()));
        assert_eq!(npud.count(), (0, 0));
        let mut command = this_test();
        command.env("FAKE_NPU_SOCK", &socket).envs(variables.iter().copied());
        command
    };
    let output = own_process_by(command, body);
    if let Some((_dir, daemon)) = daemon {
        let start = std::time::Instant::now();
        while daemon.count() != (0, 0) {
            assert!(start.elapsed().as_secs() < 60, "what a process leaves behind goes with it");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    output
}

#[track_caller]
fn in_a_process<F: FnOnce()>(variables: &[(&str, &str)], body: F) {
    assert!(in_a_process_by(variables, body).is_none_or(|output| passed(&output)));
}

#[test]
fn one_process() {
    in_a_process(&[("FAKE_NPU_DEVICES", "2")], || {
        let acl = Acl::load();
        assert_eq!(acl.malloc(1), Err(107_002));
        assert_eq!((acl.set_device(2), acl.set_device(-1), acl.set_device(0)), (107_001, 107_001, 0));
        assert_eq!(acl.bare_tgid(), (0, std::process::id().cast_signed()));

        assert_eq!(acl.malloc(1 << 46), Err(207_001), "more than there is");
        let memory = acl.malloc(3 * MIB).unwrap();
        assert_eq!(memory as usize % (2 * MIB), 0);
        assert_eq!(acl.export(memory, 4 * MIB, 64, 0), Err(107_000), "a key has 65 bytes");
        assert_eq!(acl.export(memory, 0, 65, 0), Err(107_000));
        assert_eq!(acl.export(memory, MIB, 65, 2), Err(107_000), "no such flag");
        assert_eq!(acl.export(memory.wrapping_byte_add(4096), MIB, 65, 0), Err(507_899), "not at a page");
        assert_eq!(acl.export(memory, 5 * MIB, 65, 0), Err(507_899), "longer than it is");
        assert_eq!(acl.export(std::ptr::null_mut(), MIB, 65, 0), Err(100_000));
        let on_the_stack = (&raw const memory).cast_mut().cast();
        assert_eq!(acl.export(on_the_stack, 8, 65, 0), Err(507_899), "memory of the host");

        let listed = acl.export(memory, 4 * MIB, 65, 0).unwrap();
        assert_eq!((listed[64], listed[..64].contains(&0)), (0, false), "64 characters and a zero");
        let me = std::process::id().cast_signed();
        assert_eq!(acl.admit(&listed, &mut [0; 32]), 107_000, "31 in one call");
        assert_eq!(acl.admit(&listed, &mut []), 107_000);
        assert_eq!(acl.admit(&listed, &mut [0, me]), 507_899, "no process is left");
        assert_eq!(acl.admit(&listed, &mut [1]), 0);
        assert_eq!(acl.import(&listed, 1), Err(507_899), "not on its list");
        // Each thread says which device it has.
        let number = memory as usize;
        let elsewhere = std::thread::scope(|threads| {
            let calls = || {
                let address = number as *mut c_void;
                [
                    acl.malloc(1).unwrap_err(),
                    acl.free(address),
                    acl.copy(address, address, 1, 3),
                    acl.export(address, MIB, 65, 0).unwrap_err(),
                    acl.admit(&listed, &mut [1]),
                    acl.import(&listed, 1).unwrap_err(),
                    acl.close(&listed),
                    acl.bare_tgid().0,
                ]
            };
            threads.spawn(calls).join().unwrap()
        });
        assert_eq!(elsewhere, [107_002; 8]);
        assert_eq!((acl.close(&listed), acl.close(&listed)), (0, 507_899));

        let open = acl.export(memory, 4 * MIB, 65, 1).unwrap();
        assert_eq!(acl.admit(&open, &mut [1]), 207_006, "it has no list");
        let imported = acl.import(&open, 1).unwrap();
        assert_eq!(acl.import(&open, 1), Ok(imported), "the library counts");
        assert_eq!(acl.import(&open, 2), Err(107_000), "no such flag");
        assert_eq!(acl.export(imported, MIB, 65, 0), Err(507_899), "memory of another process");
        let (mut here, there) = (*b"nothing", *b"weights");
        assert_eq!(acl.copy(memory, there.as_ptr().cast(), 7, 1), 0);
        assert_eq!(acl.copy(here.as_mut_ptr().cast(), imported, 7, 2), 0);
        assert_eq!(here, there);
        assert_eq!(acl.copy(here.as_mut_ptr().cast(), memory.wrapping_byte_add(4 * MIB - 6), 7, 2), 107_017);
        assert_eq!(acl.free(imported), 507_899, "imported memory is closed, not freed");
        assert_eq!(
            (acl.close(&open), acl.close(&open), acl.close(&open), acl.close(&open)),
            (0, 0, 0, 507_899)
        );

        // An exporter that ends its key keeps its memory.
        here.fill(0);
        assert_eq!(acl.copy(here.as_mut_ptr().cast(), memory, 7, 2), 0);
        assert_eq!(here, there);
        // From another device nothing comes to the host.
        acl.set_device(1);
        assert_eq!(acl.copy(here.as_mut_ptr().cast(), memory, 7, 2), 507_899);
        acl.set_device(0);
        // What is not closed goes with the process.
        acl.export(memory, MIB, 65, 0).unwrap();
    });
}

/// Null pointers and invalid keys are errors.
#[test]
fn pointers_and_keys() {
    in_a_process(&[], || {
        let acl = Acl::load();
        acl.set_device(0);
        let memory = acl.malloc(1).unwrap();
        let key = acl.export(memory, 1, 65, 0).unwrap();
        let call: unsafe extern "C" fn(*mut c_void, usize, *mut c_char, usize, u64) -> c_int =
            acl.call("aclrtIpcMemGetExportKey");
        // SAFETY: nothing is written to a null pointer.
        assert_eq!(unsafe { call(memory, 1, std::ptr::null_mut(), 65, 0) }, 100_000);
        let call: unsafe extern "C" fn(*const c_char, *mut i32, usize) -> c_int =
            acl.call("aclrtIpcMemSetImportPid");
        // SAFETY: as above.
        assert_eq!(unsafe { call(std::ptr::null(), [1].as_mut_ptr(), 1) }, 100_000);
        // SAFETY: as above.
        assert_eq!(unsafe { call(key.as_ptr().cast(), std::ptr::null_mut(), 1) }, 100_000);
        let call: unsafe extern "C" fn(*mut *mut c_void, *const c_char, u64) -> c_int =
            acl.call("aclrtIpcMemImportByKey");
        let mut out = std::ptr::null_mut();
        // SAFETY: as above.
        assert_eq!(unsafe { call(std::ptr::null_mut(), key.as_ptr().cast(), 0) }, 100_000);
        // SAFETY: as above.
        assert_eq!(unsafe { call(&raw mut out, std::ptr::null(), 0) }, 100_000);
        for call in ["aclrtIpcMemClose", "aclrtDeviceGetBareTgid", "aclrtGetDevice", "aclrtGetCurrentContext"]
        {
            let call: unsafe extern "C" fn(*mut c_void) -> c_int = acl.call(call);
            // SAFETY: as above.
            assert_eq!(unsafe { call(std::ptr::null_mut()) }, 100_000);
        }
        assert_eq!(acl.copy(std::ptr::null_mut(), memory, 1, 2), 100_000);

        // Too short, and unknown.
        assert_eq!((acl.import(&[0; 65], 0), acl.close(&[0; 65])), (Err(107_000), 107_000));
        assert_eq!(acl.admit(&[0; 65], &mut [1]), 107_000);
        let mut unknown = [b'0'; 65];
        unknown[64] = 0;
        assert_eq!((acl.import(&unknown, 0), acl.close(&unknown)), (Err(507_899), 507_899));
        assert_eq!(acl.admit(&unknown, &mut [1]), 507_899);
    });
}

#[test]
fn contexts_belong_to_threads() {
    in_a_process(&[("FAKE_NPU_DEVICES", "2")], || {
        let acl = Acl::load();
        let current = || {
            let mut context = 0_usize;
            let call: unsafe extern "C" fn(*mut usize) -> c_int = acl.call("aclrtGetCurrentContext");
            // SAFETY: there is room for the address.
            (unsafe { call(&raw mut context) }, context)
        };
        let set = |context: usize| {
            // SAFETY: the double knows its contexts.
            unsafe { acl.call::<unsafe extern "C" fn(usize) -> c_int>("aclrtSetCurrentContext")(context) }
        };
        assert_eq!(current().0, 107_002);
        assert_eq!((set(0), set(1)), (100_000, 107_002));
        acl.set_device(0);
        let devices_own = current();
        assert_eq!(devices_own.0, 0);
        let framework = shmesh_fake_ascend::Framework::with(library());
        let made = framework.make_context(1);
        assert_eq!((current(), framework.context()), ((0, made), Some(made)), "the creating thread has it");
        let memory = acl.malloc(1).unwrap();
        // The device's own is another, and so is the device.
        acl.set_device(0);
        assert_eq!(current(), devices_own);
        assert_eq!(acl.export(memory, 1, 65, 0), Err(507_899), "it is on the other device");
        assert_eq!(set(made), 0);
        assert!(acl.export(memory, 1, 65, 0).is_ok());
        // SAFETY: it is not used any more.
        let destroy = |context| unsafe {
            acl.call::<unsafe extern "C" fn(usize) -> c_int>("aclrtDestroyContext")(context)
        };
        assert_eq!((destroy(made), destroy(made), destroy(0)), (0, 107_002, 100_000));
        assert_eq!((current().0, acl.malloc(1), set(made)), (107_002, Err(107_002), 107_002));
    });
}

#[test]
fn cpu_cannot_read_device_memory() {
    let output = in_a_process_by(&[], || {
        let acl = Acl::load();
        acl.set_device(0);
        let memory = acl.malloc(1).unwrap();
        // SAFETY: none: that it ends this process is what is tested.
        unsafe { memory.cast::<u8>().read_volatile() };
    });
    assert!(output.is_none_or(|output| output.status.signal() == Some(libc::SIGSEGV)));
}

#[test]
fn missing_device_manager_makes_bare_ids_valid() {
    in_a_process(&[("FAKE_ACL_TGID", "-1")], || {
        let acl = Acl::load();
        acl.set_device(0);
        assert_eq!(acl.bare_tgid(), (0, -1));
    });
}

#[test]
fn cards_without_a_bus_between_them() {
    in_a_process(&[("FAKE_NPU_DEVICES", "2"), ("FAKE_ACL_EXBUS", "0")], || {
        let acl = Acl::load();
        acl.set_device(0);
        let memory = acl.malloc(1).unwrap();
        let key = acl.export(memory, 1, 65, 1).unwrap();
        acl.set_device(1);
        assert_eq!(
            acl.import(&key, 1),
            Err(507_899),
            "the same number as for a process that is not on the list"
        );
        acl.set_device(0);
        assert!(acl.import(&key, 0).is_ok());
    });
}

#[test]
fn cards_that_cannot_share() {
    in_a_process(&[("FAKE_ACL_PRODUCT", "310B")], || {
        let acl = Acl::load();
        acl.set_device(0);
        let memory = acl.malloc(1).unwrap();
        assert_eq!(acl.export(memory, 1, 65, 0), Err(207_000));
    });
}
