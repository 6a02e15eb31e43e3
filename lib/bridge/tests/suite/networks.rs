//! Bridges in processes of their own, and a network between them that loses, delays and reorders datagrams, or lets nothing through.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shmesh::{Link, Side};
use shmesh_testing::until;

use crate::processes::{
    Authority, BridgeProcess, attach, bridge, create, dir, free_address, lost_at, receive, scattered, send,
};
use crate::wait_for_peer;

/// The faults that a network adds to datagrams.
#[derive(Clone, Copy)]
struct Weather {
    lost_permille: u64,
    delay: Duration,
    /// Each datagram takes up to so much longer: they overtake each other.
    jitter: Duration,
}

/// Stands between two bridges. It ends with the test's process.
struct Relay {
    address: String,
    is_cut: Arc<AtomicBool>,
}

impl Relay {
    fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Release);
    }

    fn udp(to: &str, weather: Weather) -> Self {
        let front = UdpSocket::bind("127.0.0.1:0").unwrap();
        let back = UdpSocket::bind("127.0.0.1:0").unwrap();
        back.connect(to).unwrap();
        let relay = Self { address: front.local_addr().unwrap().to_string(), is_cut: Arc::default() };
        let is_cut = Arc::clone(&relay.is_cut);
        front.set_nonblocking(true).unwrap();
        back.set_nonblocking(true).unwrap();
        std::thread::spawn(move || carry_datagrams(&front, &back, weather, &is_cut));
        relay
    }

    /// While it is cut, nothing crosses. The connections break when that ends, unless they last.
    fn tcp(to: &str, lasts: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self { address: listener.local_addr().unwrap().to_string(), is_cut: Arc::default() };
        let (is_cut, to) = (Arc::clone(&relay.is_cut), to.to_owned());
        std::thread::spawn(move || {
            for front in listener.incoming() {
                let (Ok(front), Ok(back)) = (front, TcpStream::connect(&to)) else { continue };
                for (from, to) in [(&front, &back), (&back, &front)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let is_cut = Arc::clone(&is_cut);
                    std::thread::spawn(move || carry_bytes(&from, &to, lasts, &is_cut));
                }
            }
        });
        relay
    }
}

fn carry_bytes(mut from: &TcpStream, mut to: &TcpStream, lasts: bool, is_cut: &AtomicBool) {
    let mut buffer = [0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if is_cut.load(Ordering::Acquire) {
            while is_cut.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(10));
            }
            if !lasts {
                break;
            }
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn carry_datagrams(front: &UdpSocket, back: &UdpSocket, weather: Weather, is_cut: &AtomicBool) {
    let mut drawn = 0;
    let mut draw = |below: u64| {
        drawn += 1;
        scattered(drawn).checked_rem(below).unwrap_or(0)
    };
    let mut client: Option<SocketAddr> = None;
    // Sorted by the time of arrival. The number tells datagrams with the same time apart.
    let mut way: BTreeMap<(Instant, u64), (bool, Vec<u8>)> = BTreeMap::new();
    let (mut buffer, mut number) = ([0; 64 << 10], 0);
    loop {
        for is_to_back in [true, false] {
            let socket = if is_to_back { front } else { back };
            loop {
                let read = match socket.recv_from(&mut buffer) {
                    Ok((read, from)) => {
                        client = if is_to_back { Some(from) } else { client };
                        read
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // No program listens yet.
                    Err(_) => continue,
                };
                if !is_cut.load(Ordering::Acquire) && draw(1000) >= weather.lost_permille {
                    let jitter = u64::try_from(weather.jitter.as_micros()).unwrap();
                    let due = Instant::now() + weather.delay + Duration::from_micros(draw(jitter));
                    number += 1;
                    way.insert((due, number), (is_to_back, buffer[..read].to_vec()));
                }
            }
        }
        while let Some(first) = way.first_entry().filter(|first| first.key().0 <= Instant::now()) {
            let (is_to_back, datagram) = first.remove();
            // A datagram that has no room is lost, as any.
            let _ = match client {
                _ if is_to_back => back.send(&datagram),
                Some(client) => front.send_to(&datagram, client),
                None => Ok(0),
            };
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Numbers both ways at full speed: each arrives once, in order.
fn exchange(phy: Link, mac: Link, count: u64) -> (Link, Link) {
    let side = |link: Link| {
        move || {
            let (mut sent, mut received) = (0, 0);
            while sent < count || received < count {
                if sent < count && link.send_inline(1, 0, &u64::to_le_bytes(sent)).is_ok() {
                    link.notify().unwrap();
                    sent += 1;
                } else if received < count {
                    assert_eq!(receive(&link), received);
                    received += 1;
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            link
        }
    };
    let (phy, mac) = (std::thread::spawn(side(phy)), std::thread::spawn(side(mac)));
    (phy.join().unwrap(), mac.join().unwrap())
}

fn has_peer(link: &Link, side: Side) -> bool {
    link.participants().any(|peer| peer.word.side() == side)
}

struct TwoMachines {
    dirs: [tempfile::TempDir; 2],
    _bridges: [BridgeProcess; 2],
    /// Its files are read at each connection.
    _authority: Authority,
    relay: Relay,
    phy: Link,
    mac: Link,
}

fn bridged(protocol: &str, peer_timeout: &str, relay: impl Fn(&str) -> Relay) -> TwoMachines {
    let (home, far, address) = (dir(), dir(), free_address());
    let (authority, relay) = (Authority::new(), relay(&address));
    let start = |dir: &tempfile::TempDir, flag: &str, address: &str| {
        let address = format!("{protocol}/{address}");
        let mut args = vec![flag, &address, "--node", "edge", "--peer-timeout", peer_timeout];
        let certificates = authority.args();
        if protocol != "tcp" {
            args.extend(certificates.iter().map(String::as_str));
        }
        BridgeProcess::start(bridge(dir.path(), &args))
    };
    let phy = create(home.path());
    let bridges = [start(&home, "--listen", &address), start(&far, "--connect", &relay.address)];
    let mac = attach(far.path());
    wait_for_peer(&phy);
    TwoMachines { dirs: [home, far], _bridges: bridges, _authority: authority, relay, phy, mac }
}

impl TwoMachines {
    /// Messages that either end has counted as lost.
    fn lost(&self) -> u64 {
        self.dirs.iter().map(|dir| lost_at(dir.path())).sum()
    }
}

#[test]
fn datagrams_that_are_lost_and_overtaken_are_not_noticed() {
    let weather =
        Weather { lost_permille: 10, delay: Duration::from_millis(50), jitter: Duration::from_millis(10) };
    let mut line = bridged("quic", "10", |address| Relay::udp(address, weather));
    let begun = Instant::now();
    (line.phy, line.mac) = exchange(line.phy, line.mac, 3000);
    println!("3000 messages each way in {:?}, at 1 % loss and 50 ms", begun.elapsed());
    let begun = Instant::now();
    send(&line.phy, 7);
    assert_eq!(receive(&line.mac), 7);
    assert!(begun.elapsed() >= Duration::from_millis(50), "it did not cross the network");
    line.phy.post().unwrap();
    assert!(line.mac.wait_tti(Some(Duration::from_secs(30))).unwrap(), "no post");
}

/// Nothing crosses for a while: the peers detach, what was sent meanwhile arrives afterwards, and all works again.
fn partitioned(protocol: &str, peer_timeout: &str, cut: Duration, relay: impl Fn(&str) -> Relay) {
    let mut line = bridged(protocol, peer_timeout, relay);
    (line.phy, line.mac) = exchange(line.phy, line.mac, 200);
    line.relay.cut(true);
    let begun = Instant::now();
    for number in 0..20 {
        send(&line.phy, number);
        send(&line.mac, number);
    }
    until("the peer of the primary detaches", || !has_peer(&line.phy, Side::Secondary));
    until("the peer of the secondary detaches", || {
        // The replica's primary stays while messages wait there: it is the bridge, and a secondary alone.
        line.mac.participants().count() == 1 || begun.elapsed() > cut
    });
    std::thread::sleep(cut.saturating_sub(begun.elapsed()));
    line.relay.cut(false);
    for number in 0..20 {
        assert_eq!(receive(&line.mac), number);
        assert_eq!(receive(&line.phy), number);
    }
    wait_for_peer(&line.phy);
    line.phy.post().unwrap();
    assert!(line.mac.wait_tti(Some(Duration::from_secs(30))).unwrap(), "no post");
    (line.phy, line.mac) = exchange(line.phy, line.mac, 200);
    assert_eq!(line.lost(), 0);
}

const CALM: Weather = Weather { lost_permille: 0, delay: Duration::from_millis(1), jitter: Duration::ZERO };

/// A network that lets nothing through for a while, and the connections that the bridges have over it.
#[derive(Clone, Copy)]
enum Connection {
    TcpThatLasts,
    TcpThatBreaks,
    Quic,
}

fn cut(connection: Connection, peer_timeout: &str, seconds: u64) {
    let cut = Duration::from_secs(seconds);
    match connection {
        Connection::TcpThatLasts => partitioned("tcp", peer_timeout, cut, |to| Relay::tcp(to, true)),
        Connection::TcpThatBreaks => partitioned("tcp", peer_timeout, cut, |to| Relay::tcp(to, false)),
        Connection::Quic => partitioned("quic", peer_timeout, cut, |to| Relay::udp(to, CALM)),
    }
}

#[test]
fn short_cut_heals_where_tcp_lasts() {
    cut(Connection::TcpThatLasts, "1", 2);
}

#[test]
fn short_cut_heals_where_tcp_breaks() {
    cut(Connection::TcpThatBreaks, "1", 2);
}

#[test]
fn short_cut_heals_over_quic() {
    cut(Connection::Quic, "1", 2);
}

#[test]
#[ignore = "long: 30 seconds without a network"]
fn long_cut_heals_where_tcp_lasts() {
    cut(Connection::TcpThatLasts, "10", 30);
}

#[test]
#[ignore = "long: 30 seconds without a network"]
fn long_cut_heals_where_tcp_breaks() {
    cut(Connection::TcpThatBreaks, "10", 30);
}

#[test]
#[ignore = "long: 30 seconds without a network"]
fn long_cut_heals_over_quic() {
    cut(Connection::Quic, "10", 30);
}
