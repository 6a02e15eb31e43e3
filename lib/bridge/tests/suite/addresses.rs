//! Several links, each with an address of its own, and one bridge at all of these addresses, as on a cluster.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shmesh::config::LinkConfig;
use shmesh::{LinkOptions, MAX_SEATS, Side};
use shmesh_bridge::bridge::{Bridge, BridgeConfig, Metrics};
use shmesh_bridge::certificates::CertificateCounts;
use shmesh_bridge::frame::VERSIONS;
use shmesh_bridge::session::BridgeEnd;
use shmesh_bridge::zenoh_engine::{NetworkPlace, ZenohEngine};

use crate::processes::{bridge, dir, free_address, receive, send};
use crate::wait_for_peer;

const LINKS: [&str; 3] = ["fronthaul", "midhaul", "backhaul"];

/// Passes connections on to `to`, and counts them. Returns its address. It ends with the test's process.
fn front(to: &str, count: &Arc<AtomicUsize>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp/{}", listener.local_addr().unwrap());
    let (to, count) = (to.to_owned(), Arc::clone(count));
    std::thread::spawn(move || {
        for incoming in listener.incoming() {
            let (Ok(incoming), Ok(outgoing)) = (incoming, TcpStream::connect(&to)) else { continue };
            count.fetch_add(1, Ordering::Relaxed);
            for (from, to) in [(&incoming, &outgoing), (&outgoing, &incoming)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    address
}

/// Carries three links. Returns how many connections were made in the first seconds.
fn connections(place: impl FnOnce(Vec<(String, String)>) -> NetworkPlace) -> usize {
    let (home, far, address) = (dir(), dir(), free_address());
    let count = Arc::<AtomicUsize>::default();
    let start = |end, dir: &tempfile::TempDir, engine: &ZenohEngine| {
        let config = BridgeConfig {
            end,
            dir: dir.path().to_owned(),
            links: LINKS.map(|link| link.parse().unwrap()).to_vec(),
            node: "edge".to_owned(),
            peers: MAX_SEATS,
            peer_timeout: Duration::from_secs(10),
            versions: VERSIONS,
            cluster: None,
        };
        Bridge::start(&config, engine, &Metrics::default()).unwrap()
    };
    let listen =
        NetworkPlace { listen: vec![format!("tcp/{address}")], group: "g".into(), ..NetworkPlace::default() };
    let home_engine = ZenohEngine::new(listen, CertificateCounts::default());
    let fronts = LINKS.map(|link| (link.to_owned(), front(&address, &count)));
    let far_engine = ZenohEngine::new(place(fronts.to_vec()), CertificateCounts::default());
    let create = |link: &str| {
        LinkOptions::new().dir(home.path()).create(&LinkConfig::new(link.parse().unwrap())).unwrap()
    };
    let phys = LINKS.map(create);
    let bridges = [start(BridgeEnd::Home, &home, &home_engine), start(BridgeEnd::Far, &far, &far_engine)];
    for (link, phy) in LINKS.iter().zip(&phys) {
        let options = LinkOptions::new().dir(far.path()).timeout(Duration::from_secs(60));
        let mac = options.attach(link, Side::Secondary).unwrap();
        wait_for_peer(phy);
        send(phy, 7);
        assert_eq!(receive(&mac), 7);
    }
    std::thread::sleep(Duration::from_secs(7));
    bridges.into_iter().for_each(Bridge::stop);
    count.load(Ordering::Relaxed)
}

#[test]
fn each_link_with_an_address_has_one_connection() {
    let place = |connect_links| NetworkPlace { connect_links, group: "g".into(), ..NetworkPlace::default() };
    assert_eq!(connections(place), LINKS.len());
}

/// Why each link has a session: in one session, all addresses but one are tried for ever.
#[test]
#[ignore = "behaviour of Zenoh, not of the bridge"]
fn zenoh_tries_the_other_addresses_of_a_bridge_for_ever() {
    let count = connections(|fronts| {
        let connect = fronts.into_iter().map(|(_, address)| address).collect();
        NetworkPlace { connect, group: "g".into(), ..NetworkPlace::default() }
    });
    println!("{count} connections");
    assert!(count > LINKS.len() + 4, "{count} connections: one session would do");
}

#[test]
fn addresses_of_unknown_links_are_refused() {
    let dir = dir();
    for (connect, says) in
        [("midhaul=tcp/[::1]:1", "no --link midhaul"), ("fronthaul=tcp/[::1]:1", "link second")]
    {
        let output = bridge(dir.path(), &["--link", "second", "--connect", connect]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{said}");
    }
}
