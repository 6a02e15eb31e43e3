//! Names, sizes and offsets of NVIPC's files, as in releases 25-3 and 26-1.
//!
//! | file | content |
//! |---|---|
//! | `<prefix>_shm` | queue s2m, queue m2s, descriptors |
//! | `<prefix>_cpu_msg` and the other pools | queue of free buffers, buffers |
//! | `<prefix>_debug` | counters, configuration, times of messages and of posts |
//! | `<prefix>_fw` | six counters and a queue, for NVIPC's tracing, which is left off here |
//! | `<prefix>_cmd_ring` | two queues of 64 commands of 8 bytes, from NVIPC's tools, which are not executed here |
//!
//! Nothing is padded, so buffers begin 32 bytes after a cache line. The layout is NVIPC's and cannot be changed.

use shmesh::config::{PoolConfig, PoolId};

use crate::{Error, Result};

/// The version word of releases 25-3 and 26-1, which share a layout.
pub(crate) const VERSION: i32 = 2530;
/// Longest prefix: 32 bytes with the NUL.
pub(crate) const PREFIX_MAX_BYTES: usize = 31;
/// Maximum number of buffers of a pool. NVIPC itself has no limit.
const POOL_LEN_MAX: u32 = 1 << 24;
/// Longest buffer: sizes are signed 32-bit words.
const BUF_SIZE_MAX: u32 = i32::MAX as u32;
/// Maximum size of one segment in bytes.
const SEGMENT_MAX_BYTES: u64 = 1 << 40;

/// Words before the slots of a queue: head, tail, number of enqueued values, number of dequeued values.
pub(crate) const QUEUE_WORDS: usize = 4;

/// Size of a queue of `len` slots in bytes.
pub(crate) const fn queue_bytes(len: usize) -> usize {
    (QUEUE_WORDS + len) * 8
}

/// Size of a descriptor in 32-bit words.
pub(crate) const INFO_WORDS: usize = 8;
pub(crate) const INFO_MSG_ID: usize = 0;
pub(crate) const INFO_CELL_ID: usize = 1;
pub(crate) const INFO_MSG_LEN: usize = 2;
pub(crate) const INFO_DATA_LEN: usize = 3;
pub(crate) const INFO_DATA_INDEX: usize = 4;
pub(crate) const INFO_DATA_POOL: usize = 5;
pub(crate) const INFO_DIRECTION: usize = 6;
pub(crate) const INFO_REFERENCES: usize = 7;

/// Offset of the descriptors in `_shm`.
pub(crate) const fn infos_at(msg_len: usize) -> usize {
    2 * queue_bytes(msg_len)
}

/// Size of `_shm` in bytes.
pub(crate) const fn shm_bytes(msg_len: usize) -> usize {
    infos_at(msg_len) + 4 * INFO_WORDS * msg_len
}

/// Size of a pool in host memory in bytes.
pub(crate) const fn pool_bytes(pool: PoolConfig) -> u64 {
    queue_bytes(pool.pool_len as usize) as u64 + pool.payload_bytes()
}

/// Offset of the word in `_debug` that is set during a dump, which ends the calls of both sides.
pub(crate) const DUMPING_AT: usize = 32;
/// Offset of the configuration in `_debug`.
pub(crate) const CONFIG_AT: usize = 40;
pub(crate) const CONFIG_BYTES: usize = 720;
/// Offset of the timestamps in `_debug`, and the distance between the timestamps of two messages.
pub(crate) const TIMES_AT: usize = CONFIG_AT + CONFIG_BYTES;
pub(crate) const TIME_BYTES: usize = 96;
/// Offset of the time of sending in the timestamps of a message.
pub(crate) const TIME_OF_SEND: usize = 16;
const POST_TIME_BYTES: usize = 32;

/// Size of `_debug` in bytes.
pub(crate) const fn debug_bytes(msg_len: usize) -> usize {
    TIMES_AT + (TIME_BYTES + 2 * POST_TIME_BYTES) * msg_len
}

/// Offset of the queue in `_fw`.
pub(crate) const FORWARD_QUEUE_AT: usize = 24;

/// Size of `_fw` in bytes.
pub(crate) const fn forward_bytes(msg_len: usize) -> usize {
    FORWARD_QUEUE_AT + queue_bytes(msg_len)
}

/// Slots of each queue of `_cmd_ring`, and size of a command in bytes.
pub(crate) const COMMANDS: usize = 64;
const COMMAND_BYTES: usize = 8;

/// Size of `_cmd_ring` in bytes.
pub(crate) const COMMAND_RING_BYTES: usize = 2 * queue_bytes(COMMANDS) + COMMANDS * COMMAND_BYTES;

/// A named semaphore of glibc on 64-bit machines: value and waiters, then 128 for "shared between processes".
pub(crate) const SEMAPHORE: [u32; 8] = [0, 0, 128, 0, 0, 0, 0, 0];

/// The file names of one prefix.
#[derive(Clone, Debug)]
pub(crate) struct SegmentNames(String);

impl SegmentNames {
    /// Checks that the prefix is valid in a file name.
    pub(crate) fn new(prefix: &str) -> Result<Self> {
        let bad = prefix.is_empty()
            || prefix.len() > PREFIX_MAX_BYTES
            || prefix.starts_with('.')
            || prefix.bytes().any(|byte| byte == b'/' || byte == 0);
        if bad {
            return Err(Error::Prefix { prefix: prefix.escape_debug().take(64).collect() });
        }
        Ok(Self(prefix.to_owned()))
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.0
    }

    pub(crate) fn of(&self, what: &str) -> String {
        format!("{}_{what}", self.0)
    }

    pub(crate) fn pool(&self, pool: PoolId) -> String {
        self.of(pool.name())
    }

    pub(crate) fn semaphore(&self) -> String {
        format!("sem.{}_dbg_sem", self.0)
    }

    pub(crate) fn server(&self) -> String {
        self.of("un_sock_server")
    }

    /// Every name that a link with this prefix may have in the directory.
    pub(crate) fn all(&self) -> Vec<String> {
        let mut names: Vec<_> = PoolId::ALL.into_iter().map(|pool| self.pool(pool)).collect();
        names.extend(
            ["shm", "debug", "fw", "cmd_ring", "un_sock_server", "un_sock_client"].map(|w| self.of(w)),
        );
        names.push(self.semaphore());
        names
    }
}

/// The part of the configuration in `_debug` that is used here.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct PoolShapes {
    pub(crate) pools: [PoolConfig; PoolId::COUNT],
}

/// Offsets in the configuration, in 32-bit words.
mod word {
    pub(super) const MODULE: usize = 0;
    pub(super) const TRANSPORT: usize = 1;
    pub(super) const CUDA_DEVICE: usize = 2;
    pub(super) const RING_LEN: usize = 3;
    pub(super) const POOLS: usize = 4;
    pub(super) const PREFIX: usize = 14;
    pub(super) const VERSION: usize = 40;
    pub(super) const TB_LOC: usize = 41;
    pub(super) const CACHING_CORE: usize = 46;
    pub(super) const SAVING_CORE: usize = 47;
    pub(super) const CACHE_BITS: usize = 48;
    pub(super) const FILE_BITS: usize = 49;
    pub(super) const MAX_MSG: usize = 50;
    pub(super) const MAX_DATA: usize = 51;
    pub(super) const FILTERS: usize = 52;
}
const MODULE_PRIMARY: i32 = 3;
const TRANSPORT_SHM: i32 = 1;
/// The configuration as 32-bit words.
pub(crate) type ConfigWords = [u32; CONFIG_BYTES / 4];

impl PoolShapes {
    /// Checks the sizes of a link to create.
    pub(crate) fn checked(pools: [PoolConfig; PoolId::COUNT]) -> Result<Self> {
        for (pool, config) in PoolId::ALL.into_iter().zip(&pools) {
            let (size, len) = (config.buf_size_bytes, config.pool_len);
            let at = |field, value: u32, max| Error::Pool { pool, field, value: value.into(), max };
            if size > BUF_SIZE_MAX {
                return Err(at("buf_size", size, u64::from(BUF_SIZE_MAX)));
            }
            if len > POOL_LEN_MAX {
                return Err(at("pool_len", len, u64::from(POOL_LEN_MAX)));
            }
            if pool_bytes(*config) > SEGMENT_MAX_BYTES {
                return Err(at("pool_len", len, SEGMENT_MAX_BYTES / u64::from(size.max(1))));
            }
        }
        if !pools[PoolId::CpuMsg.index()].is_enabled() {
            return Err(Error::NoMsgPool);
        }
        Ok(Self { pools })
    }

    /// Number of buffers of `cpu_msg`, which is also the capacity of both rings.
    pub(crate) fn msg_len(&self) -> usize {
        self.pools[PoolId::CpuMsg.index()].pool_len as usize
    }

    /// Returns the configuration that a primary writes for other processes.
    pub(crate) fn to_words(&self, prefix: &str) -> ConfigWords {
        let mut words = [0; CONFIG_BYTES / 4];
        words[word::MODULE] = MODULE_PRIMARY.cast_unsigned();
        words[word::TRANSPORT] = TRANSPORT_SHM.cast_unsigned();
        words[word::CUDA_DEVICE] = (-1_i32).cast_unsigned();
        let msg = self.pools[PoolId::CpuMsg.index()];
        words[word::RING_LEN] = msg.pool_len;
        for (i, pool) in self.pools.iter().enumerate() {
            words[word::POOLS + 2 * i] = pool.buf_size_bytes;
            words[word::POOLS + 2 * i + 1] = pool.pool_len;
        }
        for (i, byte) in prefix.bytes().take(PREFIX_MAX_BYTES).enumerate() {
            words[word::PREFIX + i / 4] |= u32::from(byte) << (8 * (i % 4));
        }
        words[word::VERSION] = VERSION.cast_unsigned();
        words[word::TB_LOC] = 1;
        // Tracing is off. These are the values that NVIPC's tools expect.
        words[word::CACHING_CORE] = (-1_i32).cast_unsigned();
        words[word::SAVING_CORE] = (-1_i32).cast_unsigned();
        words[word::CACHE_BITS] = 29;
        words[word::FILE_BITS] = 31;
        words[word::MAX_MSG] = msg.buf_size_bytes;
        words[word::MAX_DATA] = 8000;
        // Filters that select all messages and all cells.
        words[word::FILTERS..].fill(0x0101_0101);
        words
    }

    /// Reads the configuration that a primary wrote. Every value is checked.
    pub(crate) fn from_words(words: &ConfigWords, what: &str) -> Result<Self> {
        let version = words[word::VERSION].cast_signed();
        if version != VERSION {
            return Err(Error::Version { what: what.to_owned(), found: version });
        }
        let damaged = |why| Error::Damaged { what: what.to_owned(), why };
        if words[word::TRANSPORT].cast_signed() != TRANSPORT_SHM {
            return Err(damaged("its transport is not shared memory"));
        }
        let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
        for (i, pool) in pools.iter_mut().enumerate() {
            let (size, len) = (words[word::POOLS + 2 * i], words[word::POOLS + 2 * i + 1]);
            // NVIPC creates a pool only if both are positive.
            if size.cast_signed() > 0 && len.cast_signed() > 0 {
                *pool = PoolConfig { buf_size_bytes: size, pool_len: len };
            }
        }
        Self::checked(pools)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> PoolShapes {
        let mut pools = shmesh::config::LinkConfig::nvipc_defaults("nvipc".parse().unwrap()).pools;
        // Without buffers, the two device pools cannot be distinguished.
        pools[PoolId::CudaData.index()..].fill(PoolConfig::DISABLED);
        PoolShapes::checked(pools).unwrap()
    }

    #[test]
    fn sizes_match_nvipcs_files() {
        // From `ls -l` of release 26-1 with its default configuration.
        let shape = defaults();
        assert_eq!(shape.msg_len(), 4096);
        assert_eq!(shm_bytes(4096), 196_672);
        assert_eq!(debug_bytes(4096), 656_120);
        assert_eq!(forward_bytes(4096), 32_824);
        assert_eq!(COMMAND_RING_BYTES, 1600);
        let pools = [PoolId::CpuMsg, PoolId::CpuData, PoolId::CpuLarge];
        let bytes = pools.map(|pool| pool_bytes(shape.pools[pool.index()]));
        assert_eq!(bytes, [33_587_232, 589_832_224, 262_144_544]);
        assert_eq!(size_of_val(&SEMAPHORE), 32);
    }

    #[test]
    fn offsets_match_nvipcs_structures() {
        assert_eq!((QUEUE_WORDS * 8, queue_bytes(0), queue_bytes(3)), (32, 32, 56));
        assert_eq!((INFO_WORDS * 4, INFO_DATA_INDEX * 4, INFO_DATA_POOL * 4), (32, 16, 20));
        assert_eq!((INFO_DIRECTION * 4, INFO_REFERENCES * 4), (24, 28));
        assert_eq!((CONFIG_AT, TIMES_AT), (40, 760));
        let at = |word: usize| CONFIG_AT + 4 * word;
        assert_eq!((at(word::CUDA_DEVICE), at(word::RING_LEN), at(word::POOLS)), (48, 52, 56));
        assert_eq!((at(word::PREFIX), at(word::VERSION), at(word::FILTERS)), (96, 200, 248));
        assert_eq!(at(CONFIG_BYTES / 4), TIMES_AT);
    }

    #[test]
    fn configuration_round_trips_through_words() {
        let shape = defaults();
        let mut words = shape.to_words("nvipc");
        assert_eq!(words[word::PREFIX], u32::from_le_bytes(*b"nvip"));
        assert_eq!(PoolShapes::from_words(&words, "x_debug").unwrap(), shape);
        words[word::VERSION] = 2531;
        let error = PoolShapes::from_words(&words, "x_debug").unwrap_err();
        assert!(matches!(error, Error::Version { found: 2531, .. }), "{error}");
    }

    #[test]
    fn prefixes_outside_the_directory_are_refused() {
        for prefix in ["", "a/b", "../a", ".hidden", "a\0b", &"x".repeat(32)] {
            assert!(SegmentNames::new(prefix).is_err(), "{prefix:?}");
        }
        assert_eq!(SegmentNames::new(&"x".repeat(31)).unwrap().server().len(), 31 + 15);
    }

    proptest::proptest! {
        #[test]
        fn no_words_crash_the_reader(words in proptest::array::uniform32(0_u32..), version: bool) {
            let mut config = [0; CONFIG_BYTES / 4];
            config[..32].copy_from_slice(&words);
            config[word::VERSION] = if version { VERSION.cast_unsigned() } else { words[0] };
            config[word::TRANSPORT] = words[1] % 2;
            let _ = PoolShapes::from_words(&config, "x_debug");
        }
    }
}
