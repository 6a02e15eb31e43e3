//! The header: the first two lines of every segment.
//!
//! ```text
//! word  0  magic "SHMESH" and the layout version in the upper 16 bits
//!       1  which segment: 0 the link's own, 1 + id a pool
//!       2  size of the segment in bytes
//!       3  epoch: a random number that all segments of one link share
//!       4  ring capacity; bit 32: one producer and one consumer; bit 33: one receiving process a side
//!       5-9  per pool: buffer size in the upper half, number of buffers in the lower
//!       10 how the link is run: flags, and microseconds to spin before sleeping
//!       11 broadcast rings: 1 + what happens to slow readers, milliseconds until they are evicted, history
//!       12 sampling interval of latencies; 0: none
//!       13 requests that each participant of the secondary side can have pending; 0: none
//!       15 checksum of words 0 to 14
//! ```
//!
//! It is written once, before the segment has a name or leaves its creator, and never changes. A process that opens a segment
//! copies it once and uses only the copy.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::layout::{HEADER_LINES, LinkLayout, LinkShape, PoolLayout};
use super::lines::Lines;
use crate::config::{BroadcastConfig, PoolId, SlowReaders};
use crate::sync::{LINE_BYTES, Ordering, WORDS_PER_LINE};

/// The version of the layout. It changes with every change of a position or of the meaning of a word.
pub(crate) const LAYOUT_VERSION: u16 = 2;
const MAGIC: u64 = u64::from_le_bytes(*b"SHMESH\0\0");
const MAGIC_MASK: u64 = (1 << 48) - 1;
const WORDS: usize = 16;
const LATENCY: usize = 12;
const REQUESTS: usize = 13;
const CHECKSUM: usize = WORDS - 1;
const SINGLE: u64 = 1 << 32;
const ONE_RECEIVER: u64 = 1 << 33;
const NOTIFY: u64 = 1 << 32;

/// Settings of a link that all its participants share and that do not change the layout.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Conduct {
    pub(crate) notify: bool,
    pub(crate) spin_us: u32,
    /// Each side takes one process only.
    pub(crate) one_receiver: bool,
}

/// A checked copy of a header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Header {
    /// The pool in the segment; `None` for the link's own segment.
    pub(crate) pool: Option<PoolId>,
    pub(crate) epoch: u64,
    pub(crate) shape: LinkShape,
    pub(crate) conduct: Conduct,
}

/// Why a segment cannot be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Unusable {
    NotOurs,
    Version(u16),
    Damaged,
    Size { expected: u64 },
}

impl Header {
    /// Size of the segment that this header describes.
    pub(crate) fn bytes(&self) -> u64 {
        match self.pool {
            None => LinkLayout::of(&self.shape).bytes(),
            Some(pool) => {
                let (size, len) = self.shape.pools[pool as usize];
                PoolLayout::of(pool, size, len).bytes()
            }
        }
    }

    fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[0] = MAGIC | u64::from(LAYOUT_VERSION) << 48;
        words[1] = self.pool.map_or(0, |pool| pool as u64 + 1);
        words[2] = self.bytes();
        words[3] = self.epoch;
        words[4] = u64::from(self.shape.ring_capacity)
            | if self.shape.single { SINGLE } else { 0 }
            | if self.conduct.one_receiver { ONE_RECEIVER } else { 0 };
        for (word, (size, len)) in words[5..].iter_mut().zip(self.shape.pools) {
            *word = u64::from(size) << 32 | u64::from(len);
        }
        words[10] = u64::from(self.conduct.spin_us) | if self.conduct.notify { NOTIFY } else { 0 };
        words[11] = self.shape.broadcast.map_or(0, broadcast_word);
        words[LATENCY] = u64::from(self.shape.latency_sample);
        words[REQUESTS] = u64::from(self.shape.request_window);
        words[CHECKSUM] = checksum(&words);
        words
    }

    /// Writes the header. The segment must not be shared yet.
    pub(crate) fn write(&self, lines: &Lines) {
        for (i, word) in self.words().into_iter().enumerate() {
            lines[i / WORDS_PER_LINE].word(i % WORDS_PER_LINE).store(word, Ordering::Release);
        }
    }

    /// Copies and checks the header of a segment's file by reading it: mapping or reserving it first would allocate
    /// pages of a sparse file of another program.
    pub(crate) fn of_file(file: &File) -> io::Result<Result<Self, Unusable>> {
        let metadata = file.metadata()?;
        let mut bytes = [0; HEADER_LINES * LINE_BYTES];
        if !metadata.is_file() || file.read_exact_at(&mut bytes, 0).is_err() {
            return Ok(Err(Unusable::NotOurs));
        }
        let lines = Lines::heap(HEADER_LINES);
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let word = u64::from_ne_bytes(*word);
            lines[i / WORDS_PER_LINE].word(i % WORDS_PER_LINE).store(word, Ordering::Relaxed);
        }
        let (len, page) = (metadata.len(), metadata.blksize().max(1));
        Ok(match Self::read(&lines, len) {
            // hugetlbfs rounds sizes up to whole huge pages. If the rounded size overflows, the header is wrong.
            Err(Unusable::Size { expected })
                if expected != len && expected.checked_next_multiple_of(page) == Some(len) =>
            {
                Self::read(&lines, expected)
            }
            read => read,
        })
    }

    /// Copies and checks a header. `len` is the size of the segment as the kernel reports it.
    pub(crate) fn read(lines: &Lines, len: u64) -> Result<Self, Unusable> {
        let words: [u64; WORDS] = std::array::from_fn(|i| {
            lines[i / WORDS_PER_LINE].word(i % WORDS_PER_LINE).load(Ordering::Acquire)
        });
        if words[0] & MAGIC_MASK != MAGIC {
            return Err(Unusable::NotOurs);
        }
        let version = (words[0] >> 48) as u16;
        if version != LAYOUT_VERSION {
            return Err(Unusable::Version(version));
        }
        let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        let header = Self {
            pool: match words[1] {
                0 => None,
                id => Some(u32::try_from(id - 1).ok().and_then(PoolId::from_index).ok_or(Unusable::Damaged)?),
            },
            epoch: words[3],
            shape: LinkShape {
                ring_capacity: half(words[4]),
                single: words[4] & SINGLE != 0,
                broadcast: broadcast_of(words[11]).ok_or(Unusable::Damaged)?,
                pools: std::array::from_fn(|i| (half(words[5 + i] >> 32), half(words[5 + i]))),
                latency_sample: u32::try_from(words[LATENCY]).map_err(|_| Unusable::Damaged)?,
                request_window: u32::try_from(words[REQUESTS]).map_err(|_| Unusable::Damaged)?,
            },
            conduct: Conduct {
                notify: words[10] & NOTIFY != 0,
                spin_us: half(words[10]),
                one_receiver: words[4] & ONE_RECEIVER != 0,
            },
        };
        // The sums below cannot overflow for a sane shape, so this check comes first.
        if words[CHECKSUM] != checksum(&words) || !header.shape.is_sane() {
            return Err(Unusable::Damaged);
        }
        if header.bytes() != len || words[2] != len {
            return Err(Unusable::Size { expected: words[2] });
        }
        Ok(header)
    }
}

const SLOW: [SlowReaders; 3] = [SlowReaders::Wait, SlowReaders::Skip, SlowReaders::Evict];
const EVICT_AFTER_SHIFT: u32 = 8;
const HISTORY_SHIFT: u32 = 32;

fn broadcast_word(rules: BroadcastConfig) -> u64 {
    let slow = 1 + SLOW.iter().position(|slow| *slow == rules.slow).unwrap_or(0) as u64;
    u64::from(rules.history) << HISTORY_SHIFT | u64::from(rules.evict_after_ms) << EVICT_AFTER_SHIFT | slow
}

/// The meaning of word 11; `None` if no version of this library writes that value.
fn broadcast_of(word: u64) -> Option<Option<BroadcastConfig>> {
    let Some(slow) = (word & 0xff).checked_sub(1) else { return (word == 0).then_some(None) };
    let slow = *SLOW.get(usize::try_from(slow).ok()?)?;
    let history = u32::try_from(word >> HISTORY_SHIFT).ok()?;
    let evict_after_ms = u32::try_from(word >> EVICT_AFTER_SHIFT & 0xff_ffff).ok()?;
    Some(Some(BroadcastConfig { slow, history, evict_after_ms }))
}

/// FNV-1a over the words: detects accidents, not attacks.
fn checksum(words: &[u64; WORDS]) -> u64 {
    words[..CHECKSUM]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            pool: Some(PoolId::CpuData),
            epoch: 42,
            shape: LinkShape {
                ring_capacity: 8,
                single: false,
                broadcast: None,
                pools: [(64, 4), (1000, 3), (0, 0), (0, 0), (0, 0)],
                request_window: 3,
                latency_sample: 64,
            },
            conduct: Conduct { notify: true, spin_us: 7, one_receiver: true },
        }
    }

    #[test]
    fn written_header_is_read_back() {
        let lines = Lines::heap(2);
        header().write(&lines);
        assert_eq!(Header::read(&lines, header().bytes()), Ok(header()));
    }

    #[test]
    fn broadcast_word_is_read_back() {
        for slow in SLOW {
            let rules =
                BroadcastConfig { slow, history: 7, evict_after_ms: crate::config::MAX_EVICT_AFTER_MS };
            assert_eq!(broadcast_of(broadcast_word(rules)), Some(Some(rules)));
        }
        assert_eq!((broadcast_of(0), broadcast_of(4), broadcast_of(1 << 32)), (Some(None), None, None));
    }

    #[test]
    fn every_changed_bit_is_detected() {
        // Miri takes 40 s for all of them.
        for bit in (0..WORDS * 64).step_by(if cfg!(miri) { 61 } else { 1 }) {
            let lines = Lines::heap(2);
            header().write(&lines);
            let word = lines[bit / 64 / WORDS_PER_LINE].word(bit / 64 % WORDS_PER_LINE);
            word.store(word.load(Ordering::Relaxed) ^ 1 << (bit % 64), Ordering::Relaxed);
            assert!(Header::read(&lines, header().bytes()).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn each_kind_of_damage_has_its_error() {
        let lines = Lines::heap(2);
        assert_eq!(Header::read(&lines, 4096), Err(Unusable::NotOurs));
        header().write(&lines);
        let bytes = header().bytes();
        assert_eq!(Header::read(&lines, bytes - 1), Err(Unusable::Size { expected: bytes }));
        lines[0].word(0).store(MAGIC | 9 << 48, Ordering::Relaxed);
        assert_eq!(Header::read(&lines, bytes), Err(Unusable::Version(9)));
        header().write(&lines);
        lines[0].word(3).store(43, Ordering::Relaxed);
        assert_eq!(Header::read(&lines, bytes), Err(Unusable::Damaged));
    }
}
