//! Shared by the targets that need a link.
#![allow(dead_code, reason = "each target uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use shmesh::config::{LinkConfig, PoolConfig, PoolId, RingMode};
use shmesh::{Link, SeatIndex};

/// The directory for links: below `SHMESH_FUZZ_DIR`, which is removed after the run, or in `/dev/shm`.
pub fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let parent = std::env::var_os("SHMESH_FUZZ_DIR").unwrap_or_else(|| "/dev/shm".into());
        let dir = Path::new(&parent).join(format!("shmesh-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory for links");
        dir
    })
}

/// Removes all files of the last input.
pub fn clear() {
    for entry in std::fs::read_dir(dir()).expect("the directory").map_while(Result::ok) {
        let _ = std::fs::remove_file(entry.path());
    }
}

pub const FILES: [&str; 4] = ["link_shm", "link_cpu_msg", "link_cpu_data", "link_cpu_large"];
pub const MSG_BYTES: u32 = 64;
pub const DATA_BYTES: u32 = 192;

/// The smallest link with all features: it has few words, so that random writes hit them.
pub fn config(single: bool, notify: bool) -> LinkConfig {
    let mut config = LinkConfig::new("link".parse().expect("a name"));
    config.ring_len = 4;
    config.ring_mode = if single { RingMode::Spsc } else { RingMode::Mpmc };
    config.notify = notify;
    config.spin_us = 0;
    config.pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: MSG_BYTES, pool_len: 6 };
    config.pools[PoolId::CpuData.index()] = PoolConfig { buf_size_bytes: DATA_BYTES, pool_len: 3 };
    config.pools[PoolId::CpuLarge.index()] = PoolConfig { buf_size_bytes: DATA_BYTES, pool_len: 2 };
    config
}

/// The input. Once it is used up, it yields zeros.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A value to replace `old`: an interesting one more often than a random one.
    pub fn value(&mut self, old: u64) -> u64 {
        match self.byte() % 8 {
            0 => 0,
            1 => u64::MAX,
            2 => u64::from(self.byte()),
            3 => old ^ 1 << (self.byte() % 64),
            4 => old.wrapping_add(u64::from(self.byte())),
            5 => old.wrapping_sub(u64::from(self.byte())),
            6 => old & !0xffff | u64::from(self.half()),
            _ => self.word(),
        }
    }
}

/// One call of the library on a link with arbitrary contents. It may fail, but must return, and its result must be within
/// bounds.
pub fn call(link: &Link, which: u8, bytes: &mut Bytes<'_>) {
    match which % 16 {
        0 | 1 => {
            let len = usize::from(bytes.byte() % 52);
            let _ = link.send_inline(i32::from(bytes.byte()), 0, &[7; 52][..len]);
        }
        2 | 3 => {
            if let Ok(mut loan) = link.loan() {
                let len = usize::from(bytes.byte() % 70);
                if let Ok(part) = loan.resize_msg(len) {
                    part.fill(1);
                }
                let _ = loan.with_msg_id(1).send();
            }
        }
        4 | 5 => {
            let pool = if which % 2 == 0 { PoolId::CpuData } else { PoolId::CpuLarge };
            if let Ok(mut loan) = link.loan_with(pool) {
                let len = usize::from(bytes.byte());
                if let Ok(part) = loan.resize_data(len) {
                    part.fill(1);
                }
                let _ = loan.send();
            }
        }
        6..=8 => {
            if let Ok(Some(message)) = link.receive() {
                read(&message);
            }
        }
        9 => {
            let mut messages = Vec::new();
            let max = usize::from(bytes.byte() % 8);
            if let Ok(count) = link.receive_batch(&mut messages, max) {
                assert!(count <= max && messages.len() == count);
            }
            messages.iter().for_each(read);
        }
        10 => {
            let _ = link.recover();
        }
        11 => {
            if let Some(seat) = SeatIndex::from_wild(u64::from(bytes.byte() % 70)) {
                let _ = link.evict(seat);
            }
        }
        12 => {
            let others: Vec<_> = link.participants().collect();
            if let Some(other) = others.get(usize::from(bytes.byte()) % others.len().max(1)) {
                let _ = link.recover_participant(other.seat, other.word);
            }
        }
        13 => {
            assert!(link.queued() <= link.ring_len() as usize);
            let _ = (link.has_message(), link.participants().count());
        }
        14 => {
            let _ = (link.post(), link.wait_tti(Some(std::time::Duration::ZERO)), link.take_signal());
            let _ = (link.notify(), link.wait(Some(std::time::Duration::ZERO)));
        }
        _ => {
            if let Ok(clone) = link.try_clone() {
                let _ = clone.loan().and_then(|loan| Ok(loan.send()?));
                let _ = clone.receive().map(|message| message.iter().for_each(read));
            }
        }
    }
}

/// Reads all bytes of a message.
pub fn read(message: &shmesh::Message<'_>) {
    assert!(message.msg().len() <= (MSG_BYTES as usize).max(shmesh::INLINE_MAX_BYTES) && message.data().len() <= DATA_BYTES as usize);
    let sum = |bytes: &[u8]| bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    std::hint::black_box(sum(message.msg()).wrapping_add(sum(message.data())));
}
