//! A peer that writes arbitrary values into every word that it shares with us.
#![expect(unsafe_code, reason = "the hostile side maps the files as they are")]
#![expect(clippy::disallowed_types, reason = "the hostile side has atomics of its own")]

use std::path::Path;
use std::sync::atomic::AtomicU32;

use crate::support::{Peer, ipc_dir, options, pools, send};
use proptest::prelude::*;
use shmesh::config::PoolId;
use shmesh_nvipc_wire::{Endpoint, Error};

/// A file of the link as a hostile peer maps it, in 32-bit words.
struct HostileFile(memmap2::MmapRaw);

impl HostileFile {
    fn new(dir: &Path, name: &str) -> Self {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(dir.join(name)).unwrap();
        Self(memmap2::MmapOptions::new().map_raw(&file).unwrap())
    }

    fn len(&self) -> usize {
        self.0.len() / 4
    }

    fn write(&self, word: usize, value: u32) {
        // SAFETY: inside the mapping; atomic, because the other side accesses it concurrently.
        let place = unsafe { AtomicU32::from_ptr(self.0.as_mut_ptr().cast::<u32>().add(word)) };
        place.store(value, std::sync::atomic::Ordering::SeqCst);
    }
}

/// Every word outside the buffers' bytes: queues, descriptors, timestamps.
fn shared_words(dir: &Path) -> Vec<(HostileFile, usize)> {
    let queue = |len: usize| (32 + 8 * len) / 4;
    let whole = |name: &str| {
        let mapped = HostileFile::new(dir, name);
        let len = mapped.len();
        (mapped, len)
    };
    vec![
        whole("fapi_shm"),
        (HostileFile::new(dir, "fapi_cpu_msg"), queue(8)),
        (HostileFile::new(dir, "fapi_cpu_data"), queue(4)),
        (HostileFile::new(dir, "fapi_cpu_large"), queue(2)),
        whole("fapi_fw"),
        whole("fapi_cmd_ring"),
        // Without the flag that ends the link.
        whole("fapi_debug"),
    ]
}

/// Does what an application does, and reads all that it gets.
fn use_it(link: &Endpoint, turns: usize) {
    let mut held = Vec::new();
    for turn in 0..turns {
        if turn % 2 == 0 {
            let pool = [None, Some(PoolId::CpuData), Some(PoolId::CpuLarge)][turn % 3];
            let _ = send(link, 5, 256, pool.map(|pool| (pool, 4096)));
        }
        match link.receive() {
            Ok(Some(message)) => {
                assert!((0..=256).contains(&message.msg_len));
                assert!(link.is_inside(message.buffers.msg));
                // Reads the first and the last byte of the length in the message.
                // SAFETY: the buffer is ours as far as this side can know. A hostile peer can only change bytes there.
                unsafe { message.buffers.msg.read_volatile() };
                if let Some(pool) = message.buffers.data_pool {
                    let size = link.pool(pool).buf_size_bytes;
                    assert!(u32::try_from(message.data_len).unwrap() <= size);
                    let last = message.buffers.data.wrapping_add(size as usize - 1);
                    assert!(link.is_inside(message.buffers.data) && link.is_inside(last));
                    // SAFETY: as above.
                    unsafe { last.read_volatile() };
                }
                held.push(message.buffers);
            }
            Ok(None) | Err(Error::BadMessage { .. } | Error::Queue { .. } | Error::Dumped) => {}
            Err(other) => panic!("{other}"),
        }
        if turn % 3 == 0
            && let Some(buffers) = held.pop()
        {
            let done = link.release(buffers);
            assert!(matches!(done, Ok(()) | Err(Error::Dumped)), "what it gave us it takes back: {done:?}");
        }
        let _ = link.queued();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_contents_of_shared_memory_are_survived(
        primary: bool,
        writes in prop::collection::vec(
            (0_usize..7, any::<prop::sample::Index>(),
             prop_oneof![any::<u32>(), 0_u32..10, Just(u32::MAX), Just(0x8000_0000), Just(i32::MAX.cast_unsigned())]),
            1..200,
        ),
    ) {
        let dir = ipc_dir();
        let phy = options(dir.path()).create("fapi", pools()).unwrap();
        let mac = options(dir.path()).attach("fapi").unwrap();
        let link = if primary { &phy } else { &mac };
        let other = if primary { &mac } else { &phy };
        let files = shared_words(dir.path());
        for (turn, (file, at, value)) in writes.iter().enumerate() {
            if turn % 4 == 0 {
                let _ = send(other, 6, 20, (turn % 8 == 0).then_some((PoolId::CpuData, 10)));
            }
            let (mapped, words) = &files[*file];
            let word = at.index(*words);
            // Words 8 and 9 of `_debug` end the link by NVIPC's own rules.
            if *file != 6 || !(8..10).contains(&word) {
                mapped.write(word, *value);
            }
            use_it(link, 3);
        }
        use_it(link, 30);
    }
}

#[test]
fn concurrent_garbage_writes_are_survived() {
    let dir = ipc_dir();
    let phy = options(dir.path()).create("fapi", pools()).unwrap();
    let mac = options(dir.path()).attach("fapi").unwrap();
    let files = shared_words(dir.path());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 0x9e37_79b9_7f4a_7c15_u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let (mapped, words) = &files[(random >> 60) as usize % 6];
                let word = (random >> 20) as usize % words;
                let value = if random & 1 == 0 { (random >> 40) as u32 % 9 } else { (random >> 32) as u32 };
                mapped.write(word, value);
            }
        });
        let users = [&phy, &mac].map(|link| scope.spawn(|| use_it(link, 20_000)));
        let ends = users.map(std::thread::ScopedJoinHandle::join);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        ends.into_iter().for_each(|end| end.unwrap());
    });
    // A repaired link is as good as a new one.
    phy.close();
}

#[test]
fn link_is_restored_after_a_hostile_secondary() {
    if !crate::support::notices_deaths() {
        return;
    }
    let dir = ipc_dir();
    let phy = options(dir.path()).create("fapi", pools()).unwrap();
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    for (mapped, words) in shared_words(dir.path()).iter().take(4) {
        (0..*words).for_each(|word| mapped.write(word, 3));
    }
    use_it(&phy, 20);
    peer.kill();
    crate::support::until("its death is noticed", || phy.recovered().peers == 1);
    // What was held here while the words were garbage is still held.
    let free = crate::support::count_free(&phy, None);
    let mut next = Peer::start(dir.path());
    next.tell("attach fapi");
    while next.ask("receive") != "none" {}
    while phy
        .receive()
        .is_ok_and(|message| message.is_some_and(|message| phy.release(message.buffers).is_ok()))
    {}
    assert!(crate::support::count_free(&phy, None) >= free);
    send(&phy, 4, 10, None).unwrap();
    assert_eq!(next.ask("receive"), "4");
}

/// The counter has room for one notification and several threads see that: all but one would wait for a reader that has
/// gone.
#[test]
fn peer_with_a_full_counter_blocks_no_notify() {
    notify_with_a_full_counter(2);
}

#[test]
#[ignore = "long: 40 full counters"]
fn peer_with_a_full_counter_never_blocks_a_notify() {
    notify_with_a_full_counter(40);
}

fn notify_with_a_full_counter(rounds: u32) {
    for _ in 0..rounds {
        let dir = ipc_dir();
        let phy = options(dir.path()).create("fapi", pools()).unwrap();
        let mac = options(dir.path()).attach("fapi").unwrap();
        crate::support::until("they have met", || phy.has_peer());
        nix::unistd::write(mac.fd(), &(u64::MAX - 2).to_ne_bytes()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..2000).for_each(|_| phy.notify().unwrap()));
            }
            (0..1000).for_each(|_| assert!(mac.take().unwrap()));
        });
        // Closing does not block either.
        phy.close();
    }
}

#[test]
fn descriptors_that_are_not_eventfds_are_refused() {
    use nix::sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, socket,
    };
    use std::os::fd::AsRawFd;
    let dir = ipc_dir();
    let phy = options(dir.path()).create("fapi", pools()).unwrap();
    let call = |bytes: &[u8], fd: Option<i32>| {
        let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let path = dir.path().join("fapi_un_sock_server");
        connect(stream.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        let fds: Vec<_> = fd.into_iter().collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let parts = [std::io::IoSlice::new(bytes)];
        sendmsg::<UnixAddr>(stream.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None).unwrap();
        stream
    };
    let null = std::fs::File::open("/dev/null").unwrap();
    let _callers = [
        call(&[0, 0], Some(null.as_raw_fd())),
        call(&[0, 0], None),
        call(&[0, 9], None),
        call(&[7, 7], Some(null.as_raw_fd())),
    ];
    let mut peer = Peer::start(dir.path());
    peer.tell("attach fapi");
    crate::support::until("the honest one has connected", || phy.has_peer());
    phy.notify().unwrap();
    assert_eq!(peer.ask("wait"), "true");
}
