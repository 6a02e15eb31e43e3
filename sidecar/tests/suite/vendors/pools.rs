//! A pool of a link in GPU memory, between real processes in real namespaces.

use std::path::Path;

use crate::support::Sidecar;
use crate::vendors::cuda::library;
use crate::vendors::peer::{NAMESPACES, start};
use shmesh_testing::{Peer, Watchdog, ipc_dir, is_root, until};

fn attached(dir: &Path, side: &str, namespaces: &[&str]) -> Peer {
    let mut peer = start(dir, "pool", &[("SHMESH_CUDA_LIBRARY", &library())], namespaces);
    peer.tell(&format!("attach {side}"));
    peer
}

#[test]
fn payloads_stay_on_the_device_across_namespaces_and_deaths() {
    let _watchdog = Watchdog::start();
    let spaces: &[&[&str]] = if is_root() { &NAMESPACES } else { &NAMESPACES[..1] };
    for namespaces in spaces {
        let dir = ipc_dir();
        let sidecar = Sidecar::start_with(dir.path(), "cuda mpmc", &["--memfds-for-devices"]);
        let mut phy = attached(dir.path(), "primary", namespaces);
        let mut mac = attached(dir.path(), "secondary", namespaces);
        assert_eq!((phy.ask("pool open"), mac.ask("pool open")), ("made".to_owned(), "found".to_owned()));
        phy.tell("pool send 1 down");
        mac.tell("pool send 2 up");
        assert_eq!(
            (mac.ask("pool receive"), phy.ask("pool receive")),
            ("1 down".to_owned(), "2 up".to_owned())
        );

        // The process that has allocated the memory ends. Its messages remain, also for a newcomer.
        phy.tell("pool send 3 waits");
        phy.tell("pool hold in-its-hands");
        phy.kill();
        until("it is counted", || sidecar.metric("shmesh_sidecar_reaped_total{link=\"link\"}") == 1);
        mac.kill();
        let mut mac = attached(dir.path(), "secondary", namespaces);
        assert_eq!(mac.ask("pool open"), "found", "{namespaces:?}");
        assert_eq!(mac.ask("pool receive"), "3 waits", "{namespaces:?}");
        for i in 0..4 {
            mac.tell(&format!("pool send {i} all-of-them"));
        }
    }
}

#[test]
fn one_sides_work_waits_for_the_others() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start_with(dir.path(), "cuda mpmc", &["--memfds-for-devices"]);
    let (mut phy, mut mac) = (attached(dir.path(), "primary", &[]), attached(dir.path(), "secondary", &[]));
    assert_eq!((phy.ask("pool open"), mac.ask("pool open")), ("made".to_owned(), "found".to_owned()));
    // The words start at 0, and each side has its own.
    mac.tell("timeline wait 0");
    mac.tell("timeline write 7");
    mac.order("timeline wait 7");
    assert!(mac.answered().is_none());
    phy.tell("timeline wait 7");
    phy.tell("timeline write 6");
    assert!(mac.answered().is_none(), "not yet");
    phy.tell("timeline write 9");
    assert_eq!(mac.answer(), "ok");
}

#[test]
fn pool_of_another_mechanism_is_an_error() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let _sidecar = Sidecar::start_with(dir.path(), "cuda mpmc", &["--memfds-for-devices"]);
    let mut gpu = attached(dir.path(), "primary", &[]);
    assert_eq!(gpu.ask("pool open"), "made");
    let link = shmesh::LinkOptions::new().dir(dir.path()).attach("link", shmesh::Side::Secondary).unwrap();
    let error =
        link.device_pool(shmesh::config::PoolId::CudaData, shmesh::device::HostMemory::new).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("CudaVmm") && cause.contains("Host"), "{error}: {cause}");
}

#[test]
fn host_pools_stay_locked_while_used_by_a_gpu() {
    let _watchdog = Watchdog::start();
    for kind in ["cuda mpmc", "cuda mpmc memfd"] {
        let dir = ipc_dir();
        let _sidecar = Sidecar::start_with(dir.path(), kind, &["--memfds-for-devices"]);
        let mut phy = attached(dir.path(), "primary", &[]);
        // 16 buffers of 4096 bytes at a distance of 4160, in whole pages. The driver refuses memory that is locked already.
        assert_eq!(
            phy.ask("lock cpu_data"),
            format!("{} System true", (16_u32 * 4160).next_multiple_of(4096))
        );
        assert!(phy.ask("lock cuda_data").starts_with("err OnDevice"));
        assert!(phy.ask("lock cpu_large").starts_with("err NoPool"));
    }
}
