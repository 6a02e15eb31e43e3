//! Two bridges in one process, and an engine that loses, doubles and reorders frames, or lets none through.
#![expect(clippy::disallowed_types, reason = "counts of the test itself")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use shmesh::config::{LinkConfig, LinkName, PoolConfig, PoolId, RingMode, SlowReaders};
use shmesh::inspect::{Filter, LostCounts, Tap, View, far_nodes};
use shmesh::{Link, LinkOptions, MAX_SEATS, PeerEvent, Side};
use shmesh_bridge::bridge::{Bridge, BridgeConfig, ClusterPlace, Metrics};
use shmesh_bridge::engine::{Engine, Fate, MemoryEngine, OnFrame, Outlet};
use shmesh_bridge::frame::{Frame, ItemHead, ItemKind, ProtocolVersions, Status, VERSIONS, WireShape};
use shmesh_bridge::place::place_of;
use shmesh_bridge::session::BridgeEnd;
use shmesh_testing::until;
use tempfile::TempDir;

use crate::wait_for_peer;

const PATIENCE: Duration = Duration::from_secs(60);
const PEER_TIMEOUT: Duration = Duration::from_millis(1500);

/// Two machines: an IPC directory each.
struct Machines {
    home: TempDir,
    far: TempDir,
    engine: MemoryEngine,
    metrics: Metrics,
    is_cut: Arc<AtomicBool>,
}

impl Machines {
    /// Of `one_in` frames one is lost, one doubled and one late; 0: none.
    fn new(one_in: u64) -> Self {
        let (is_cut, count) = (Arc::new(AtomicBool::new(false)), AtomicU64::new(0));
        let cut = Arc::clone(&is_cut);
        let engine = MemoryEngine::new(move || {
            let number = count.fetch_add(1, Ordering::Relaxed);
            if cut.load(Ordering::Acquire) {
                return Fate::Lost;
            }
            // Scattered, or the same frame could be lost each time that it is sent again.
            let scattered = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
            match scattered.checked_rem(one_in) {
                Some(3) => Fate::Lost,
                Some(5) => Fate::Twice,
                Some(7) => Fate::Late,
                _ => Fate::Arrives,
            }
        });
        let dir = || tempfile::tempdir_in("/dev/shm").unwrap();
        Self { home: dir(), far: dir(), engine, metrics: Metrics::default(), is_cut }
    }

    /// Other tests of this process start programs, and until such a child runs its own program it holds the lock of a journal, too.
    fn start(&self, config: &BridgeConfig) -> Bridge {
        let mut bridge = None;
        until("a bridge starts", || {
            bridge = Bridge::start(config, &self.engine, &self.metrics).ok();
            bridge.is_some()
        });
        bridge.unwrap()
    }

    fn bridge(&self, end: BridgeEnd, dir: &Path, node: &str) -> Bridge {
        self.start(&config_of(end, dir, node))
    }

    /// The bridge of another release.
    fn bridge_of(&self, versions: ProtocolVersions, end: BridgeEnd, dir: &Path, node: &str) -> Bridge {
        let config = BridgeConfig { versions, ..config_of(end, dir, node) };
        self.start(&config)
    }

    /// A bridge of a pod, whose IPC directory is `dir`.
    fn of_pod(&self, end: BridgeEnd, dir: &Path, is_near: bool) -> Bridge {
        let link: LinkName = "fronthaul".parse().unwrap();
        let place = place_of("worker-1", dir).unwrap();
        let near = if is_near { vec![link.clone()] } else { Vec::new() };
        let cluster = Some(ClusterPlace { place: place.clone(), near });
        let config = BridgeConfig { cluster, ..config_of(end, dir, &place) };
        self.start(&config)
    }

    fn metrics_text(&self) -> String {
        let mut registry = Registry::default();
        self.metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    fn metric(&self, name: &str) -> Option<u64> {
        self.metrics_text().lines().find(|line| line.starts_with(name))?.rsplit(' ').next()?.parse().ok()
    }

    fn bridges(&self) -> [Bridge; 2] {
        [
            self.bridge(BridgeEnd::Home, self.home.path(), ""),
            self.bridge(BridgeEnd::Far, self.far.path(), "edge"),
        ]
    }

    /// Messages that the bridges have counted as lost.
    fn lost(&self) -> u64 {
        self.sum_of("shmesh_bridge_messages_lost_total{")
    }

    /// The sum of a metric over both bridges.
    fn sum_of(&self, metric: &str) -> u64 {
        let text = self.metrics_text();
        let counts = text.lines().filter(|line| line.starts_with(metric));
        counts.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    }

    fn create(&self, config: &LinkConfig) -> Link {
        LinkOptions::new().dir(self.home.path()).create(config).unwrap()
    }

    fn attach(&self) -> Link {
        let options = LinkOptions::new().dir(self.far.path()).timeout(PATIENCE);
        options.attach("fronthaul", Side::Secondary).unwrap()
    }
}

fn config_of(end: BridgeEnd, dir: &Path, node: &str) -> BridgeConfig {
    BridgeConfig {
        end,
        dir: dir.to_path_buf(),
        links: vec!["fronthaul".parse().unwrap()],
        node: node.to_owned(),
        peers: MAX_SEATS,
        peer_timeout: PEER_TIMEOUT,
        cluster: None,
        versions: VERSIONS,
    }
}

fn config(mode: RingMode) -> LinkConfig {
    let mut config = LinkConfig::new("fronthaul".parse().unwrap());
    config.ring_mode = mode;
    config.ring_len = 64;
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 4096, pool_len: 128 };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 65_536, pool_len: 64 };
    config
}

/// Sends message `number` in one of three forms.
fn send(link: &Link, number: u32) {
    let start = Instant::now();
    loop {
        let sent = match number % 3 {
            0 => link.send_inline(i32::try_from(number).unwrap(), 5, &number.to_le_bytes()),
            form => (|| {
                let mut loan = if form == 1 { link.loan()? } else { link.loan_with(PoolId::CpuData)? };
                loan.resize_msg(200)?.fill(number.to_le_bytes()[0]);
                if form == 2 {
                    loan.resize_data(10_000)?.fill(number.to_le_bytes()[0]);
                }
                loan.with_msg_id(i32::try_from(number).unwrap()).with_cell_id(5).send().map_err(Into::into)
            })(),
        };
        match sent {
            Ok(()) => break,
            Err(error) if error.is_retryable() => {
                assert!(start.elapsed() < PATIENCE, "{error}");
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(error) => panic!("{error}"),
        }
    }
    link.notify().unwrap();
}

/// Receives the next message and checks that it is `number`, in the form in which it was sent.
fn receive(link: &Link, number: u32) {
    let start = Instant::now();
    let message = loop {
        if let Some(message) = link.receive().unwrap() {
            break message;
        }
        assert!(start.elapsed() < PATIENCE, "message {number} did not come");
        link.wait(Some(Duration::from_millis(100))).unwrap();
    };
    assert_eq!((message.msg_id(), message.cell_id()), (i32::try_from(number).unwrap(), 5));
    let byte = number.to_le_bytes()[0];
    match number % 3 {
        0 => assert_eq!((message.is_inline(), message.msg()), (true, &number.to_le_bytes()[..])),
        1 => assert_eq!((message.msg(), message.data_pool()), (&[byte; 200][..], None)),
        _ => {
            assert_eq!((message.msg(), message.data_pool()), (&[byte; 200][..], Some(PoolId::CpuData)));
            assert_eq!(message.data(), [byte; 10_000]);
        }
    }
}

fn both_directions(mode: RingMode, one_in: u64, count: u32) {
    let machines = Machines::new(one_in);
    let phy = machines.create(&config(mode));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    let home = std::thread::spawn(move || {
        let answer = phy.try_clone().unwrap();
        let sender = std::thread::spawn(move || (0..count).for_each(|number| send(&phy, number)));
        (0..count).for_each(|number| receive(&answer, number));
        sender.join().unwrap();
    });
    let answer = mac.try_clone();
    // A reader of a broadcast link is a handle; the clone only sends.
    let sender = std::thread::spawn(move || {
        let mac = answer.unwrap();
        (0..count).for_each(|number| {
            send(&mac, number);
            while mode == RingMode::Broadcast && mac.receive().unwrap().is_some() {}
        });
    });
    (0..count).for_each(|number| receive(&mac, number));
    sender.join().unwrap();
    home.join().unwrap();
    bridges.into_iter().for_each(Bridge::stop);
}

fn replica_mode(machines: &Machines) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(machines.far.path().join("fronthaul_shm")).unwrap().permissions().mode() & 0o777
}

#[test]
fn both_ends_show_each_other() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let [home, far] = machines.bridges();
    let mac = machines.attach();
    let name = "fronthaul".parse().unwrap();
    let shown = |dir: &TempDir| far_nodes(dir.path(), &name).unwrap().pop().unwrap();
    send(&phy, 1);
    send(&phy, 2);
    (1..3).for_each(|number| receive(&mac, number));
    assert_eq!(replica_mode(&machines), 0o600);
    until("the ends show each other", || {
        let [at_home, at_far] = [&machines.home, &machines.far].map(shown);
        let counts = [(at_home.sent, at_home.received), (at_far.received, at_far.sent)];
        [&at_home, &at_far].iter().all(|node| node.is_connected && node.round_trip.is_some())
            && counts == [(2, 0); 2]
            && at_home.sent_bytes == 10_400
            && at_far.received_bytes == 10_400
    });
    assert_eq!((shown(&machines.home).node, shown(&machines.home).lost), ("edge".to_owned(), 0));
    machines.is_cut.store(true, Ordering::Release);
    until("the cut shows", || {
        let nodes = [&machines.home, &machines.far].map(shown);
        nodes.iter().all(|node| node.is_running && !node.is_connected)
    });
    [home, far].into_iter().for_each(Bridge::stop);
    until("the end shows", || !shown(&machines.home).is_running);
}

#[test]
fn messages_of_all_forms_cross_both_ways() {
    both_directions(RingMode::Mpmc, 0, 3000);
    both_directions(RingMode::Spsc, 0, 3000);
}

#[test]
fn lost_doubled_and_late_frames_are_not_noticed() {
    both_directions(RingMode::Mpmc, 10, 900);
    both_directions(RingMode::Spsc, 17, 900);
}

#[test]
fn broadcast_reaches_the_readers_of_two_far_nodes() {
    let machines = Machines::new(0);
    let mut config = config(RingMode::Broadcast);
    config.broadcast.slow = SlowReaders::Wait;
    let writer = machines.create(&config);
    let (home, far) = machines.bridges().into();
    let second_dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let second_far = machines.bridge(BridgeEnd::Far, second_dir.path(), "edge2");
    let readers = [machines.attach(), machines.attach(), {
        let options = LinkOptions::new().dir(second_dir.path()).timeout(PATIENCE);
        options.attach("fronthaul", Side::Secondary).unwrap()
    }];
    assert!(writer.wait_for_readers(2, Some(PATIENCE)).unwrap(), "a bridge for each far node");
    let readers = readers
        .map(|reader| std::thread::spawn(move || (0..500).for_each(|number| receive(&reader, number))));
    (0..500).for_each(|number| send(&writer, number));
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    [home, far, second_far].into_iter().for_each(Bridge::stop);
}

#[test]
fn message_after_a_pause_is_sent_once() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    for number in 0..5 {
        // Longer than a bridge waits for a message to be received.
        std::thread::sleep(Duration::from_millis(350));
        send(&phy, number);
        receive(&mac, number);
    }
    // On a busy machine a few may have been late.
    let again = machines.sum_of("shmesh_bridge_frames_again_total{");
    assert!(again < 3, "{again} of 5 messages were sent twice");
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn posts_come_after_what_was_sent_before_them() {
    let machines = Machines::new(9);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    for slot in 0..50_u32 {
        for number in 0..3 {
            send(&phy, 3 * slot + number);
        }
        phy.post().unwrap();
    }
    for slot in 0..50_u32 {
        assert!(mac.wait_tti(Some(PATIENCE)).unwrap(), "slot {slot}");
        for number in 0..3 {
            let message = mac.receive().unwrap().expect("it was sent before the post");
            assert_eq!(message.msg_id(), i32::try_from(3 * slot + number).unwrap());
        }
    }
    assert!(!mac.wait_tti(Some(Duration::from_millis(50))).unwrap(), "no post is doubled");
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn slow_receiver_stops_the_sender() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    // Until the rings of both machines and the bridge's window are full, and stay so.
    let (mut sent, mut full_since) = (0_u32, Instant::now());
    while full_since.elapsed() < Duration::from_millis(700) {
        if phy.send_inline(i32::try_from(3 * sent).unwrap(), 5, &(3 * sent).to_le_bytes()).is_ok() {
            (sent, full_since) = (sent + 1, Instant::now());
            phy.notify().unwrap();
            assert!(sent < 1000, "nothing stops the sender");
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(sent >= 128, "two rings of 64 hold more than {sent}");
    (0..sent).for_each(|number| receive(&mac, 3 * number));
    assert!(mac.receive().unwrap().is_none());
    bridges.into_iter().for_each(Bridge::stop);
}

fn has_left(link: &Link) -> bool {
    std::iter::from_fn(|| link.next_event())
        .any(|event| matches!(event, PeerEvent::Detached(_) | PeerEvent::Died(_)))
}

#[test]
fn partition_takes_the_peers_away_and_heals() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    (0..10).for_each(|number| send(&phy, number));
    (0..10).for_each(|number| receive(&mac, number));
    machines.is_cut.store(true, Ordering::Release);
    (10..20).for_each(|number| send(&phy, number));
    until("an event of the far program", || has_left(&mac));
    until("an event of the home program", || has_left(&phy));
    machines.is_cut.store(false, Ordering::Release);
    wait_for_peer(&phy);
    wait_for_peer(&mac);
    (10..20).for_each(|number| receive(&mac, number));
    (20..30).for_each(|number| send(&phy, number));
    (20..30).for_each(|number| receive(&mac, number));
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn program_that_ends_is_gone_for_the_other_side() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    (0..10).for_each(|number| send(&mac, number));
    drop(mac);
    until("an event of the home program", || has_left(&phy));
    (0..10).for_each(|number| receive(&phy, number));
    let mac = machines.attach();
    wait_for_peer(&phy);
    drop(phy);
    until("an event of the far program", || has_left(&mac));
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn bridge_that_stops_loses_nothing() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let [mut home, mut far] = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    let sender = std::thread::spawn(move || {
        (0..2000).for_each(|number| send(&phy, number));
        phy
    });
    for number in 0..2000 {
        receive(&mac, number);
        if number % 500 == 250 {
            home.stop();
            home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
        }
        if number % 500 == 400 {
            far.stop();
            far = machines.bridge(BridgeEnd::Far, machines.far.path(), "edge");
        }
    }
    sender.join().unwrap();
    home.stop();
    far.stop();
}

#[test]
fn links_that_cannot_be_carried_make_no_replica() {
    let machines = Machines::new(0);
    let mut config = config(RingMode::Mpmc);
    config.request_window = 4;
    let _server = machines.create(&config);
    let bridges = machines.bridges();
    let options = LinkOptions::new().dir(machines.far.path()).timeout(Duration::from_secs(1));
    assert!(options.attach("fronthaul", Side::Secondary).is_err());
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn bad_names_of_nodes_are_refused() {
    let machines = Machines::new(0);
    for node in ["", ".hidden", "a/b", "a*", &"a".repeat(64)] {
        let config = config_of(BridgeEnd::Far, machines.far.path(), node);
        let error = Bridge::start(&config, &machines.engine, &Metrics::default()).unwrap_err();
        assert!(error.to_string().contains(&format!("{node:?}")), "{error}");
    }
}

#[test]
fn program_that_ends_is_gone_although_messages_are_sent() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    (0..100).for_each(|number| send(&phy, number));
    (0..100).for_each(|number| receive(&mac, number));
    drop(mac);
    let (start, mut number) = (Instant::now(), 100);
    while !has_left(&phy) {
        assert!(start.elapsed() < PATIENCE, "the bridge stays while messages come");
        if phy.send_inline(number, 5, b"").is_ok() {
            number += 1;
            phy.notify().unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    bridges.into_iter().for_each(Bridge::stop);
}

/// A reader that comes again has missed messages, or gets some of them once more.
#[test]
fn broadcast_counts_what_it_missed_and_doubles_nothing() {
    let machines = Machines::new(0);
    let mut config = config(RingMode::Broadcast);
    config.broadcast.history = 3;
    let writer = machines.create(&config);
    let [mut home, far] = machines.bridges();
    let reader = machines.attach();
    assert!(writer.wait_for_readers(1, Some(PATIENCE)).unwrap());
    (0..10).for_each(|number| send(&writer, number));
    (0..10).for_each(|number| receive(&reader, number));
    // Nothing new, and the history.
    home.stop();
    home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
    assert!(writer.wait_for_readers(1, Some(PATIENCE)).unwrap());
    (10..20).for_each(|number| send(&writer, number));
    (10..20).for_each(|number| receive(&reader, number));
    assert_eq!(machines.lost(), 0);
    // Seven messages, of which three are the history.
    home.stop();
    assert_eq!(writer.readers(), 0);
    (20..27).for_each(|number| send(&writer, number));
    home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
    assert!(writer.wait_for_readers(1, Some(PATIENCE)).unwrap());
    (27..30).for_each(|number| send(&writer, number));
    (24..30).for_each(|number| receive(&reader, number));
    assert_eq!((machines.lost(), reader.lost()), (4, 4));
    assert!(std::iter::from_fn(|| reader.next_event()).any(|event| event == PeerEvent::Lost(4)));
    home.stop();
    far.stop();
}

#[test]
fn second_bridge_of_a_node_is_refused() {
    let machines = Machines::new(0);
    let bridges = machines.bridges();
    let config = config_of(BridgeEnd::Far, machines.far.path(), "edge");
    let error = Bridge::start(&config, &machines.engine, &Metrics::default()).unwrap_err();
    assert!(format!("{error:#}").contains("another bridge"), "{error:#}");
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn link_with_one_receiver_takes_one_far_node() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Spsc));
    let (home, far) = machines.bridges().into();
    let mac = machines.attach();
    wait_for_peer(&phy);
    let second_dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let second = machines.bridge(BridgeEnd::Far, second_dir.path(), "edge2");
    let options = LinkOptions::new().dir(second_dir.path()).timeout(PATIENCE);
    let idle = options.attach("fronthaul", Side::Secondary).unwrap();
    for number in 0..500 {
        send(&phy, number);
        receive(&mac, number);
    }
    assert!(idle.receive().unwrap().is_none(), "the second node gets none");
    [home, far, second].into_iter().for_each(Bridge::stop);
}

#[test]
fn link_made_anew_with_another_shape_gets_a_new_replica() {
    let machines = Machines::new(0);
    let mut first = config(RingMode::Mpmc);
    let phy = machines.create(&first);
    let bridges = machines.bridges();
    let replica = || {
        let view = View::open(machines.far.path(), &"fronthaul".parse().unwrap());
        view.map(|view| view.ring_len()).ok()
    };
    until("a replica", || replica() == Some(64));
    drop(phy);
    first.ring_len = 128;
    let options = LinkOptions::new().dir(machines.home.path()).timeout(PATIENCE);
    let phy = options.create(&first).unwrap();
    until("the replica of the new link", || replica() == Some(128));
    let mac = machines.attach();
    wait_for_peer(&phy);
    (0..10).for_each(|number| send(&phy, number));
    (0..10).for_each(|number| receive(&mac, number));
    bridges.into_iter().for_each(Bridge::stop);
}

#[test]
fn link_in_the_same_directory_is_not_carried() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let connects = machines.of_pod(BridgeEnd::Far, machines.home.path(), true);
    let listens = machines.of_pod(BridgeEnd::Home, machines.home.path(), false);
    until("near", || machines.metric("shmesh_bridge_near{") == Some(1));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        assert_eq!(machines.metric("shmesh_bridge_connected{"), None, "it is carried");
        std::thread::sleep(Duration::from_millis(50));
    }
    // The primary's pod is made anew on another node.
    drop(phy);
    listens.stop();
    let listens = machines.of_pod(BridgeEnd::Home, machines.far.path(), false);
    until("far", || machines.metric("shmesh_bridge_near{") == Some(0));
    let phy = LinkOptions::new().dir(machines.far.path()).create(&config(RingMode::Mpmc)).unwrap();
    let mac =
        LinkOptions::new().dir(machines.home.path()).timeout(PATIENCE).attach("fronthaul", Side::Secondary);
    let mac = mac.unwrap();
    send(&phy, 1);
    receive(&mac, 1);
    // And back. The replica ends, so that the link can be made where it was.
    drop((phy, mac));
    listens.stop();
    let listens = machines.of_pod(BridgeEnd::Home, machines.home.path(), false);
    until("near again", || machines.metric("shmesh_bridge_near{") == Some(1));
    let mut again = None;
    until("the replica has made room", || {
        again = LinkOptions::new().dir(machines.home.path()).create(&config(RingMode::Mpmc)).ok();
        again.is_some()
    });
    connects.stop();
    listens.stop();
}

#[test]
fn no_replica_is_made_before_the_home_bridge_is_known() {
    let machines = Machines::new(0);
    let connects = machines.of_pod(BridgeEnd::Far, machines.far.path(), true);
    let options = LinkOptions::new().dir(machines.far.path()).timeout(Duration::from_millis(1200));
    assert!(options.attach("fronthaul", Side::Secondary).is_err());
    assert_eq!(machines.metric("shmesh_bridge_connected{"), Some(0), "it says that nothing answers");
    let begun = far_nodes(machines.far.path(), &"fronthaul".parse().unwrap()).unwrap();
    assert!(begun.is_empty(), "it has begun a session: {begun:?}");
    let phy = machines.create(&config(RingMode::Mpmc));
    let listens = machines.of_pod(BridgeEnd::Home, machines.home.path(), false);
    let mac = machines.attach();
    assert_eq!(replica_mode(&machines), 0o660, "programs of the pod may be other users");
    send(&phy, 1);
    receive(&mac, 1);
    connects.stop();
    listens.stop();
}

const OLD: ProtocolVersions = ProtocolVersions { lowest: 1, highest: 2 };
const NEW: ProtocolVersions = ProtocolVersions { lowest: 2, highest: 3 };

#[test]
fn bridges_of_releases_next_to_each_other_work_together() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let home = |versions| machines.bridge_of(versions, BridgeEnd::Home, machines.home.path(), "");
    let far = |versions| machines.bridge_of(versions, BridgeEnd::Far, machines.far.path(), "edge");
    let mut bridges = (home(OLD), far(OLD));
    let mac = machines.attach();
    wait_for_peer(&phy);
    let mut number = 0;
    let cross = |number: &mut u32| {
        for _ in 0..60 {
            send(&phy, *number);
            receive(&mac, *number);
            send(&mac, *number);
            receive(&phy, *number);
            *number += 1;
        }
    };
    cross(&mut number);
    // Upgraded in turn.
    bridges.1.stop();
    bridges.1 = far(NEW);
    cross(&mut number);
    bridges.0.stop();
    bridges.0 = home(NEW);
    cross(&mut number);
    // The far end is taken back while messages are on their way in a version that it does not read: it leaves them, and they are sent again.
    machines.is_cut.store(true, Ordering::Release);
    let first = number;
    (first..first + 20).for_each(|number| send(&phy, number));
    // On a busy machine the far end may be silent for too long before they are.
    until("the messages are taken", || {
        let nodes = far_nodes(machines.home.path(), &"fronthaul".parse().unwrap()).unwrap();
        nodes[0].sent == u64::from(first + 20) || !nodes[0].is_connected
    });
    bridges.1.stop();
    bridges.1 = far(OLD);
    machines.is_cut.store(false, Ordering::Release);
    (first..first + 20).for_each(|number| receive(&mac, number));
    wait_for_peer(&phy);
    number = first + 20;
    (number..number + 20).for_each(|number| send(&mac, number));
    (number..number + 20).for_each(|number| receive(&phy, number));
    assert_eq!((machines.lost(), phy.lost(), mac.lost()), (0, 0, 0));
    bridges.0.stop();
    bridges.1.stop();
}

/// An end that speaks the protocol by hand.
struct HandMadeEnd {
    node: String,
    frames: std::sync::mpsc::Receiver<Vec<u8>>,
    outlet: Box<dyn Outlet>,
}

impl HandMadeEnd {
    fn far(machines: &Machines, node: &str) -> Self {
        Self::new(node, |on_frame| machines.engine.open_far("fronthaul", node, on_frame))
    }

    fn home(machines: &Machines) -> Self {
        Self::new("edge", |on_frame| machines.engine.open_home("fronthaul", on_frame))
    }

    fn new(node: &str, open: impl FnOnce(OnFrame) -> anyhow::Result<Box<dyn Outlet>>) -> Self {
        let (sender, frames) = std::sync::mpsc::channel();
        let on_frame = Arc::new(move |_: &str, pieces: &[&[u8]]| drop(sender.send(pieces.concat())));
        Self { node: node.to_owned(), frames, outlet: open(on_frame).unwrap() }
    }

    fn put(&self, frame: Vec<u8>) {
        self.outlet.put(&self.node, &Arc::new(frame)).unwrap();
    }

    /// Begins a session as a far node that is not known: it answers the greeting. Returns the first status of the session.
    fn begin(&self, first: &Status) -> Status {
        self.put(first.encode(1));
        let greeting = self.status(|status| status.to == first.instance);
        self.put(Status { to: greeting.instance, ..first.clone() }.encode(1));
        let status = self.status(|status| status.known_stream == first.stream);
        assert_eq!((status.instance, status.stream), (greeting.instance, greeting.stream));
        status
    }

    /// The next status of the bridge that fulfils `is_wanted`.
    fn status(&self, is_wanted: impl Fn(&Status) -> bool) -> Status {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "no such status");
            let frame = self.frames.recv_timeout(PATIENCE).unwrap();
            match Frame::decode(&frame, VERSIONS).unwrap() {
                Frame::Status(status) if is_wanted(&status) => return *status,
                _ => {}
            }
        }
    }
}

fn first_status(instance: u64, stream: u64) -> Status {
    Status::new(VERSIONS, instance, stream)
}

/// The frame of a message with these bytes as its parts.
fn frame_of(head: ItemHead, parts: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    head.encode(1, &mut frame);
    frame.extend_from_slice(parts);
    frame
}

#[test]
fn release_too_far_apart_is_refused_and_gets_an_answer() {
    let machines = Machines::new(0);
    let _phy = machines.create(&config(RingMode::Mpmc));
    let home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
    let far = HandMadeEnd::far(&machines, "edge");
    let reads = ProtocolVersions { lowest: 8, highest: 9 };
    // Another layout, but for its first bytes.
    let mut frame = Status { reads, ..first_status(7, 5) }.encode(8);
    frame.truncate(7);
    far.put(frame);
    // So the far node can say so, too.
    let status = far.status(|_| true);
    assert_eq!((status.reads, status.to), (VERSIONS, 0));
    until("the frame is refused", || machines.metric("shmesh_bridge_frames_refused_total") == Some(1));
    assert_eq!(machines.metric("shmesh_bridge_connected"), None, "it has a session");
    home.stop();
}

#[test]
fn frames_against_the_rules_are_not_delivered() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
    let far = HandMadeEnd::far(&machines, "edge");
    let home_status = far.begin(&first_status(7, 5));
    wait_for_peer(&phy);
    let message = |stream, number, msg_id| {
        let head = ItemHead {
            stream,
            number,
            oldest: 1,
            msg_id,
            msg_len: 3,
            ..ItemHead::new(ItemKind::Inline, home_status.instance)
        };
        frame_of(head, b"abc")
    };
    // Of another stream, and for another process: of an earlier life of either end.
    far.put(message(4, 1, -1));
    let mut of_another = message(5, 1, -2);
    of_another[19..27].copy_from_slice(&99_u64.to_le_bytes());
    far.put(of_another);
    // Beyond the limit, which says how many may wait here.
    far.put(message(5, home_status.limit, -3));
    // A part without its head, a head without its part, and no frame at all.
    far.put(b"abc".to_vec());
    far.put(message(5, 1, -4)[..40].to_vec());
    far.put(Vec::new());
    // In a pool that the link does not have: dropped, and counted.
    let head = ItemHead {
        stream: 5,
        number: 1,
        oldest: 1,
        pool: Some(PoolId::CpuLarge),
        ..ItemHead::new(ItemKind::Pooled, home_status.instance)
    };
    far.put(frame_of(head, b""));
    far.put(message(5, 2, 1));
    far.put(message(5, 2, 1));
    far.put(message(5, 3, 2));
    let status = far.status(|status| status.delivered == 3);
    assert_eq!(status.known_stream, 5);
    for msg_id in [1, 2] {
        let message = phy.receive().unwrap().expect("one of the two good ones");
        assert_eq!((message.msg_id(), message.msg()), (msg_id, &b"abc"[..]));
    }
    assert!(phy.receive().unwrap().is_none());
    assert_eq!(phy.lost(), 1, "the one without a pool");
    assert_eq!(machines.metric("shmesh_bridge_frames_refused_total"), Some(4));
    // Its process was replaced, and goes on answering. One of them is refused as long as both answer.
    until("the second bridge of a name is refused", || {
        far.put(first_status(8, 6).encode(1));
        far.put(first_status(7, 5).encode(1));
        machines.metric("shmesh_bridge_frames_refused_total").is_some_and(|refused| refused > 4)
    });
    home.stop();
}

#[test]
fn captures_at_both_ends_have_the_same_messages() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let bridges = machines.bridges();
    let mac = machines.attach();
    wait_for_peer(&phy);
    let mut taps = [&machines.home, &machines.far].map(|dir| {
        Tap::new(View::open(dir.path(), &"fronthaul".parse().unwrap()).unwrap(), Filter::default())
    });
    let mut captured = [Vec::new(), Vec::new()];
    for number in 0..60 {
        let (from, to) = if number < 30 { (&phy, &mac) } else { (&mac, &phy) };
        send(from, number);
        receive(to, number);
        // Before the next message: a buffer that was released is the first to be loaned.
        for (tap, messages) in taps.iter_mut().zip(&mut captured) {
            tap.poll(|seen| {
                let (ids, lengths) = ((seen.msg_id, seen.cell_id), (seen.msg_len, seen.data_len));
                messages.push((seen.from, seen.position, seen.inline, ids, lengths, seen.data_pool));
            });
            // The bytes of a DATA part can be gone as soon as it is received.
            assert_eq!(LostCounts { data: 0, ..tap.lost() }, LostCounts::default());
        }
    }
    assert_eq!(captured[0].len(), 60);
    assert_eq!(captured[0], captured[1]);
    bridges.into_iter().for_each(Bridge::stop);
}

/// While one home answers, another one of the link is refused; when the first is silent, the second gets the far node, and later the first
/// again. What it sends once more was delivered, and is not delivered twice.
#[test]
fn second_home_of_a_link_is_refused_and_doubles_nothing() {
    let machines = Machines::new(0);
    // Whichever opens last gets the far node's frames; both are heard by it.
    let homes = [HandMadeEnd::home(&machines), HandMadeEnd::home(&machines)];
    let far = machines.bridge(BridgeEnd::Far, machines.far.path(), "edge");
    let shape = Some(WireShape(config(RingMode::Mpmc)));
    let far_status = homes[1].status(|_| true);
    let status = |instance, stream| Status {
        to: far_status.instance,
        next: 2,
        shape: shape.clone(),
        ..first_status(instance, stream)
    };
    let message = |stream, number, msg_id| {
        let of = ItemHead::new(ItemKind::Inline, far_status.instance);
        frame_of(ItemHead { stream, number, oldest: 1, msg_id, ..of }, b"")
    };
    homes[0].put(status(70, 700).encode(1));
    homes[0].put(message(700, 1, 1));
    homes[1].status(|status| status.known_stream == 700 && status.delivered == 1);
    let mac = machines.attach();
    homes[1].put(status(80, 800).encode(1));
    homes[1].put(message(800, 1, 2));
    homes[1].status(|status| status.known_stream == 800 && status.delivered == 1);
    // The first is still there. One of them is refused as long as both answer.
    until("the other home is refused", || {
        homes[1].put(status(80, 800).encode(1));
        homes[0].put(status(70, 700).encode(1));
        homes[0].put(message(700, 1, 1));
        machines.metric("shmesh_bridge_frames_refused_total").is_some_and(|refused| refused > 0)
    });
    // The second has gone.
    until("the first gets the far node", || {
        homes[0].put(status(70, 700).encode(1));
        homes[0].put(message(700, 1, 1));
        std::thread::sleep(Duration::from_millis(50));
        homes[1].frames.try_iter().any(|frame| {
            matches!(Frame::decode(&frame, VERSIONS), Ok(Frame::Status(status)) if status.known_stream == 700 && status.to == 70)
        })
    });
    homes[0].put(message(700, 2, 3));
    homes[1].status(|status| status.known_stream == 700 && status.delivered == 2);
    let received: Vec<i32> =
        std::iter::from_fn(|| mac.receive().unwrap().map(|message| message.msg_id())).collect();
    assert_eq!(received, [1, 2, 3]);
    assert_eq!(mac.lost(), 0);
    far.stop();
}

/// A machine that sends first statuses under many names, and gets no answers to them.
#[test]
fn strangers_take_no_places() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
    let (is_over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let stranger = HandMadeEnd::far(&machines, "stranger");
            let frame = Arc::new(first_status(7, 5).encode(1));
            // Each name again and again.
            for number in (0..1000).cycle().take_while(|_| !is_over.load(Ordering::Acquire)) {
                stranger.outlet.put(&format!("stranger-{number}"), &frame).unwrap();
                sent.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let ends = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            until("all strangers have been there", || sent.load(Ordering::Relaxed) >= 1000);
            let ends: Vec<_> = (0..3)
                .map(|number| {
                    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
                    let far = machines.bridge(BridgeEnd::Far, dir.path(), &format!("edge-{number}"));
                    let options = LinkOptions::new().dir(dir.path()).timeout(PATIENCE);
                    let mac = options.attach("fronthaul", Side::Secondary).unwrap();
                    (0..30).for_each(|number| send(&mac, number));
                    (0..30).for_each(|number| receive(&phy, number));
                    (far, mac, dir)
                })
                .collect();
            let nodes = far_nodes(machines.home.path(), &"fronthaul".parse().unwrap()).unwrap();
            let names: Vec<_> = nodes.into_iter().map(|node| node.node).collect();
            assert_eq!(names, ["edge-0", "edge-1", "edge-2"], "a stranger has a journal");
            assert!(!machines.metrics_text().contains("stranger"), "a stranger has metrics");
            ends
        }));
        is_over.store(true, Ordering::Release);
        ends.unwrap().into_iter().for_each(|(far, ..)| far.stop());
    });
    home.stop();
}

/// Nodes that have answered once and are silent, as many as there are places.
#[test]
fn silent_nodes_make_room() {
    let machines = Machines::new(0);
    let phy = machines.create(&config(RingMode::Mpmc));
    let home = machines.bridge(BridgeEnd::Home, machines.home.path(), "");
    for number in 0..MAX_SEATS as u64 {
        let first = Status { peers: 0, ..first_status(2 * number + 1, 2 * number + 1) };
        HandMadeEnd::far(&machines, &format!("silent-{number}")).begin(&first);
    }
    let far = machines.bridge(BridgeEnd::Far, machines.far.path(), "edge");
    let mac = machines.attach();
    (0..30).for_each(|number| send(&mac, number));
    (0..30).for_each(|number| receive(&phy, number));
    // The one whose place it has got left nothing.
    let nodes = far_nodes(machines.home.path(), &"fronthaul".parse().unwrap()).unwrap();
    assert_eq!(nodes.len(), MAX_SEATS);
    let text = machines.metrics_text();
    let sent = text.lines().filter(|line| line.starts_with("shmesh_bridge_messages_sent_total{"));
    assert_eq!(sent.count(), MAX_SEATS, "{text}");
    far.stop();
    home.stop();
}

#[test]
fn no_more_nodes_than_allowed_get_a_session() {
    let machines = Machines::new(0);
    let peer_timeout = Duration::from_secs(600);
    let config =
        BridgeConfig { peers: 1, peer_timeout, ..config_of(BridgeEnd::Home, machines.home.path(), "") };
    let home = machines.start(&config);
    let [first, second] = ["first", "second"].map(|node| HandMadeEnd::far(&machines, node));
    first.begin(&first_status(7, 7));
    second.put(first_status(9, 9).encode(1));
    let greeting = second.status(|status| status.to == 9);
    // This engine returns when the bridge has dealt with it.
    second.put(Status { to: greeting.instance, ..first_status(9, 9) }.encode(1));
    let nodes = far_nodes(machines.home.path(), &"fronthaul".parse().unwrap()).unwrap();
    assert_eq!(nodes.into_iter().map(|node| node.node).collect::<Vec<_>>(), ["first"]);
    home.stop();
}

/// How often the threads of this name have slept.
fn sleeps(thread: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let of_name = tasks.filter(|task| read(task.join("comm")).trim() == thread);
    let count = |task: PathBuf| {
        let status = read(task.join("status"));
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.map_or(0, |count| count.trim().parse().unwrap())
    };
    of_name.map(count).sum()
}

#[test]
fn bridges_without_a_link_sleep() {
    let machines = Machines::new(0);
    let start = |end, dir: &TempDir| {
        let links = vec!["quiet".parse().unwrap()];
        let peer_timeout = Duration::from_secs(600);
        machines.start(&BridgeConfig { links, peer_timeout, ..config_of(end, dir.path(), "edge") })
    };
    let bridges = [start(BridgeEnd::Home, &machines.home), start(BridgeEnd::Far, &machines.far)];
    // The two threads looked for the link 30 times in this time when they did it all the time.
    until("the bridges sleep", || {
        let before = sleeps("quiet:edge");
        std::thread::sleep(Duration::from_secs(3));
        (1..12).contains(&(sleeps("quiet:edge") - before))
    });
    let mut config = config(RingMode::Mpmc);
    config.name = "quiet".parse().unwrap();
    let phy = machines.create(&config);
    let options = LinkOptions::new().dir(machines.far.path()).timeout(PATIENCE);
    let mac = options.attach("quiet", Side::Secondary).unwrap();
    send(&phy, 1);
    receive(&mac, 1);
    bridges.into_iter().for_each(Bridge::stop);
}
