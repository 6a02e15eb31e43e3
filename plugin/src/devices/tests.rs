use std::fs;

use super::*;

/// A directory tree with these files.
fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    dir
}

fn roots(dir: &tempfile::TempDir) -> NodeRoots {
    NodeRoots { host: dir.path().to_owned(), kernel: dir.path().to_owned() }
}

const GPU0: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 40\nGPU UUID: \t GPU-0a1b2c3d-0000-1111-2222-333344445555\n\
                    Bus Location: \t 0000:3B:00.0\nDevice Minor: \t 3\n";

#[test]
fn gpus_are_found_by_the_driver() {
    let dir = tree(&[
        ("proc/driver/nvidia/gpus/0000:3B:00.0/information", GPU0),
        (
            "proc/driver/nvidia/gpus/0000:5e:00.0/information",
            "Model: x\nGPU UUID: GPU-????????-????\nDevice Minor: 1\n",
        ),
        ("proc/driver/nvidia/gpus/0000:5f:00.0/information", "nonsense"),
        ("sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n"),
    ]);
    let expected = Accelerator {
        kind: AcceleratorKind::Gpu,
        id: "GPU-0a1b2c3d-0000-1111-2222-333344445555".into(),
        file: Some("/dev/nvidia3".into()),
        numa: Some(1),
        // The tree has no links, which lead through the root complex.
        pci: Some(PciPlace { address: "0000:3b:00.0".into(), root: None }),
    };
    assert_eq!(accelerators(&roots(&dir)), [expected]);
}

#[test]
fn npus_are_found_by_device_files_and_pci() {
    let files = [
        ("dev/davinci10", ""),
        ("dev/davinci2", ""),
        ("dev/davinci_manager", ""),
        ("sys/bus/pci/devices/0000:81:00.0/vendor", "0x19e5\n"),
        ("sys/bus/pci/devices/0000:81:00.0/class", "0x120000\n"),
        ("sys/bus/pci/devices/0000:81:00.0/numa_node", "-1\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/vendor", "0x19e5\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/class", "0x120000\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/numa_node", "2\n"),
        ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x19e5\n"),
        ("sys/bus/pci/devices/0000:01:00.0/class", "0x020000\n"),
    ];
    let found = accelerators(&roots(&tree(&files)));
    let seen: Vec<_> = found.iter().map(|npu| (npu.id.as_str(), npu.numa)).collect();
    assert_eq!(seen, [("npu-0000:81:00.0", None), ("npu-0000:c1:00.0", Some(2))]);
    assert_eq!(found[1].file, Some("/dev/davinci10".into()));
    // Fewer on the bus than files: no guess.
    let found = accelerators(&roots(&tree(&files[..5])));
    assert_eq!(found.iter().map(|npu| npu.id.as_str()).collect::<Vec<_>>(), ["davinci2", "davinci10"]);
}

#[test]
fn node_without_devices_has_no_accelerators() {
    assert_eq!(accelerators(&roots(&tree(&[]))), []);
}

#[test]
fn memory_and_numa_nodes() {
    let dir = tree(&[
        ("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\n"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       8192 kB\n"),
        ("sys/devices/system/node/node10/meminfo", "Node 10 MemTotal:       4096 kB\n"),
        ("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal:       0 kB\n"),
        ("sys/devices/system/node/possible", "0-10"),
    ]);
    assert_eq!(memory(dir.path()), Some(16 << 20));
    assert_eq!(numa(dir.path()), [Numa { id: 0, bytes: 8 << 20 }, Numa { id: 10, bytes: 4 << 20 }]);
    assert_eq!((memory(tree(&[]).path()), numa(tree(&[]).path())), (None, Vec::new()));
}

#[test]
fn device_lists_are_validated() {
    let dir = tree(&[(
        "fake.yaml",
        "gpus: [{uuid: GPU-1, numaNode: 1}, {uuid: GPU-2, file: /dev/x}]\nnpus: [{uuid: n}]\n",
    )]);
    let fake = fake::read(&dir.path().join("fake.yaml")).unwrap();
    assert_eq!((fake.len(), fake[0].numa, fake[2].kind), (3, Some(1), AcceleratorKind::Npu));
    for wrong in ["gpus: [{uuid: a}, {uuid: a}]", "gpus: [{uuid: ''}]", "gpus: [{id: a}]", "tpus: []"] {
        let dir = tree(&[("fake.yaml", wrong)]);
        assert!(fake::read(&dir.path().join("fake.yaml")).is_err(), "{wrong}");
    }
}

#[test]
fn removed_device_stays_known_and_returns_once() {
    let gpu = |id: &str| Accelerator {
        kind: AcceleratorKind::Gpu,
        id: id.into(),
        file: None,
        numa: None,
        pci: None,
    };
    let mut known = DeviceInventory::default();
    known.found(vec![gpu("a"), gpu("b")]);
    assert!(!known.is_gone(&gpu("a")));
    known.found(vec![gpu("b")]);
    assert_eq!(known.all(), [gpu("a"), gpu("b")]);
    assert!(known.is_gone(&gpu("a")) && !known.is_gone(&gpu("b")));
    known.found(vec![gpu("a"), gpu("b")]);
    assert_eq!(known.all(), [gpu("a"), gpu("b")]);
    assert!(!known.is_gone(&gpu("a")));
}

#[test]
fn npu_has_one_stable_id() {
    let files = [
        ("dev/davinci0", ""),
        ("dev/davinci1", ""),
        ("sys/bus/pci/devices/0000:81:00.0/vendor", "0x19e5\n"),
        ("sys/bus/pci/devices/0000:81:00.0/class", "0x120000\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/vendor", "0x19e5\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/class", "0x120000\n"),
    ];
    let dir = tree(&files);
    let mut known = DeviceInventory::default();
    known.found(accelerators(&roots(&dir)));
    let before = known.all().to_vec();
    assert_eq!(before.len(), 2);
    // One device falls off the bus, so the addresses of the others become ambiguous.
    fs::remove_dir_all(dir.path().join("sys/bus/pci/devices/0000:81:00.0")).unwrap();
    known.found(accelerators(&roots(&dir)));
    assert_eq!(known.all(), before);
    assert!(before.iter().all(|one| !known.is_gone(one)), "their files tell");
    fs::remove_file(dir.path().join("dev/davinci0")).unwrap();
    known.found(accelerators(&roots(&dir)));
    assert_eq!(known.all(), before);
    assert!(known.is_gone(&before[0]) && !known.is_gone(&before[1]));
}

#[test]
fn root_complex_comes_from_the_link_in_sysfs() {
    let dir = tree(&[("sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/numa_node", "0\n")]);
    let devices = dir.path().join("sys/bus/pci/devices");
    fs::create_dir_all(&devices).unwrap();
    let target = "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0";
    std::os::unix::fs::symlink(target, devices.join("0000:3b:00.0")).unwrap();
    assert_eq!(pci::place(dir.path(), "0000:3b:00.0").root.as_deref(), Some("pci0000:3a"));
    assert_eq!(pci::place(dir.path(), "0000:99:00.0").root, None);
}
