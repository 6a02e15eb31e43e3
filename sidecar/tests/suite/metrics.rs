//! The metrics of links: `/metrics` reads them in shared memory on request.

use std::time::Duration;

use crate::support::Sidecar;
use shmesh::config::PoolId;
use shmesh::{LinkOptions, Side};
use shmesh_testing::{Peer, Watchdog, ipc_dir, until};

fn of_link(sidecar: &Sidecar, name: &str, label: &str) -> u64 {
    let label = if label.is_empty() { String::new() } else { format!(",{label}") };
    sidecar.metric(&format!("shmesh_sidecar_{name}{{link=\"link\"{label}}}"))
}

fn series(sidecar: &Sidecar, name: &str) -> usize {
    let start = format!("shmesh_sidecar_{name}{{");
    sidecar.get("/metrics").lines().filter(|line| line.starts_with(&start)).count()
}

#[test]
fn messages_loans_and_buffers() {
    let _watchdog = Watchdog::start();
    for kind in ["mpmc", "spsc", "mpmc memfd"] {
        let dir = ipc_dir();
        let sidecar = Sidecar::start(dir.path(), kind);
        assert_eq!(
            (series(&sidecar, "loans"), of_link(&sidecar, "participants", "")),
            (0, 0),
            "no participant is attached"
        );
        let options = LinkOptions::new().dir(dir.path());
        let phy = options.attach("link", Side::Primary).unwrap();
        let mac = options.attach("link", Side::Secondary).unwrap();
        let number = |name, label: &str| of_link(&sidecar, name, label);
        let m2s = |name| number(name, "direction=\"m2s\"");

        // More than the ring holds, so that its indices wrap.
        for n in 0..40 {
            phy.send_inline(n, 0, b"hello").unwrap();
            assert_eq!(m2s("messages_total"), u64::try_from(n).unwrap() + 1, "{kind}");
            assert_eq!(m2s("queued"), 1, "{kind}");
            assert!(mac.receive().unwrap().is_some());
        }
        assert_eq!((m2s("messages_total"), m2s("queued")), (40, 0), "{kind}");
        assert_eq!(number("messages_total", "direction=\"s2m\""), 0, "{kind}");

        let seat = |link: &shmesh::Link| format!("seat=\"{}\"", link.seat());
        assert_eq!(number("free_buffers", "pool=\"cpu_msg\""), 32, "{kind}");
        let (with_data, plain) = (phy.loan_with(PoolId::CpuData).unwrap(), phy.loan().unwrap());
        let other = mac.loan().unwrap();
        assert_eq!((number("loans", &seat(&phy)), number("loans", &seat(&mac))), (3, 1), "{kind}");
        assert_eq!(number("free_buffers", "pool=\"cpu_msg\""), 29, "{kind}");
        assert_eq!(number("free_buffers", "pool=\"cpu_data\""), 15, "{kind}");
        assert_eq!(number("buffers", "pool=\"cpu_data\""), 16, "{kind}");
        plain.send().unwrap();
        assert_eq!(
            (number("loans", &seat(&phy)), m2s("queued")),
            (2, 1),
            "{kind}: a sent message is not a loan"
        );
        drop((with_data, other));
        let received = mac.receive().unwrap().unwrap();
        assert_eq!(number("loans", &seat(&mac)), 1, "{kind}: received and not released");
        drop(received);

        assert_eq!((series(&sidecar, "loans"), number("participants", "")), (2, 2), "{kind}");
        drop(mac);
        assert_eq!(
            (series(&sidecar, "loans"), number("participants", "")),
            (1, 1),
            "{kind}: a detached participant is not listed"
        );
        drop(phy);
        assert_eq!(
            (series(&sidecar, "loans"), m2s("messages_total")),
            (0, 41),
            "{kind}: what was sent stays"
        );
    }
}

#[test]
fn times_of_sampled_messages() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let links = "- { name: timed, latency: { sample: 2 } }\n- name: untimed\n";
    let sidecar = Sidecar::start_yaml(dir.path(), links);
    until("the links are kept", || sidecar.get("/readyz").starts_with("HTTP/1.1 200"));
    let options = LinkOptions::new().dir(dir.path());
    let phy = options.attach("timed", Side::Primary).unwrap();
    let mac = options.attach("timed", Side::Secondary).unwrap();
    for _ in 0..10 {
        let mut loan = phy.loan().unwrap();
        loan.resize_msg(4).unwrap();
        loan.send().unwrap();
        drop(mac.receive().unwrap().unwrap());
    }
    for name in ["latency", "hold"] {
        let name = format!("shmesh_sidecar_link_{name}_seconds");
        assert_eq!(sidecar.metric(&format!("{name}_count{{link=\"timed\"}}")), 5);
        assert_eq!(sidecar.metric(&format!("{name}_bucket{{le=\"+Inf\",link=\"timed\"}}")), 5);
        assert!(!sidecar.get("/metrics").contains(&format!("{name}_count{{link=\"untimed\"}}")));
    }
}

#[test]
fn wake_ups() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let phy = LinkOptions::new().dir(dir.path()).attach("link", Side::Primary).unwrap();
    let mut mac = Peer::start(dir.path());
    mac.tell("attach link secondary 1000");
    let wake_ups = || of_link(&sidecar, "wake_ups_total", "");
    phy.send_inline(1, 0, b"").unwrap();
    phy.notify().unwrap();
    assert_eq!(wake_ups(), 0, "no receiver sleeps");
    mac.ask("receive");
    for n in 1..=3 {
        mac.order("wait -1");
        mac.until_asleep();
        phy.send_inline(1, 0, b"").unwrap();
        phy.notify().unwrap();
        assert_eq!(mac.answer(), "true");
        assert_eq!(wake_ups(), n);
        mac.ask("receive");
    }
    drop(phy);
    mac.exit();
    until("both have gone", || of_link(&sidecar, "participants", "") == 0);
    assert_eq!(wake_ups(), 3, "the count is the link's");
}

/// Buffers of the dead count as theirs until they are recovered, so they are always visible.
#[test]
fn buffers_of_the_dead_are_recovered() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let sidecar = Sidecar::start(dir.path(), "mpmc");
    let mut mac = Peer::start(dir.path());
    mac.tell("attach link secondary 1000");
    mac.tell("hold-loan");
    assert_eq!(of_link(&sidecar, "free_buffers", "pool=\"cpu_data\""), 15);
    mac.kill();
    until("it is back", || of_link(&sidecar, "free_buffers", "pool=\"cpu_data\"") == 16);
    assert_eq!(
        (series(&sidecar, "loans"), sidecar.metric("shmesh_sidecar_reaped_total{link=\"link\"}")),
        (0, 1)
    );
}

#[test]
fn readers_of_a_broadcast_ring() {
    let _watchdog = Watchdog::start();
    let dir = ipc_dir();
    let yaml = "- name: link\n  ring: { len: 4, mode: broadcast, slow: skip, history: 0 }\n  pools:\n    \
                cpu_msg: { buf_size_bytes: 256, pool_len: 16 }\n    cpu_data: { buf_size_bytes: 256, pool_len: 16 }\n";
    let sidecar = Sidecar::start_yaml(dir.path(), yaml);
    let options = LinkOptions::new().dir(dir.path()).timeout(Duration::from_secs(60));
    let writer = options.attach("link", Side::Primary).unwrap();
    let [fast, slow] = [(); 2].map(|()| options.attach("link", Side::Secondary).unwrap());
    let of = |name, reader: &shmesh::Link| of_link(&sidecar, name, &format!("seat=\"{}\"", reader.seat()));
    let send = |number| {
        writer.send_inline(number, 0, b"hello").unwrap();
        assert!(fast.receive().unwrap().is_some());
    };
    until("the readers are listed, and not the writer", || series(&sidecar, "reader_behind") == 2);
    (1..=3).for_each(send);
    assert_eq!((of("reader_behind", &fast), of("reader_behind", &slow)), (0, 3));
    assert_eq!(slow.receive().unwrap().unwrap().msg_id(), 1);
    assert_eq!((of("reader_behind", &slow), of("reader_lost_total", &slow)), (2, 0));

    (4..=12).for_each(send);
    let newest = slow.receive().unwrap().unwrap().msg_id();
    assert_eq!(
        u64::try_from(newest).unwrap(),
        slow.lost() + 2,
        "it has received 1, and lost the ones between"
    );
    assert!(slow.lost() > 0);
    assert_eq!((of("reader_lost_total", &slow), of("reader_lost_total", &fast)), (slow.lost(), 0));
    assert_eq!(of("reader_behind", &slow), u64::try_from(12 - newest).unwrap());

    drop(slow);
    assert_eq!((series(&sidecar, "reader_behind"), series(&sidecar, "reader_lost_total")), (1, 1));
}
