//! NPU memory shared by vendor keys, and the driver's whitelist of processes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use shmesh::device::{AscendDevice, AscendMemory, BareTgid, DeviceMemory, ExportFlags};
use shmesh_fake_ascend::{Framework, Npud};

use crate::support::Sidecar;
use crate::vendors::peer::{NAMESPACES, USER, import, imports, library_without, start};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

const PAGE: u64 = 2 << 20;

/// Starts the fake driver's daemon. Returns it with the environment variables for peers.
pub(crate) fn npud(dir: &Path) -> (Npud, [(&'static str, String); 2]) {
    let socket = dir.join("npud");
    let daemon = Npud::start(&socket).unwrap();
    let library = shmesh_fake_ascend::library().into_os_string().into_string().unwrap();
    let socket = socket.to_str().unwrap().to_owned();
    (daemon, [("SHMESH_ASCEND_LIBRARY", library), ("FAKE_NPU_SOCK", socket)])
}

fn connected(dir: &Path, variables: &[(&'static str, String)], namespaces: &[&str]) -> Peer {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let mut peer = start(dir, "ascend", &variables, namespaces);
    peer.tell("connect");
    peer
}

#[test]
fn driver_whitelist_matches_broker_across_pid_namespaces() {
    let _watchdog = Watchdog::start();
    let spaces: &[&[&str]] = if is_root() { &NAMESPACES } else { &NAMESPACES[..1] };
    for namespaces in spaces {
        let dir = ipc_dir();
        let (daemon, variables) = npud(dir.path());
        let sidecar = Sidecar::start(dir.path(), "mpmc");
        let mut exporter = connected(dir.path(), &variables, namespaces);
        let mut importer = connected(dir.path(), &variables, namespaces);
        let mut other = connected(dir.path(), &variables, namespaces);
        let key = exporter.ask("export weights 0");
        assert_eq!(key.len(), 64, "{key}");
        assert_eq!(daemon.count(), (1, 0));
        assert!(importer.ask(&format!("import {key}")).starts_with("err Denied"), "not admitted yet");
        let tgid = importer.ask("tgid");
        exporter.tell(&format!("admit {key} {tgid}"));
        assert_eq!(import(&mut importer, &mut exporter, &key), "weights");
        assert_eq!(importer.ask(&format!("size {key}")), PAGE.to_string());
        assert_eq!(daemon.count(), (1, 1));
        assert!(other.ask(&format!("import {key}")).starts_with("err Denied"), "the third one is not");

        let busy = exporter.ask(&format!("close {key}"));
        assert!(busy.starts_with("err Busy") && busy.contains(&tgid), "{busy}");
        importer.tell(&format!("write {key} answer"));
        assert_eq!(importer.ask(&format!("read {key}")), "answers", "the last byte is the exporter's");
        importer.tell(&format!("close {key}"));
        until("the exporter is notified", || exporter.ask("event") == "unused");
        exporter.tell(&format!("close {key}"));
        assert_eq!(daemon.count(), (0, 0));
        until("the key is gone", || sidecar.metric("shmesh_sidecar_keys") == 0);
    }
}

/// The group may connect to the sidecar, and every user to the driver.
#[test]
fn exporter_and_importer_may_be_different_users() {
    let _watchdog = Watchdog::start();
    if !is_root() {
        return;
    }
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o770)).unwrap();
    std::fs::set_permissions(&variables[1].1, PermissionsExt::from_mode(0o777)).unwrap();
    let _sidecar = Sidecar::start(dir.path(), "mpmc 0660");
    let user = |user: &str| [&variables[..], &[(USER, user.to_owned())]].concat();
    let mut exporter = connected(dir.path(), &user("65531"), &[]);
    let mut importer = connected(dir.path(), &user("65532"), &[]);
    let key = exporter.ask("export weights 0");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(import(&mut importer, &mut exporter, &key), "weights");
    assert_eq!(daemon.count(), (1, 1));
}

#[test]
fn open_keys_require_the_operators_permission() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    {
        let _sidecar = Sidecar::start(dir.path(), "mpmc");
        let mut exporter = connected(dir.path(), &variables, &[]);
        assert!(exporter.ask("export weights 1").starts_with("err Denied"));
        until("the vendor's key is gone, too", || daemon.count() == (0, 0));
    }
    let _sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--allow-open-keys"]);
    let (mut exporter, mut importer) =
        (connected(dir.path(), &variables, &[]), connected(dir.path(), &variables, &[]));
    let key = exporter.ask("export weights 1");
    assert_eq!(importer.ask(&format!("import {key}")), "weights");
}

/// The vendor's keys are sequential. With the whitelist on, a guessed key is worthless; without it, it is enough.
#[test]
fn guessed_vendor_key_is_useless_with_the_whitelist() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    let _sidecar = Sidecar::start_with(dir.path(), "mpmc", &["--allow-open-keys"]);
    let mut exporter = connected(dir.path(), &variables, &[]);
    let mut importer = connected(dir.path(), &variables, &[]);
    let mut thief = connected(dir.path(), &variables, &[]);
    let owner: u32 = exporter.ask("tgid").parse().unwrap();
    let guess = |count: u32| format!("{:0<64}", format!("{owner:08x}{count:016x}0000"));

    let key = exporter.ask("export weights 0");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    // Admitted by the broker, and not yet by the driver, which needs the exporter's call.
    assert!(importer.ask(&format!("other steal {}", guess(1))).contains("507899"));
    assert_eq!(import(&mut importer, &mut exporter, &key), "weights");
    assert!(thief.ask(&format!("other steal {}", guess(1))).contains("507899"));
    assert_eq!(daemon.count(), (1, 1));

    exporter.ask("export gold 1");
    assert_eq!(thief.ask(&format!("other steal {}", guess(2))), "gold");
}

/// A request to admit may be old when the exporter reads its events, and its importer's number reused by another process.
#[test]
fn reused_number_of_a_dead_importer_is_not_admitted() {
    const LAST: &str = "/proc/sys/kernel/ns_last_pid";
    let _watchdog = Watchdog::start();
    // The number must be reused in the node's namespace, so a pid namespace of its own would not do.
    if !is_root() || std::fs::File::options().write(true).open(LAST).is_err() {
        return;
    }
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let mut exporter = connected(dir.path(), &variables, &[]);
    let mut importer = connected(dir.path(), &variables, &[]);
    let owner = exporter.pid();
    let (number, key) = (importer.pid(), exporter.ask("export gold 0"));
    exporter.tell(&format!("admit {key} {number}"));
    importer.order(&format!("import {key}"));
    until("the exporter is asked", || imports(dir.path()) == 1);
    importer.kill();
    until("the broker detects it", || imports(dir.path()) == 0);
    let mut thief = None;
    until("its number is given again", || {
        std::fs::write(LAST, (number - 1).to_string()).unwrap();
        let peer = connected(dir.path(), &variables, &[]);
        thief = (peer.pid() == number).then_some(peer);
        thief.is_some()
    });
    assert_eq!(exporter.ask("event"), "none");
    assert!(daemon.listed().is_empty(), "the driver admits no process");
    let stolen = thief.unwrap().ask(&format!("other steal {owner:08x}{:016x}{:0<40}", 1, 0));
    assert!(stolen.contains("507899"), "{stolen}");
}

/// The kernel knows of a death before the broker does.
#[test]
fn importer_death_counts_before_it_is_reported() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let signal = |signal| {
        let pid = nix::unistd::Pid::from_raw(sidecar.pid().cast_signed());
        nix::sys::signal::kill(pid, signal).unwrap();
    };
    let mut exporter = connected(dir.path(), &variables, &[]);
    let key = exporter.ask("export gold 0");
    // The order of the two notifications is not defined.
    for _ in 0..20 {
        let mut importer = connected(dir.path(), &variables, &[]);
        exporter.tell(&format!("admit {key} {}", importer.pid()));
        importer.order(&format!("import {key}"));
        until("the exporter is asked", || imports(dir.path()) == 1);
        signal(nix::sys::signal::Signal::SIGSTOP);
        exporter.order("event");
        exporter.until_asleep();
        importer.kill();
        signal(nix::sys::signal::Signal::SIGCONT);
        assert_eq!(exporter.answer(), "none");
        assert!(daemon.listed().is_empty(), "the driver admits no process");
    }
}

#[test]
fn driver_and_broker_must_agree_on_the_process() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    for (said, words) in [("1", "the driver as 1:"), ("-1", "device manager did not answer")] {
        let variables = [&variables[..], &[("FAKE_ACL_TGID", said.to_owned())]].concat();
        let refused = connected(dir.path(), &variables, &[]).ask("export weights 0");
        assert!(refused.starts_with("err") && refused.contains(words), "{refused}");
    }
    assert_eq!(daemon.count(), (0, 0));
}

/// When the exporter ends, the next access of a process that still imports is a device fault, which ends that process and
/// no other.
#[test]
fn end_of_the_exporter_ends_the_memory() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    for way in ["dies", "ends its session"] {
        let (mut exporter, mut importer) =
            (connected(dir.path(), &variables, &[]), connected(dir.path(), &variables, &[]));
        let key = exporter.ask("export weights 0");
        let tgid = importer.ask("tgid");
        exporter.tell(&format!("admit {key} {tgid}"));
        assert_eq!(import(&mut importer, &mut exporter, &key), "weights");
        if way == "dies" {
            exporter.kill();
            until("the importer is notified", || importer.ask("event") == "lost");
        } else {
            exporter.tell("end");
            until("the importer is notified", || importer.ask("event") == "closing");
        }
        until("the driver has let go of it", || daemon.count().0 == 0);
        importer.order(&format!("read {key}"));
        let stat = format!("/proc/{}/stat", importer.pid());
        until("its next access ends it", || {
            let text = std::fs::read_to_string(&stat).unwrap();
            text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
        });
        drop(importer);
        until("nothing is left", || sidecar.metric("shmesh_sidecar_keys") == 0);
    }
}

#[test]
fn death_of_an_importer_closes_its_import() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (daemon, variables) = npud(dir.path());
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    let (mut exporter, mut importer) =
        (connected(dir.path(), &variables, &[]), connected(dir.path(), &variables, &[]));
    let key = exporter.ask("export weights 0");
    let tgid = importer.ask("tgid");
    exporter.tell(&format!("admit {key} {tgid}"));
    assert_eq!(import(&mut importer, &mut exporter, &key), "weights");
    importer.kill();
    until("its death is its close", || exporter.ask(&format!("close {key}")) == "ok");
    until("at the driver, too", || daemon.count() == (0, 0));
}

#[test]
fn products_that_share_nothing_and_cards_that_do_not_reach_each_other() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_daemon, variables) = npud(dir.path());
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    for product in ["310B", "vnpu"] {
        let variables = [&variables[..], &[("FAKE_ACL_PRODUCT", product.to_owned())]].concat();
        let refused = connected(dir.path(), &variables, &[]).ask("export weights 0");
        assert!(refused.contains("207000") && refused.contains("virtual NPUs"), "{refused}");
    }
    let mut without = start(dir.path(), "ascend", &[("SHMESH_ASCEND_LIBRARY", "/nowhere.so")], &[]);
    without.tell("connect");
    let refused = without.ask("export weights 0");
    assert!(refused.contains("Ascend runtime") && refused.contains("/nowhere.so"), "{refused}");
}

/// Runtimes before CANN 8.3.RC1 have no keys.
#[test]
fn function_that_is_missing_is_named() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_daemon, variables) = npud(dir.path());
    let _sidecar = Sidecar::start(dir.path(), "mpmc");
    for (function, since) in
        [("aclrtIpcMemGetExportKey", "CANN 8.3.RC1"), ("aclrtDeviceGetBareTgid", "CANN 8.0.RC2")]
    {
        let old = library_without(Path::new(&variables[0].1), function, &dir.path().join("libascendcl.so"));
        let variables = [(variables[0].0, old), variables[1].clone()];
        let refused = connected(dir.path(), &variables, &[]).ask("export weights 0");
        assert!(refused.contains(&format!("has no {function}")) && refused.contains(since), "{refused}");
    }
}

#[test]
fn bad_pointers_and_sizes() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_daemon, variables) = npud(dir.path());
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    start(dir.path(), "ascend", &variables, &[]).tell("other misuse");
}

#[test]
fn threads_keep_their_current_context() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let (_daemon, variables) = npud(dir.path());
    let mut variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    variables.push(("FAKE_NPU_DEVICES", "2"));
    start(dir.path(), "ascend", &variables, &[]).tell("other contexts");
}

/// Runs in a process with the fake driver, and a framework that has its own contexts.
pub(crate) fn contexts() {
    let library = std::env::var_os("SHMESH_ASCEND_LIBRARY").unwrap();
    let framework = Framework::with(library.into());
    let devices = AscendDevice::all().unwrap();
    for device in [0, 1] {
        let theirs = framework.make_context(device);
        let mut memory = AscendMemory::new(&devices[0], 1).unwrap();
        assert_eq!(framework.context(), Some(theirs), "memory of device 0, context of device {device}");
        memory.write_at(0, b"x").unwrap();
        memory.read_at(0, &mut [0]).unwrap();
        memory.prepare(ExportFlags::DEFAULT).unwrap();
        memory.admit(BareTgid(1)).unwrap();
        assert!(AscendMemory::import(PAGE, None, &memory.handle()).is_err());
        AscendMemory::driver_tgid().unwrap();
        drop(memory);
        assert_eq!(framework.context(), Some(theirs));
    }
}

/// Runs in a process with the fake driver.
pub(crate) fn misuse() {
    let device = &AscendDevice::all().unwrap()[0];
    let export = |address, size| -> Result<(), String> {
        let mut memory = AscendMemory::of(device, address, size).map_err(|error| error.to_string())?;
        memory.prepare(ExportFlags::DEFAULT).map_err(|error| error.to_string())
    };
    let mut memory = AscendMemory::new(device, 1).unwrap();
    assert_eq!((memory.size(), memory.handle().len()), (PAGE, 0));
    assert!(AscendMemory::new(device, 0).is_err() && AscendMemory::new(device, u64::MAX).is_err());
    let here = memory.address();
    assert!(export(here, PAGE).is_ok());
    let on_the_stack = &raw const here as u64;
    for (address, size) in [(on_the_stack, 8), (here + 4096, 8), (here, PAGE + 1), (here, PAGE * 8)] {
        let refused = export(address, size).unwrap_err();
        assert!(refused.contains("507899") && refused.contains("beginning of a page"), "{refused}");
    }
    assert!(export(0, 8).is_err() && export(here, 0).is_err());
    assert!(memory.admit(BareTgid(1)).is_err(), "it has no key yet");
    memory.prepare(ExportFlags::DEFAULT).unwrap();
    assert!(memory.prepare(ExportFlags::DEFAULT).is_err(), "once");
    // A process may admit another one, but not itself by a number of its own namespace.
    memory.admit(BareTgid(1)).unwrap();
    let me = AscendMemory::driver_tgid().unwrap().unwrap();
    assert!(memory.admit(me).unwrap_err().to_string().contains("names only 0 and"));
    let text = |refused: std::io::Result<AscendMemory>| refused.unwrap_err().to_string();
    let refused = text(AscendMemory::import(PAGE, None, &memory.handle()));
    for cause in ["507899", "not on the key's list", "another pid namespace", "before it started"] {
        assert!(refused.contains(cause), "{refused}");
    }
    assert!(text(AscendMemory::import(PAGE, None, &[7; 64])).contains("64 bytes"));
    assert!(text(AscendMemory::import(PAGE, None, &[0; 65])).contains("107000"));
    for offset in [PAGE, PAGE - 1, u64::MAX] {
        assert!(memory.write_at(offset, &[0; 2]).is_err() && memory.read_at(offset, &mut [0; 2]).is_err());
    }
    assert!(!format!("{memory:?}").contains("00000000000"), "no key in a log");
}
