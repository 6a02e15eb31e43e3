//! Configuration of links, and reading it from YAML (feature `yaml`).
//!
//! There are two forms, which differ in their top-level keys: shmesh's (`links`) and NVIPC's (`transport`).
//! In shmesh's form an unknown key is an error. In the NVIPC form, keys without a meaning for shmesh are reported in
//! [`LoadedConfig::ignored`]. Every error about a text has the position of the mistake.
//!
//! ```
//! use shmesh::config::{self, PoolId, RingMode};
//!
//! let loaded = config::from_yaml(
//!     "
//! version: 1
//! links:
//!   - name: fronthaul
//!     ring: { len: 4096, mode: spsc }
//!     pools:
//!       cpu_msg:  { buf_size_bytes: 8192, pool_len: 4096 }
//!       cpu_data: { buf_size_bytes: 576000, pool_len: 1024 }
//!     receivers: one
//!     backing: memfd
//!     memory: { huge_pages: off, prefault: true, lock: false }
//!     notify: { enabled: true, spin_us: 50 }
//! ",
//! )?;
//! let link = &loaded.links[0];
//! assert_eq!(link.ring_mode, RingMode::Spsc);
//! assert_eq!(link.pool(PoolId::CpuData).pool_len, 1024);
//! # Ok::<(), config::ConfigError>(())
//! ```

mod error;
#[cfg(feature = "yaml")]
mod leaf;
mod limits;
mod link;
mod name;
#[cfg(feature = "yaml")]
mod nvipc;
#[cfg(feature = "yaml")]
mod parse;
#[cfg(feature = "yaml")]
mod pod;
mod pool;
#[cfg(feature = "yaml")]
mod read;
mod show;
// Miri cannot read files here, and this module has no unsafe code for it to check.
#[cfg(test)]
#[cfg(not(loom))]
#[cfg(feature = "yaml")]
#[cfg(not(miri))]
mod tests;
#[cfg(feature = "yaml")]
mod yaml;

pub use error::{ConfigError, Position};
pub use limits::{
    MAX_EVICT_AFTER_MS, MAX_FILE_BYTES, MAX_LATENCY_SAMPLE, MAX_LINKS, MAX_READERS, MAX_REQUEST_WINDOW,
    MAX_RING_LEN, MAX_SPIN_US, MIN_RING_LEN,
};
pub use link::{Backing, BroadcastConfig, HugePages, LinkConfig, Receivers, RingMode, SlowReaders};
pub use name::{LinkName, MAX_LINK_NAME_BYTES, NameError};
#[cfg(feature = "yaml")]
pub use nvipc::IgnoredKey;
#[cfg(feature = "yaml")]
pub use parse::show_yaml_error;
#[cfg(feature = "yaml")]
pub use pod::{Far, PodLink, PodPlaces, Scope, pod_links};
pub use pool::{MAX_BUF_SIZE_BYTES, MAX_POOL_LEN, MAX_SEGMENT_BYTES, PoolConfig, PoolId};
#[cfg(feature = "yaml")]
pub use read::{ConfigForm, LoadedConfig, from_annotation, from_file, from_yaml};
pub use shmesh_sys::quantity::{Bytes, QuantityError};
pub use show::show_mistake;
