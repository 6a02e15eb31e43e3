//! The pools of a link, and the limits of their sizes.

use std::fmt;

/// Maximum number of buffers of one pool: a buffer index has 19 bits in a ring slot.
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::{MAX_POOL_LEN, PoolId};
/// link.pools[PoolId::CpuMsg.index()].pool_len = MAX_POOL_LEN;
/// assert!(link.validate().is_ok());
/// link.pools[PoolId::CpuMsg.index()].pool_len = MAX_POOL_LEN + 1;
/// assert!(link.validate().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_POOL_LEN: u32 = 1 << 19;

/// Largest buffer in bytes: the C API carries lengths as `int32_t`.
pub const MAX_BUF_SIZE_BYTES: u64 = (1 << 31) - 1;

/// Maximum size in bytes of a segment, and of all pools of one link together (1 TiB).
///
/// ```
/// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
/// use shmesh::config::{ConfigError, MAX_SEGMENT_BYTES, PoolConfig, PoolId};
/// let pool = PoolConfig { buf_size_bytes: 1 << 30, pool_len: 1025 };
/// assert!(pool.payload_bytes() > MAX_SEGMENT_BYTES);
/// link.pools[PoolId::CpuLarge.index()] = pool;
/// assert!(matches!(link.validate(), Err(ConfigError::SegmentTooLarge { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub const MAX_SEGMENT_BYTES: u64 = 1 << 40;

/// One of the five pools that a link may have.
///
/// The numbers are NVIPC's and travel in messages.
///
/// ```
/// use shmesh::config::PoolId;
///
/// assert_eq!(PoolId::from_index(1), Some(PoolId::CpuData));
/// assert_eq!(PoolId::CpuData.name(), "cpu_data");
/// assert!(PoolId::CudaData.is_device());
/// assert_eq!(PoolId::from_index(5), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PoolId {
    /// MSG parts of messages; mandatory.
    CpuMsg = 0,
    /// Payloads in CPU memory.
    CpuData = 1,
    /// Large payloads in CPU memory.
    CpuLarge = 2,
    /// Payloads in CUDA memory.
    CudaData = 3,
    /// Payloads in device memory that the NIC reaches directly.
    GpuData = 4,
}

impl PoolId {
    /// The number of pool kinds.
    ///
    /// ```
    /// use shmesh::config::{PoolConfig, PoolId};
    /// let mut pools = [PoolConfig::DISABLED; PoolId::COUNT];
    /// pools[PoolId::CpuMsg.index()] = PoolConfig { buf_size_bytes: 512, pool_len: 64 };
    /// assert_eq!(pools.iter().filter(|pool| pool.is_enabled()).count(), 1);
    /// ```
    pub const COUNT: usize = 5;

    /// All pools, each at its index.
    pub const ALL: [Self; Self::COUNT] =
        [Self::CpuMsg, Self::CpuData, Self::CpuLarge, Self::CudaData, Self::GpuData];

    /// The name in configurations and file names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CpuMsg => "cpu_msg",
            Self::CpuData => "cpu_data",
            Self::CpuLarge => "cpu_large",
            Self::CudaData => "cuda_data",
            Self::GpuData => "gpu_data",
        }
    }

    /// The pool with this number, if there is one. The number may come from a peer.
    pub fn from_index(index: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }

    /// The pool's place in an array such as [`LinkConfig::pools`](super::LinkConfig::pools).
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether the buffers lie in device memory: see [`Link::device_pool`](crate::Link::device_pool).
    pub const fn is_device(self) -> bool {
        matches!(self, Self::CudaData | Self::GpuData)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The size of one pool. If either number is 0 the pool is not created.
///
/// ```
/// use shmesh::config::PoolConfig;
///
/// let pool = PoolConfig { buf_size_bytes: 8192, pool_len: 1024 };
/// assert!(pool.is_enabled());
/// assert_eq!(pool.payload_bytes(), 8 << 20);
/// assert!(!PoolConfig { pool_len: 0, ..pool }.is_enabled());
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PoolConfig {
    /// Bytes in one buffer.
    pub buf_size_bytes: u32,
    /// The number of buffers.
    pub pool_len: u32,
}

impl PoolConfig {
    /// A pool that is not created.
    pub const DISABLED: Self = Self { buf_size_bytes: 0, pool_len: 0 };

    /// Whether the pool is created: both numbers are above 0.
    pub const fn is_enabled(self) -> bool {
        self.buf_size_bytes > 0 && self.pool_len > 0
    }

    /// Bytes in all buffers together, without headers and alignment.
    pub const fn payload_bytes(self) -> u64 {
        // Two u32 factors: the product always fits.
        self.buf_size_bytes as u64 * self.pool_len as u64
    }
}
