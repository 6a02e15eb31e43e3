//! One link mapped twice in one process, at different addresses: what one handle writes the other reads, and shared memory
//! holds no address, which would mean something in one of the two mappings only.

#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small numbers")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use shmesh::config::{Backing, LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::{Link, LinkOptions, Side};

/// The ranges of addresses at which segments of `link` are mapped, with the names of their files.
fn mappings(link: &str) -> Vec<(String, Range<u64>)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // `start-end rights offset device inode path`
    let lines: Vec<Vec<_>> = maps.lines().map(|line| line.split_whitespace().collect()).collect();
    let name_of = |line: &[&str]| {
        let file = line.get(5)?.rsplit(['/', ':']).next()?;
        file.strip_prefix(link)?.starts_with('_').then(|| file.to_owned())
    };
    let mut found = Vec::new();
    for line in &lines {
        // The creator of a named segment mapped it before it had a name: identified by its inode.
        let same_file = |other: &&Vec<&str>| other[3..5] == line[3..5];
        if let Some(file) = lines.iter().filter(same_file).find_map(|other| name_of(other)) {
            let (start, end) = line[0].split_once('-').unwrap();
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            found.push((file, address(start)..address(end)));
        }
    }
    found
}

/// Where in `mappings` a word lies that is an address in one of them.
fn addresses_in(mappings: &[(String, Range<u64>)]) -> Vec<(String, u64)> {
    // By file, because a reference into memory that others write would not be sound.
    let memory = File::open("/proc/self/mem").unwrap();
    let mut found = Vec::new();
    for (file, range) in mappings {
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
        memory.read_exact_at(&mut bytes, range.start).unwrap();
        for (offset, word) in (0_u64..).step_by(8).zip(bytes.as_chunks::<8>().0) {
            let word = u64::from_ne_bytes(*word);
            if mappings.iter().any(|(_, range)| range.contains(&word)) {
                found.push((file.clone(), offset));
            }
        }
    }
    found
}

fn exchange(from: &Link, to: &Link, id: i32) {
    let mut loan = from.loan_with(PoolId::CpuData).unwrap();
    let text = format!("message {id}");
    loan.resize_msg(text.len()).unwrap().copy_from_slice(text.as_bytes());
    loan.resize_data(1000).unwrap().fill(id as u8);
    loan.with_msg_id(id).send().unwrap();
    from.send_inline(-id, 0, text.as_bytes()).unwrap();

    let message = to.receive().unwrap().unwrap();
    assert_eq!((message.msg_id(), message.msg()), (id, text.as_bytes()));
    assert_eq!(message.data(), [id as u8; 1000]);
    let inline = to.receive().unwrap().unwrap();
    assert_eq!((inline.msg_id(), inline.msg()), (-id, text.as_bytes()));
}

fn check(name: &str, backing: Backing, mode: RingMode) {
    let dir = tempfile::tempdir().unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let mut config = LinkConfig::new(name.parse().unwrap());
    config.backing = backing;
    config.ring_mode = mode;
    config.ring_len = 4;
    config.pools = [PoolConfig::DISABLED; PoolId::COUNT];
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 64, pool_len: 5 };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: 1000, pool_len: 5 };
    let primary = options.create(&config).unwrap();
    let secondary = options.attach(name, Side::Secondary).unwrap();

    let all = mappings(name);
    assert_eq!(all.len(), 2 * 3, "the link and two pools, each mapped twice: {all:?}");
    for id in 1..20 {
        exchange(&primary, &secondary, id);
        exchange(&secondary, &primary, id);
    }
    // In each state that a buffer can have: loaned, sent, received.
    let _loan = primary.loan_with(PoolId::CpuData).unwrap();
    primary.loan_with(PoolId::CpuData).unwrap().send().unwrap();
    secondary.loan_with(PoolId::CpuData).unwrap().send().unwrap();
    let _received = primary.receive().unwrap().unwrap();
    assert_eq!(addresses_in(&all), [], "{name}");

    // And the search finds what it looks for, through either mapping.
    let mut loan = secondary.loan().unwrap();
    loan.resize_msg(8).unwrap().copy_from_slice(&all[0].1.start.to_ne_bytes());
    assert_eq!(addresses_in(&all).len(), 2);
}

#[test]
fn named() {
    check("twice-named-spsc", Backing::Named, RingMode::Spsc);
    check("twice-named-mpmc", Backing::Named, RingMode::Mpmc);
}

#[test]
fn memfd() {
    check("twice-memfd-spsc", Backing::Memfd, RingMode::Spsc);
    check("twice-memfd-mpmc", Backing::Memfd, RingMode::Mpmc);
}
