//! The UDP transport: whole messages, in order, and losses are counted.
#![expect(unsafe_code, reason = "buffers are addresses; each access says why it is allowed")]

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

use shmesh::config::PoolId;
use shmesh_nvipc_wire::udp::{Config, Endpoint, Form, LossStats};
use shmesh_nvipc_wire::{Error, Message};
use shmesh_testing::own_process;

const HANGS: Duration = Duration::from_secs(120);

/// An address that no other test uses: the IP address in the loopback network is made of the process's number, and its ports
/// are handed out in order, below those that the kernel gives. No socket asks for a free port first: a process that another
/// test starts could keep that socket for a moment.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let own = Ipv4Addr::from_bits(Ipv4Addr::LOCALHOST.to_bits() & 0xff00_0000 | std::process::id());
    SocketAddr::from((own, NEXT.fetch_add(1, Relaxed)))
}

fn pair(change: impl Fn(&mut Config)) -> (Endpoint, Endpoint) {
    let open = |local, remote| {
        let mut config = Config::new(local, remote);
        change(&mut config);
        Endpoint::open(config)
    };
    let (a, b) = (address(), address());
    (open(a, b).unwrap(), open(b, a).unwrap())
}

fn send(link: &Endpoint, msg_id: i32, len: usize, data_len: Option<usize>) -> Result<(), Error> {
    let buffers = link.allocate(data_len.map(|_| PoolId::CpuData))?;
    for (part, len) in [(buffers.msg, len), (buffers.data, data_len.unwrap_or(0))] {
        for i in 0..len {
            // SAFETY: the buffer is ours and not shorter than this.
            unsafe { part.add(i).write(byte(msg_id, i)) };
        }
    }
    let int = |len: usize| i32::try_from(len).unwrap();
    let data_len = int(data_len.unwrap_or(0));
    link.send(Message { msg_id, cell_id: msg_id + 1, msg_len: int(len), data_len, buffers })
}

fn byte(msg_id: i32, i: usize) -> u8 {
    u8::try_from((usize::try_from(msg_id).unwrap() + i) % 251).unwrap()
}

fn next(link: &Endpoint) -> Message {
    loop {
        if let Some(message) = link.receive().unwrap() {
            return message;
        }
        assert!(link.wait(Some(HANGS)).unwrap(), "no message arrived");
    }
}

fn check(link: &Endpoint, message: Message, msg_len: usize, data_len: usize) {
    let parts =
        [(message.buffers.msg, message.msg_len, msg_len), (message.buffers.data, message.data_len, data_len)];
    for (part, said, len) in parts {
        assert_eq!(usize::try_from(said).unwrap(), len);
        for i in 0..len {
            // SAFETY: the message is ours until it is released.
            assert_eq!(unsafe { part.add(i).read() }, byte(message.msg_id, i), "at {i}");
        }
    }
    link.release(message.buffers).unwrap();
}

#[test]
fn ids_lengths_and_all_bytes_arrive() {
    let (a, b) = pair(|_| {});
    let sizes = [
        (0, None),
        (1, None),
        (8192, None),
        (10, Some(0)),
        (1392, Some(1)),
        (1432, Some(1)),
        (8192, Some(60_000)),
    ];
    for (round, (len, data_len)) in sizes.into_iter().enumerate() {
        let id = i32::try_from(round).unwrap() * 7;
        send(&a, id, len, data_len).unwrap();
        let message = next(&b);
        assert_eq!((message.msg_id, message.cell_id), (id, id + 1));
        assert_eq!(message.buffers.data_pool, data_len.map(|_| PoolId::CpuData));
        check(&b, message, len, data_len.unwrap_or(0));
        send(&b, 5, len, None).unwrap();
        check(&a, next(&a), len, 0);
    }
    assert_eq!(b.lost(), LossStats::default());
}

#[test]
fn losses_are_counted_and_other_messages_arrive_whole() {
    // A relay that drops every seventh datagram, and duplicates some.
    let (a, b, middle) = (address(), address(), UdpSocket::bind("127.0.0.1:0").unwrap());
    let between = middle.local_addr().unwrap();
    let sender = Endpoint::open(Config::new(a, between)).unwrap();
    let receiver = Endpoint::open(Config::new(b, between)).unwrap();
    let (mut whole, mut lost) = (0_u64, 0_u64);
    let mut datagrams = 0_u32;
    for id in 0..60 {
        send(&sender, id, 100, (id % 2 == 0).then_some(4000)).unwrap();
        let parts = if id % 2 == 0 { 3 } else { 1 };
        let mut dropped = false;
        let mut buffer = [0; 2000];
        for _ in 0..parts {
            let len = middle.recv(&mut buffer).unwrap();
            datagrams += 1;
            if datagrams.is_multiple_of(7) && id != 59 {
                dropped = true;
            } else {
                middle.send_to(&buffer[..len], b).unwrap();
                if datagrams.is_multiple_of(5) {
                    middle.send_to(&buffer[..len], b).unwrap();
                }
            }
        }
        if dropped {
            lost += 1;
        } else {
            let message = next(&receiver);
            assert_eq!(message.msg_id, id, "in order");
            check(&receiver, message, 100, if id % 2 == 0 { 4000 } else { 0 });
            whole += 1;
        }
    }
    assert!(lost > 5 && whole > 30);
    // Duplicates of the last ones may still be queued.
    assert!(receiver.receive().unwrap().is_none());
    assert_eq!(receiver.lost().messages, lost);
    assert!(receiver.lost().late > 0);
    // No buffer of a dropped message is still held.
    let all: Vec<_> = std::iter::from_fn(|| receiver.allocate(Some(PoolId::CpuData)).ok()).collect();
    assert_eq!(all.len(), 256);
}

#[test]
fn noise_and_other_senders_are_ignored() {
    let (here, there) = (address(), address());
    let link = Endpoint::open(Config::new(here, there)).unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"shm1 and so on", here).unwrap();
    let peer = UdpSocket::bind(there).unwrap();
    for noise in [&b""[..], b"x", b"shm1", &[0; 40], &[0xff; 1000]] {
        peer.send_to(noise, here).unwrap();
    }
    assert!(link.wait(Some(HANGS)).unwrap());
    while link.lost().damaged < 5 {
        assert!(link.receive().unwrap().is_none());
    }
    assert_eq!(link.lost(), LossStats { damaged: 5, ..LossStats::default() });
}

/// Two endpoints and a relay between them that can forge datagrams: the kernel takes them for the other endpoint's.
struct Between {
    sender: Endpoint,
    receiver: Endpoint,
    middle: UdpSocket,
    to: SocketAddr,
}

impl Between {
    fn new() -> Self {
        let (a, b, middle) = (address(), address(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let open = |here| Endpoint::open(Config::new(here, middle.local_addr().unwrap())).unwrap();
        Self { sender: open(a), receiver: open(b), middle, to: b }
    }

    /// The next datagram of the sender.
    fn datagram(&self) -> Vec<u8> {
        let mut buffer = vec![0; 2000];
        let len = self.middle.recv(&mut buffer).unwrap();
        buffer.truncate(len);
        buffer
    }

    fn pass(&self, datagram: &[u8]) {
        self.middle.send_to(datagram, self.to).unwrap();
    }

    /// Sends a message of one datagram and delivers it.
    fn exchange(&self, id: i32) -> Vec<u8> {
        send(&self.sender, id, 100, None).unwrap();
        let datagram = self.datagram();
        self.pass(&datagram);
        let message = next(&self.receiver);
        assert_eq!(message.msg_id, id);
        check(&self.receiver, message, 100, 0);
        datagram
    }

    /// Checks that no message is delivered before the one with this id. Datagrams arrive in order, so earlier ones were
    /// processed.
    fn nothing_comes_before(&self, id: i32) {
        self.exchange(id);
    }

    fn all_free(&self) {
        let all: Vec<_> = std::iter::from_fn(|| self.receiver.allocate(Some(PoolId::CpuData)).ok()).collect();
        assert_eq!(all.len(), 256);
    }
}

fn with_word(datagram: &[u8], at: usize, word: u32) -> Vec<u8> {
    let mut changed = datagram.to_owned();
    changed[at..at + 4].copy_from_slice(&word.to_le_bytes());
    changed
}

fn word(datagram: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(datagram[at..at + 4].try_into().unwrap())
}

#[test]
fn forged_datagram_delays_no_other_message() {
    let link = Between::new();
    let mut datagram = link.exchange(0);
    // With a number far ahead, with an old number, of another sender, and all of them again.
    for turn in 0..12 {
        let number = word(&datagram, 8);
        let forged = match turn % 4 {
            0 => with_word(&datagram, 8, number.wrapping_add(1_000_000 * (turn + 1))),
            1 => with_word(&datagram, 8, number.wrapping_add((1 << 31) - 1 - 1000 * turn)),
            2 => with_word(&datagram, 8, number.wrapping_sub(1_000_000 * (turn + 1))),
            _ => with_word(&datagram, 4, word(&datagram, 4).wrapping_add(turn)),
        };
        // During a message of three datagrams.
        send(&link.sender, 50, 100, Some(4000)).unwrap();
        link.pass(&link.datagram());
        link.pass(&forged);
        assert_eq!(next(&link.receiver).msg_id, word(&forged, 16).cast_signed(), "it cannot be recognized");
        link.pass(&link.datagram());
        link.pass(&link.datagram());
        let message = next(&link.receiver);
        assert_eq!(message.msg_id, 50);
        check(&link.receiver, message, 100, 4000);
        datagram = link.exchange(i32::try_from(turn).unwrap());
    }
    assert_eq!(link.receiver.lost(), LossStats::default());
}

#[test]
fn forged_first_part_does_not_block_the_message() {
    let link = Between::new();
    link.exchange(1);
    send(&link.sender, 50, 100, Some(4000)).unwrap();
    let parts = [link.datagram(), link.datagram(), link.datagram()];
    link.pass(&with_word(&parts[0], 20, 77));
    link.pass(&with_word(&parts[1], 28, 4001));
    parts.iter().for_each(|part| link.pass(part));
    let message = next(&link.receiver);
    assert_eq!((message.msg_id, message.cell_id), (50, 51));
    check(&link.receiver, message, 100, 4000);
    link.exchange(2);
    link.all_free();
}

#[test]
fn duplicate_parts_do_not_expose_old_bytes() {
    let link = Between::new();
    link.exchange(1);
    // The right number of parts and bytes; but parts repeat, so old bytes of the buffer would remain.
    send(&link.sender, 60, 100, Some(1432 + 1332)).unwrap();
    let parts = [link.datagram(), link.datagram()];
    assert_eq!((parts[0].len(), parts[1].len()), (1472, 1472));
    link.pass(&parts[0]);
    link.pass(&with_word(&parts[1], 36, 0));
    link.nothing_comes_before(2);
    assert_eq!(link.receiver.lost(), LossStats { damaged: 1, messages: 1, ..LossStats::default() });
    link.all_free();
}

#[test]
fn restarted_or_long_silent_sender_is_trusted() {
    let mut link = Between::new();
    let in_pieces = |link: &Between| {
        send(&link.sender, 50, 100, Some(4000)).unwrap();
        link.pass(&link.datagram());
        drop((link.datagram(), link.datagram()));
    };
    link.exchange(1);
    in_pieces(&link);
    let middle = link.middle.local_addr().unwrap();
    // Replaced by another sender, whose first message counts already.
    link.sender = Endpoint::open(Config::new("127.0.0.1:0".parse().unwrap(), middle)).unwrap();
    link.exchange(2);
    let old = link.exchange(3);
    assert_eq!(link.receiver.lost(), LossStats { messages: 1, ..LossStats::default() });
    in_pieces(&link);
    for id in 0..100 {
        send(&link.sender, id, 10, None).unwrap();
        drop(link.datagram());
    }
    link.exchange(4);
    link.exchange(5);
    assert_eq!(link.receiver.lost(), LossStats { messages: 102, ..LossStats::default() });
    // A datagram of the old sender is late now.
    link.pass(&old);
    link.nothing_comes_before(6);
    assert_eq!(link.receiver.lost(), LossStats { messages: 102, late: 1, ..LossStats::default() });
    link.all_free();
}

#[test]
fn pools_run_out_and_recover() {
    let (a, b) = pair(|config| config.pools[PoolId::CpuMsg.index()].pool_len = 2);
    for id in 0..3 {
        send(&a, id, 10, None).unwrap();
    }
    let (first, second) = (next(&b), next(&b));
    while b.lost().no_buffer == 0 {
        assert!(b.receive().unwrap().is_none());
    }
    assert!(matches!(b.allocate(None), Err(Error::Empty { len: 2, .. })));
    check(&b, first, 10, 0);
    check(&b, second, 10, 0);
    send(&a, 9, 10, None).unwrap();
    assert_eq!(next(&b).msg_id, 9);
    assert_eq!(b.lost().messages, 1, "the one without a buffer");
}

#[test]
fn pool_memory_is_allocated_on_use() {
    own_process(|| {
        let resident_bytes = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
            pages * 4096
        };
        let before = resident_bytes();
        let (a, b) = pair(|config| config.pools[PoolId::CpuData.index()].buf_size_bytes = 4 << 20);
        // Each pool has 1 GiB, of which these messages use two buffers.
        send(&a, 1, 10, Some(20_000)).unwrap();
        check(&b, next(&b), 10, 20_000);
        assert!(resident_bytes().saturating_sub(before) < 512 << 20);
    });
}

#[test]
fn nvipc_form_is_one_datagram_without_header() {
    let (here, there) = (address(), address());
    let mut config = Config::new(here, there);
    config.form = Form::Nvipc;
    config.pools[PoolId::CpuMsg.index()].buf_size_bytes = 152;
    let link = Endpoint::open(config).unwrap();
    let peer = UdpSocket::bind(there).unwrap();
    send(&link, 4, 100, Some(50)).unwrap();
    let mut datagram = [0; 1000];
    let len = peer.recv(&mut datagram).unwrap();
    assert_eq!(len, 152 + 50);
    assert!((0..100).all(|i| datagram[i] == byte(4, i)) && (0..50).all(|i| datagram[152 + i] == byte(4, i)));

    peer.send_to(&datagram[..len], here).unwrap();
    let message = next(&link);
    assert_eq!((message.msg_id, message.msg_len, message.data_len), (0, 152, 50));
    link.release(message.buffers).unwrap();
    assert!(matches!(send(&link, 4, 100, Some(70_000)), Err(Error::Udp { .. })));
}

#[test]
fn addresses_and_lengths_are_checked() {
    let (a, b) = pair(|_| {});
    let buffers = a.allocate(Some(PoolId::CpuData)).unwrap();
    let message = Message { msg_id: 1, cell_id: 0, msg_len: 1, data_len: 1, buffers };
    assert!(matches!(b.send(message), Err(Error::NotHeld { .. })));
    assert!(matches!(a.send(Message { msg_len: -1, ..message }), Err(Error::Length { .. })));
    assert!(matches!(a.send(Message { data_len: 153_601, ..message }), Err(Error::Length { .. })));
    a.send(message).unwrap();
    assert!(matches!(a.release(buffers), Err(Error::NotHeld { .. })));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| a.wait(Some(HANGS)));
        a.close();
        assert!(matches!(waiter.join().unwrap(), Err(Error::Closed)));
    });
}
