//! GPU memory shared by descriptors, and by legacy handles: over the fake driver, or on the first GPU of the machine if
//! `SHMESH_CUDA_LIBRARY` names a driver.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use shmesh::device::{CudaDevice, CudaLegacyMemory, CudaMemory, CudaStream, DeviceMemory, DeviceUuid};

use crate::support::Sidecar;
use crate::vendors::peer::{NAMESPACES, USER, imports, library_without, start};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

const BLOCK: u64 = 2 << 20;

/// The path of the driver, for the environment of peers.
pub(crate) fn library() -> String {
    shmesh_fake_cuda::named_or_fake().into_os_string().into_string().unwrap()
}

/// Whether the driver is the fake one, which has two devices and a file system as their memory. In peers, too.
pub(crate) fn is_fake() -> bool {
    shmesh_fake_cuda::named_or_fake() == shmesh_fake_cuda::library()
}

fn sidecar(dir: &Path, flags: &[&str]) -> Sidecar {
    Sidecar::start_with(dir, "mpmc", &[&["--memfds-for-devices"], flags].concat())
}

fn connected(dir: &Path, mechanism: &str, variables: &[(&str, &str)], namespaces: &[&str]) -> Peer {
    let mut peer = start(dir, mechanism, variables, namespaces);
    peer.tell("connect");
    peer
}

/// Device memory for this thread and its children: a small tmpfs, whose free bytes are those of the device.
pub(crate) fn device_of(dir: &Path, mib: u32) -> Device {
    let device = dir.join("device");
    std::fs::create_dir(&device).unwrap();
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    let size = format!("size={mib}m");
    mount(Some("tmpfs"), &device, Some("tmpfs"), MsFlags::empty(), Some(size.as_str())).unwrap();
    Device(device)
}

/// Unmounts in the end, so that the directory can be removed.
pub(crate) struct Device(std::path::PathBuf);

impl std::ops::Deref for Device {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

fn free(device: &Path) -> u64 {
    let stat = nix::sys::statvfs::statvfs(device).unwrap();
    stat.blocks_available() * stat.fragment_size()
}

/// Number of descriptors of device memory in a process, or in its child in a namespace. A real driver opens one of the
/// same kind for itself, and keeps it.
fn memory_descriptors(peer: &Peer) -> usize {
    let pid = peer.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let (file, drivers_own) = if is_fake() { ("fake-cuda", 0) } else { ("/dev/nvidiactl", 1) };
    let of = |pid: &str| {
        let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let is_memory = |link: &std::fs::DirEntry| {
            std::fs::read_link(link.path()).is_ok_and(|to| to.to_string_lossy().contains(file))
        };
        links.map_while(Result::ok).filter(is_memory).count()
    };
    let all = children.split_whitespace().map(of).sum::<usize>() + of(&pid.to_string());
    all.saturating_sub(drivers_own)
}

/// A process that looks at the free memory of the first device. It keeps a context, whose memory is not free.
pub(crate) struct Observer(Peer);

impl Observer {
    pub(crate) fn start(dir: &Path, variables: &[(&str, &str)]) -> Self {
        let mut peer = start(dir, "cuda", variables, &[]);
        peer.tell("other keep-context");
        // A driver takes some memory when it is first used, and keeps it.
        peer.ask("other free");
        Self(peer)
    }

    pub(crate) fn free(&mut self) -> u64 {
        self.0.ask("other free").parse().unwrap()
    }

    /// Whether as much is free as `before`. A real driver keeps some pages for a process whose context has ended.
    pub(crate) fn is_free_again(&mut self, before: u64) -> bool {
        let free = self.free();
        free == before || !is_fake() && free.abs_diff(before) < BLOCK / 2
    }
}

#[test]
fn only_admitted_processes_import_memory_across_namespaces() {
    let _watchdog = Watchdog::start();
    let spaces: &[&[&str]] = if is_root() { &NAMESPACES } else { &NAMESPACES[..1] };
    for namespaces in spaces {
        let dir = ipc_dir();
        let sidecar = sidecar(dir.path(), &[]);
        let library = library();
        let variables = [("SHMESH_CUDA_LIBRARY", library.as_str())];
        let mut exporter = connected(dir.path(), "cuda", &variables, namespaces);
        let mut importer = connected(dir.path(), "cuda", &variables, namespaces);
        let key = exporter.ask("export weights 0");
        assert_eq!(key.len(), 64, "{key}");
        assert!(importer.ask(&format!("import {key}")).starts_with("err Denied"), "not admitted yet");
        let tgid = importer.ask("tgid");
        exporter.tell(&format!("admit {key} {tgid}"));
        assert_eq!(importer.ask(&format!("import {key}")), "weights");
        assert_eq!(importer.ask(&format!("size {key}")), BLOCK.to_string(), "rounded up, and said");

        // The fake driver's handle is one. A second descriptor would be a leak.
        assert_eq!(memory_descriptors(&importer), usize::from(is_fake()));
        assert!(memory_descriptors(&exporter) > 0, "what is counted is found");
        importer.tell(&format!("write {key} answer"));
        importer.tell(&format!("write-word {key} 0"));
        assert!(exporter.ask(&format!("close {key}")).contains("Busy"), "importers close first");
        importer.tell(&format!("close {key}"));
        assert_eq!(memory_descriptors(&importer), 0, "nothing of it is left");
        until("the exporter is notified", || exporter.ask("event") == "unused");
        exporter.tell(&format!("close {key}"));
        assert_eq!(memory_descriptors(&exporter), 0, "nothing of it is left");
        until("the key is gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
    }
}

/// The group may connect to the sidecar.
#[test]
fn exporter_and_importer_may_be_different_users() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o770)).unwrap();
    let _sidecar = Sidecar::start_with(dir.path(), "mpmc 0660", &["--memfds-for-devices"]);
    let library = library();
    let user = |user| [("SHMESH_CUDA_LIBRARY", library.as_str()), (USER, user)];
    let mut exporter = connected(dir.path(), "cuda", &user("65531"), &[]);
    let mut importer = connected(dir.path(), "cuda", &user("65532"), &[]);
    let key = exporter.ask("export weights 0");
    assert!(importer.ask(&format!("import {key}")).starts_with("err Denied"), "not admitted yet");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("import {key}")), "weights");
}

#[test]
fn processes_share_writes_and_wait_for_each_others_work() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = sidecar(dir.path(), &[]);
    let library = library();
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str())];
    let mut peers: Vec<_> = (0..3).map(|_| connected(dir.path(), "cuda", &variables, &[])).collect();
    let key = peers[0].ask("export weights 0");
    for importer in 1..3 {
        let tgid = peers[importer].ask("tgid");
        peers[0].tell(&format!("admit {key} {tgid}"));
        assert_eq!(peers[importer].ask(&format!("import {key}")), "weights");
    }
    peers[1].tell(&format!("write-word {key} 0"));
    // It waits on the device for a word that has not been written yet.
    peers[2].order("other follow 7");
    assert!(peers[2].answered().is_none());
    peers[1].tell(&format!("write {key} answers"));
    peers[1].tell(&format!("write-word {key} 6"));
    assert!(peers[2].answered().is_none(), "not yet");
    peers[1].tell(&format!("write-word {key} 9"));
    assert_eq!(peers[2].answer(), "answers");
}

/// The driver's copy returns when it has read the source. Another process has no stream that would wait for the write.
#[test]
fn write_returns_after_the_copy() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = sidecar(dir.path(), &[]);
    let library = library();
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str()), ("FAKE_CUDA_LAZY_COPIES", "1")];
    let mut exporter = connected(dir.path(), "cuda", &variables, &[]);
    let mut importer = connected(dir.path(), "cuda", &variables, &[]);
    let mut reader = connected(dir.path(), "cuda", &variables, &[]);
    let key = exporter.ask("export weights 0");
    for peer in [&mut importer, &mut reader] {
        let tgid = peer.ask("tgid");
        exporter.tell(&format!("admit {key} {tgid}"));
        assert_eq!(peer.ask(&format!("import {key}")), "weights");
    }
    for text in ["answer0", "answer1", "answer2"] {
        importer.tell(&format!("write {key} {text}"));
        assert_eq!(reader.ask(&format!("read {key}")), text);
    }
}

#[test]
fn memory_is_freed_by_the_last_process() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let device = device_of(dir.path(), 16);
    let (library, place) = (library(), device.to_str().unwrap().to_owned());
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str()), ("FAKE_CUDA_DIR", place.as_str())];
    let sidecar = sidecar(dir.path(), &[]);
    let mut observer = Observer::start(dir.path(), &variables);
    let all = observer.free();
    let mut exporter = connected(dir.path(), "cuda", &variables, &[]);
    let mut importer = connected(dir.path(), "cuda", &variables, &[]);
    let key = exporter.ask("export weights 0");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("import {key}")), "weights");
    let used = all - observer.free();
    assert!(used >= BLOCK, "{used}");
    if is_fake() {
        assert_eq!(observer.free(), free(&device), "what the driver says is so");
    }

    // The exporter dies: the importer keeps the memory, until it dies too.
    exporter.kill();
    until("the importer is notified", || importer.ask("event") == "lost");
    assert_eq!(importer.ask(&format!("read {key}")), "weights", "it stays mapped");
    // A real driver takes back the context of the exporter.
    let still_used = all - observer.free();
    assert!(still_used == used || !is_fake() && still_used >= BLOCK, "{still_used} of {used}");
    until("the sidecar lets go of it", || sidecar.metric("shmesh_sidecar_keys") == 0);
    importer.tell("end");
    until("the memory is free", || observer.is_free_again(all));

    // An importer that does not close before it dies.
    let mut exporter = connected(dir.path(), "cuda", &variables, &[]);
    importer.tell("connect");
    let key = exporter.ask("export weights 0");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("import {key}")), "weights");
    assert!(exporter.ask(&format!("close {key}")).contains("Busy"));
    exporter.tell(&format!("force {key}"));
    assert!(observer.free() <= all - BLOCK);
    until("it is asked to", || importer.ask("event") == "closing");
    importer.kill();
    until("the exporter may free it", || exporter.ask("event") == "unused");
    until("the memory is free", || observer.is_free_again(all));
    assert!(exporter.ask(&format!("close {key}")).starts_with("err"), "it is closed");

    if !is_fake() {
        return;
    }
    // The device runs out of memory.
    let mut keys = Vec::new();
    let refused = loop {
        match exporter.ask("export weights 0") {
            key if key.starts_with("err") => break key,
            key => keys.push(key),
        }
    };
    assert!((4..8).contains(&keys.len()) && refused.contains("OUT_OF_MEMORY"), "{refused}");
}

#[test]
fn different_devices_are_distinguished() {
    let _watchdog = Watchdog::start();
    if !is_fake() {
        return;
    }
    let dir = ipc_dir();
    let _sidecar = sidecar(dir.path(), &[]);
    let library = library();
    let with = |more: &[(&'static str, &'static str)]| {
        let variables = [&[("SHMESH_CUDA_LIBRARY", library.as_str())], more].concat();
        connected(dir.path(), "cuda", &variables, &[])
    };
    let mut exporter = with(&[]);
    let key = exporter.ask("export weights 0");
    // A process that only sees the other device, as number 0; a partition of the same device; no device at all.
    for (variable, sees) in [
        (("CUDA_VISIBLE_DEVICES", "1"), "does not see GPU-5f686d65"),
        (("FAKE_CUDA_MIG", "3"), "MIG"),
        (("CUDA_VISIBLE_DEVICES", "-1"), "CUDA_ERROR_NO_DEVICE"),
    ] {
        let mut importer = with(&[variable]);
        let tgid = importer.ask("tgid");
        exporter.tell(&format!("admit {key} {tgid}"));
        let refused = importer.ask(&format!("import {key}"));
        assert!(refused.starts_with("err System") && refused.contains(sees), "{refused}");
        // The broker has no record of the attempt any more.
        until("it is closed", || imports(dir.path()) == 0);
    }
    // The same device with another number.
    let mut importer = with(&[("CUDA_VISIBLE_DEVICES", "1,0")]);
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("import {key}")), "weights");
}

/// The error if there is no driver, or an old one.
#[test]
fn missing_library_and_a_missing_function_are_named() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = sidecar(dir.path(), &[]);
    let mut without = connected(dir.path(), "cuda", &[("SHMESH_CUDA_LIBRARY", "/nowhere/libcuda.so.1")], &[]);
    let refused = without.ask("export weights 0");
    assert!(refused.contains("CUDA driver") && refused.contains("/nowhere/libcuda.so.1"), "{refused}");

    let old = library_without(
        &shmesh_fake_cuda::library(),
        "cuMemExportToShareableHandle",
        &dir.path().join("libcuda.so.1"),
    );
    let mut with_old = connected(dir.path(), "cuda", &[("SHMESH_CUDA_LIBRARY", old.as_str())], &[]);
    let refused = with_old.ask("export weights 0");
    assert!(
        refused.contains("has no cuMemExportToShareableHandle") && refused.contains("CUDA 10.2"),
        "{refused}"
    );
}

/// A context takes hundreds of megabytes of its device, so it is created on first use and destroyed after the last.
#[test]
fn device_that_is_only_looked_at_has_no_context() {
    let _watchdog = Watchdog::start();
    if !is_root() || !is_fake() {
        return;
    }
    let dir = ipc_dir();
    let device = device_of(dir.path(), 16);
    let (library, place) = (library(), device.to_str().unwrap());
    let variables = [
        ("SHMESH_CUDA_LIBRARY", library.as_str()),
        ("FAKE_CUDA_DIR", place),
        ("FAKE_CUDA_CONTEXT_KIB", "1024"),
    ];
    start(dir.path(), "cuda", &variables, &[]).tell("other contexts");
}

/// Runs in a process with the fake driver.
pub(crate) fn contexts() {
    const CONTEXT: u64 = 1 << 20;
    let place = std::env::var_os("FAKE_CUDA_DIR").unwrap();
    let all = free(place.as_ref());
    let used = || all - free(place.as_ref());
    let devices = CudaDevice::all().unwrap();
    for device in &devices {
        device.name().unwrap();
        device.granularity().unwrap();
        assert_eq!(CudaDevice::by_uuid(&device.uuid()).unwrap(), *device);
    }
    assert_eq!(used(), 0, "there are {} devices", devices.len());
    devices[1].synchronize().unwrap();
    devices[1].clone().synchronize().unwrap();
    assert_eq!(used(), CONTEXT, "one, of the one that is used");
    drop(devices);
    assert_eq!(used(), 0);

    // Each object keeps its device's context, but the thread does not.
    let memory = CudaMemory::new(&CudaDevice::all().unwrap()[0], 1).unwrap();
    let stream = CudaStream::new(memory.device()).unwrap();
    assert!((CONTEXT + BLOCK..2 * CONTEXT + BLOCK).contains(&used()));
    memory.write_at(0, b"x").unwrap();
    drop(memory);
    assert_eq!(used(), CONTEXT);
    stream.synchronize().unwrap();
    drop(stream);
    assert_eq!(used(), 0);
    for size in [0, 1 << 46] {
        assert!(CudaMemory::new(&CudaDevice::all().unwrap()[0], size).is_err());
    }
    assert_eq!(used(), 0, "nothing is left of what was refused");
}

#[test]
fn bad_pointers_and_sizes() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    std::fs::create_dir(dir.path().join("device")).unwrap();
    let (library, place) = (library(), dir.path().join("device"));
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str()), ("FAKE_CUDA_DIR", place.to_str().unwrap())];
    start(dir.path(), "cuda", &variables, &[]).tell("other misuse");
}

/// Runs in a process with the driver.
pub(crate) fn misuse() {
    let text = |refused: std::io::Result<CudaMemory>| refused.unwrap_err().to_string();
    let legacy = |refused: std::io::Result<CudaLegacyMemory>| refused.unwrap_err().to_string();
    let devices = CudaDevice::all().unwrap();
    let device = &devices[0];
    assert_eq!(device.granularity().unwrap(), BLOCK);
    if is_fake() {
        assert_eq!(devices.len(), 2);
        assert!(devices[0].uuid() != devices[1].uuid() && device.name().unwrap().contains("fake"));
    }
    assert_eq!(device.uuid().to_string().parse::<DeviceUuid>().unwrap(), device.uuid());

    assert!(text(CudaMemory::new(device, 0)).contains("0 bytes"));
    assert!(text(CudaMemory::new(device, u64::MAX)).contains("exceed the memory of any device"));
    assert!(text(CudaMemory::new(device, 1 << 46)).contains("OUT_OF_MEMORY"));

    // The length is rounded up to blocks, but the rest cannot be accessed.
    let memory = CudaMemory::new(device, BLOCK + 1).unwrap();
    assert_eq!(memory.size(), 2 * BLOCK);
    memory.write_at(2 * BLOCK - 1, b"x").unwrap();
    for (offset, len) in [(2 * BLOCK, 1), (2 * BLOCK - 1, 2), (u64::MAX, 1)] {
        assert!(memory.write_at(offset, &vec![0; len]).unwrap_err().to_string().contains("are past the end"));
        assert!(memory.read_at(offset, &mut vec![0; len]).is_err());
    }
    assert!(memory.timeline(4).is_err() && memory.timeline(2 * BLOCK).is_err());
    memory.fill(0, 0x0101_0101, BLOCK / 2).unwrap();
    assert!(memory.fill(0, 1, BLOCK).is_err());

    // Memory that other code has allocated.
    let (whole, here) = (2 * BLOCK, memory.address());
    let again = CudaMemory::of(here, whole).unwrap();
    assert_eq!(again.handle(), memory.handle());
    let on_the_stack = &raw const here as u64;
    assert!(text(CudaMemory::of(on_the_stack, 8)).contains("not device memory"));
    assert!(text(CudaMemory::of(here + 4096, 8)).contains("4096 bytes inside its allocation"));
    assert!(text(CudaMemory::of(here, whole + 1)).contains("are allocated"));
    assert!(text(CudaMemory::of(here, BLOCK)).contains("shares all of it"));
    assert!(text(CudaMemory::of(here, 0)).contains("0 bytes"));
    assert!(legacy(CudaLegacyMemory::of(here, whole)).contains("use cuda-vmm"));
    drop(again);
    memory.read_at(0, &mut [0]).unwrap();

    // Small allocations share a block with others.
    let old = CudaLegacyMemory::new(device, 1).unwrap();
    assert_eq!(old.size(), BLOCK);
    assert!(text(CudaMemory::of(old.address(), BLOCK)).contains("not allocated for sharing by descriptors"));
    assert!(CudaLegacyMemory::of(old.address(), BLOCK).is_ok());
    assert!(legacy(CudaLegacyMemory::of(old.address(), BLOCK / 2)).contains("neighbours"));
    assert!(
        legacy(CudaLegacyMemory::of(old.address() + BLOCK / 2, BLOCK / 2)).contains("inside its allocation")
    );

    // A stream reaches the memory of its own device only.
    if let Some(another) = devices.get(1) {
        let (stream, word) = (CudaStream::new(another).unwrap(), memory.timeline(0).unwrap());
        for refused in [word.write(&stream, 1), word.wait(&stream, 1)] {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains(&format!("the stream belongs to {}", another.uuid())), "{refused}");
        }
    }
    assert!(
        "GPU-+f686d65-7368-4000-8000-66616b650000".parse::<DeviceUuid>().is_err(),
        "no hexadecimal digit"
    );

    // Data from the broker may have any value.
    let uuid = device.uuid().0;
    let file = || std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let fd = || memory.fd().unwrap().try_clone_to_owned().unwrap();
    let refused = text(CudaMemory::import(BLOCK, Some(file()), &uuid));
    assert!(refused.contains("UNKNOWN (999): the descriptor is not device memory"), "{refused}");
    assert!(text(CudaMemory::import(BLOCK, None, &uuid)).contains("without a descriptor"));
    assert!(text(CudaMemory::import(BLOCK, Some(fd()), &[7])).contains("did not send the UUID"));
    assert!(text(CudaMemory::import(BLOCK, Some(fd()), &[7; 16])).contains("does not see"));
    if let Some(another) = devices.get(1) {
        assert!(text(CudaMemory::import(BLOCK, Some(fd()), &another.uuid().0)).contains("INVALID_DEVICE"));
    }
    assert!(text(CudaMemory::import(BLOCK + 1, Some(fd()), &uuid)).contains("granularity"));
    assert!(text(CudaMemory::import(4 * BLOCK, Some(fd()), &uuid)).contains("fewer than"));
    let twice = [CudaMemory::import(whole, Some(fd()), &uuid), CudaMemory::import(whole, Some(fd()), &uuid)];
    assert!(twice.iter().all(|imported| imported.as_ref().unwrap().read_at(0, &mut [0]).is_ok()));
    assert!(legacy(CudaLegacyMemory::import(BLOCK, None, &old.handle())).contains("both process"));
    assert!(legacy(CudaLegacyMemory::import(BLOCK, None, &[0; 64])).contains("not made by this library"));
    assert!(legacy(CudaLegacyMemory::import(BLOCK, None, &[0; 84])).contains("does not see"));
}

/// A driver unmaps at once, even if the device still uses the memory, and then the device's context is lost.
#[test]
fn memory_is_freed_after_the_device_has_used_it() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let library = library();
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str()), ("FAKE_CUDA_LAZY_COPIES", "1")];
    start(dir.path(), "cuda", &variables, &[]).tell("other work");
}

/// Runs in a process with the fake driver, whose devices are slow.
pub(crate) fn work() {
    let device = &CudaDevice::all().unwrap()[0];
    CudaMemory::new(device, BLOCK).unwrap().fill(0, 7, BLOCK / 4).unwrap();
    device.synchronize().unwrap();
    let (from, to) = (CudaMemory::new(device, BLOCK).unwrap(), CudaMemory::new(device, BLOCK).unwrap());
    from.fill(0, 7, BLOCK / 4).unwrap();
    to.copy_from(0, from.address(), BLOCK).unwrap();
    drop(from);
    let mut last = [0; 4];
    to.read_at(BLOCK - 4, &mut last).unwrap();
    assert_eq!(last, [7, 0, 0, 0]);

    // The default stream waits for a word, and so does every copy. Another stream writes it.
    to.write_at(0, &[0; 8]).unwrap();
    #[expect(unsafe_code, reason = "streams of others are taken at their word")]
    // SAFETY: the default stream always exists.
    let default = unsafe { CudaStream::from_raw(device, 0) };
    to.timeline(0).unwrap().wait(&default, 1).unwrap();
    to.timeline(0).unwrap().write(&CudaStream::new(device).unwrap(), 1).unwrap();
    assert_eq!(to.timeline(0).unwrap().value().unwrap(), 1);
}

/// The exporter's size and the size that the driver has opened may differ.
#[test]
fn legacy_handle_cannot_exceed_the_allocation() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let place = dir.path().join("device");
    std::fs::create_dir(&place).unwrap();
    let (library, place) = (library(), place.to_str().unwrap());
    let with = |library: &str| {
        start(dir.path(), "legacy", &[("SHMESH_CUDA_LIBRARY", library), ("FAKE_CUDA_DIR", place)], &[])
    };
    let mut exporter = with(&library);
    let handle = exporter.ask("other handle");
    let mut importer = with(&library);
    assert_eq!(importer.ask(&format!("other open {handle} {BLOCK}")), BLOCK.to_string());
    let refused = importer.ask(&format!("other open {handle} {}", BLOCK + 1));
    assert!(refused.contains("states 2097153 bytes, but the handle opens 2097152"), "{refused}");
    if !is_fake() {
        return;
    }
    // A driver that cannot report the size is not trusted.
    let old =
        library_without(Path::new(&library), "cuMemGetAddressRange_v2", &dir.path().join("libcuda.so.1"));
    let refused = with(&old).ask(&format!("other open {handle} {BLOCK}"));
    assert!(refused.contains("has no cuMemGetAddressRange_v2"), "{refused}");
}

#[test]
fn old_handles_only_where_the_operator_permits_them() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let place = dir.path().join("device");
    std::fs::create_dir(&place).unwrap();
    let library = library();
    let variables = [("SHMESH_CUDA_LIBRARY", library.as_str()), ("FAKE_CUDA_DIR", place.to_str().unwrap())];
    {
        let _sidecar = sidecar(dir.path(), &[]);
        let refused = connected(dir.path(), "legacy", &variables, &[]).ask("export weights 0");
        assert!(refused.starts_with("err Denied") && refused.contains("use cuda-vmm"), "{refused}");
    }
    let _sidecar = sidecar(dir.path(), &["--allow-cuda-legacy"]);
    let mut exporter = connected(dir.path(), "legacy", &variables, &[]);
    let mut importer = connected(dir.path(), "legacy", &variables, &[]);
    let key = exporter.ask("export weights 0");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(importer.ask(&format!("import {key}")), "weights");
    importer.tell(&format!("close {key}"));
    until("the exporter is notified", || exporter.ask("event") == "unused");
    exporter.tell(&format!("close {key}"));

    if !is_root() {
        return;
    }
    // Both are process 1 of their own pid namespaces, and the driver would confuse them.
    let mut exporter = connected(dir.path(), "legacy", &variables, NAMESPACES[1]);
    let mut importer = connected(dir.path(), "legacy", &variables, NAMESPACES[1]);
    let key = exporter.ask("export weights 0");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    let refused = importer.ask(&format!("import {key}"));
    assert!(refused.contains("both process 1") && refused.contains("201"), "{refused}");
}
