//! `shmesh capture`, as users call it, and its file read back.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pcap_parser::pcapng::parse_block_le;
use pcap_parser::{Block, Linktype, OptionCode};
use shmesh::config::{LinkConfig, PoolId, RingMode};
use shmesh::{Link, LinkOptions, Side};
use shmesh_testing::until;

const HANGS: Duration = Duration::from_secs(120);
/// A capture whose test has failed ends after this time.
const ENDS_S: &str = "300";

/// A packet of the file: its time in nanoseconds, its header's fields, and the bytes.
#[derive(Debug)]
struct Packet {
    nanos: u64,
    from_secondary: bool,
    flags: u8,
    pool: u8,
    ids: (i32, i32),
    lens: (u32, u32),
    position: u64,
    msg: Vec<u8>,
    data: Vec<u8>,
    whole: u32,
}

/// Reads all blocks: the name of the interface, the packets, and what was received and dropped if it says so.
fn read(mut bytes: &[u8]) -> (String, Vec<Packet>, Option<(u64, u64)>) {
    let (mut name, mut packets, mut counted) = (String::new(), Vec::new(), None);
    while !bytes.is_empty() {
        let (rest, block) = parse_block_le(bytes).unwrap();
        bytes = rest;
        let long = |value: &[u8]| u64::from_le_bytes(value[..8].try_into().unwrap());
        match block {
            Block::SectionHeader(section) => assert_eq!(section.major_version, 1),
            Block::InterfaceDescription(interface) => {
                assert_eq!((interface.linktype, interface.if_tsresol), (Linktype(147), 9));
                let option = interface.options.iter().find(|option| option.code == OptionCode(2)).unwrap();
                name = String::from_utf8(option.as_bytes().unwrap().to_vec()).unwrap();
            }
            Block::EnhancedPacket(packet) => packets.push(packet_of(
                &packet.data[..packet.caplen as usize],
                u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low),
                packet.origlen,
            )),
            Block::InterfaceStatistics(statistics) => {
                let value = |code| {
                    let option =
                        statistics.options.iter().find(|option| option.code == OptionCode(code)).unwrap();
                    long(option.value())
                };
                counted = Some((value(4), value(5)));
            }
            other => panic!("{other:?}"),
        }
    }
    (name, packets, counted)
}

fn packet_of(bytes: &[u8], nanos: u64, whole: u32) -> Packet {
    assert_eq!(bytes[0], 1);
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (msg, data) = bytes[32..].split_at(word(20) as usize);
    Packet {
        nanos,
        from_secondary: bytes[1] == 1,
        flags: bytes[2],
        pool: bytes[3],
        ids: (word(4).cast_signed(), word(8).cast_signed()),
        lens: (word(12), word(16)),
        position: u64::from_le_bytes(bytes[24..32].try_into().unwrap()),
        msg: msg.to_vec(),
        data: data.to_vec(),
        whole,
    }
}

fn link(dir: &Path) -> (Link, Link) {
    let mut config = LinkConfig::new("fronthaul".parse().unwrap());
    config.ring_mode = RingMode::Mpmc;
    config.ring_len = 16;
    let options = LinkOptions::new().dir(dir);
    (options.create(&config).unwrap(), options.attach("fronthaul", Side::Secondary).unwrap())
}

/// With a DATA part, in a MSG buffer, and inline.
fn fill(sender: &Link) {
    let mut loan = sender.loan_with(PoolId::CpuData).unwrap();
    loan.resize_msg(5).unwrap().copy_from_slice(b"first");
    loan.resize_data(3000).unwrap().fill(0xd1);
    loan.with_msg_id(101).with_cell_id(-1).send().unwrap();
    let mut loan = sender.loan().unwrap();
    loan.resize_msg(901).unwrap().fill(0x5a);
    loan.with_msg_id(102).send().unwrap();
    sender.send_inline(103, 7, b"inline").unwrap();
}

fn capture(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shmesh"));
    command.args(["capture", "fronthaul"]).args(args).env("SHMESH_DIR", dir).stdin(Stdio::null());
    command
}

#[test]
fn messages_are_packets_with_direction_ids_and_time() {
    let dir = tempfile::tempdir().unwrap();
    let (phy, mac) = link(dir.path());
    let before = SystemTime::now();
    fill(&mac);
    phy.send_inline(1, 2, b"back").unwrap();
    let file = dir.path().join("out.pcapng");
    let output = capture(dir.path(), &["--count", "4", "-o", file.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("recorded 4 messages; too late for 0"),
        "{output:?}"
    );
    let (name, packets, counted) = read(&std::fs::read(&file).unwrap());
    assert_eq!((name.as_str(), counted), ("fronthaul", Some((4, 0))));
    let [back, data, msg, inline] = &packets[..] else { panic!("{packets:?}") };
    assert_eq!((back.from_secondary, back.ids, back.msg.as_slice()), (false, (1, 2), &b"back"[..]));
    assert_eq!((data.from_secondary, data.ids, data.pool, data.flags), (true, (101, -1), 1, 0));
    assert_eq!((data.lens, data.position, data.whole), ((5, 3000), 0, 32 + 3005));
    assert_eq!((data.msg.as_slice(), data.data.as_slice()), (&b"first"[..], &[0xd1; 3000][..]));
    assert_eq!((msg.ids, msg.msg.as_slice(), msg.data.len()), ((102, 0), &[0x5a; 901][..], 0));
    assert_eq!((inline.flags, inline.position, inline.msg.as_slice()), (1, 2, &b"inline"[..]));
    let nanos = |at: SystemTime| u64::try_from(at.duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
    assert!(packets.iter().all(|packet| (nanos(before)..=nanos(SystemTime::now())).contains(&packet.nanos)));
    assert!(packets.is_sorted_by_key(|packet| packet.nanos));

    // They are all still there.
    assert_eq!((phy.queued(), mac.queued()), (3, 1));
}

/// A capture takes no seat, so it is no reader and the writer does not wait for it.
#[test]
fn capture_of_a_broadcast_link_is_no_reader() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = LinkConfig::new("fronthaul".parse().unwrap());
    config.ring_mode = RingMode::Broadcast;
    config.ring_len = 8;
    let options = LinkOptions::new().dir(dir.path());
    let writer = options.create(&config).unwrap();
    let reader = options.attach("fronthaul", Side::Secondary).unwrap();
    let mut captured =
        capture(dir.path(), &["-o", "-", "--count", "20", "--interval-us", "0", "--seconds", ENDS_S])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
    let mut file = Vec::new();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| captured.stdout.take().unwrap().read_to_end(&mut file));
        // Until it has seen enough, whenever it has started.
        for id in 0.. {
            if reading.is_finished() {
                break;
            }
            writer.send_inline(id, 0, &id.to_le_bytes()).unwrap();
            drop(reader.receive().unwrap().expect("each reader gets it"));
            assert_eq!(writer.readers(), 1, "the capture has no seat");
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    assert!(captured.wait().unwrap().success());
    let (_, packets, _) = read(&file);
    assert_eq!(packets.len(), 20);
    assert!(packets.iter().all(|packet| packet.msg == packet.ids.0.to_le_bytes()));
    assert!(packets.is_sorted_by_key(|packet| packet.position));
}

#[test]
fn packets_are_no_longer_than_wireshark_reads() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = LinkConfig::new("fronthaul".parse().unwrap());
    config.pools[PoolId::CpuData.index()].buf_size_bytes = 600_000;
    config.pools[PoolId::CpuData.index()].pool_len = 2;
    let link = LinkOptions::new().dir(dir.path()).create(&config).unwrap();
    let mut loan = link.loan_with(PoolId::CpuData).unwrap();
    loan.resize_msg(5).unwrap().copy_from_slice(b"first");
    loan.resize_data(600_000).unwrap().fill(0xd1);
    loan.send().unwrap();
    let file = dir.path().join("out.pcapng");
    for (limit, kept, flags) in [("1000000", (5, 262_144 - 37), 0), ("0", (0, 0), 0)] {
        let args = ["--count", "1", "--limit-bytes", limit, "-o", file.to_str().unwrap()];
        assert!(capture(dir.path(), &args).output().unwrap().status.success());
        let (_, packets, _) = read(&std::fs::read(&file).unwrap());
        let [packet] = &packets[..] else { panic!("{packets:?}") };
        assert_eq!((packet.msg.len(), packet.data.len()), kept);
        assert_eq!((packet.lens, packet.whole, packet.flags), ((5, 600_000), 32 + 600_005, flags));
    }
}

/// Waits until so many packets are in the file.
fn wait_for(file: &Path, count: usize) {
    until("the file grows", || std::fs::read(file).is_ok_and(|bytes| read(&bytes).1.len() >= count));
}

#[test]
fn capture_follows_a_live_link_until_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let (phy, mac) = link(dir.path());
    let file = dir.path().join("out.pcapng");
    let limits = ["--limit-bytes", "4", "--seconds", ENDS_S, "-o", file.to_str().unwrap()];
    let args = [&["--msg-id", "0x65", "--msg-id", "103"][..], &limits].concat();
    let child = capture(dir.path(), &args).stdout(Stdio::piped()).spawn().unwrap();
    let wait_for = |count| wait_for(&file, count);
    // It has begun when it has seen something that waits.
    fill(&mac);
    wait_for(2);
    for _ in 0..3 {
        drop(phy.receive().unwrap());
    }
    fill(&mac);
    wait_for(4);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(child.id().cast_signed()),
        nix::sys::signal::Signal::SIGINT,
    )
    .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let (_, packets, counted) = read(&std::fs::read(&file).unwrap());
    assert_eq!(packets.iter().map(|packet| packet.ids.0).collect::<Vec<_>>(), [101, 103, 101, 103]);
    assert_eq!((packets[0].msg.as_slice(), packets[0].data.len(), packets[0].whole), (&b"firs"[..], 4, 3037));
    assert!(counted.is_some());
}

#[test]
fn capture_continues_after_both_sides_restart() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.pcapng");
    let (phy, mac) = link(dir.path());
    let args = ["--count", "9", "--seconds", ENDS_S, "-o", file.to_str().unwrap()];
    let child = capture(dir.path(), &args).stdout(Stdio::piped()).spawn().unwrap();
    let wait_for = |count| wait_for(&file, count);
    fill(&mac);
    wait_for(3);
    let receive_all = |link: &Link| (0..3).for_each(|_| drop(link.receive().unwrap().unwrap()));
    receive_all(&phy);
    // Where nothing waits, the last to leave removes the link.
    drop((phy, mac));
    let (phy, mac) = link(dir.path());
    fill(&mac);
    receive_all(&phy);
    wait_for(6);
    fill(&phy);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("recorded 9 messages") && said.contains("created again 1 times"), "{said}");
    let (_, packets, _) = read(&std::fs::read(&file).unwrap());
    assert_eq!(packets.iter().map(|packet| packet.ids.0).collect::<Vec<_>>(), [101, 102, 103].repeat(3));
}

#[test]
fn capture_blocked_on_a_pipe_can_be_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let _link = link(dir.path());
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut child = capture(dir.path(), &["-o", pipe.to_str().unwrap()]).spawn().unwrap();
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    // Until it waits for signals, one ends it as any program.
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    until("it waits for signals", || threads() > 1);
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() >= HANGS {
            child.kill().unwrap();
            panic!("it does not end");
        }
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn standard_output_has_only_the_capture() {
    let dir = tempfile::tempdir().unwrap();
    let missing = capture(dir.path(), &["-o", "-"]).output().unwrap();
    assert!(
        !missing.status.success() && String::from_utf8_lossy(&missing.stderr).contains("not found"),
        "{missing:?}"
    );
    let (phy, _mac) = link(dir.path());
    phy.send_inline(1, 2, b"back").unwrap();
    let output = capture(dir.path(), &["-o", "-", "--seconds", "0.1", "--from", "primary"]).output().unwrap();
    assert_eq!(read(&output.stdout).1.len(), 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("recorded 1 messages"), "{output:?}");
    let nowhere = capture(dir.path(), &["-o", "/nowhere/at/all"]).output().unwrap();
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot write /nowhere/at/all"), "{nowhere:?}");
    let bad = capture(dir.path(), &["-o", "-", "--msg-id", "eighty"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(2));
}
