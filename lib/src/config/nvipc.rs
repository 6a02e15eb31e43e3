//! Reading the form of NVIPC, so that its users can keep their files.
//!
//! A key without a meaning for shmesh is reported and is not an error: during a migration the same file configures both.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::error::{ConfigError, Position};
use super::leaf::{KnownKeys, Leaf, OpenMap, OpenVisitor, PoolLeaves, SpannedOption};
use super::limits::MAX_LINKS;
use super::link::{LinkConfig, LinkPlaces};
use super::pool::PoolId;
use super::show::shown;
use super::yaml::Names;

/// The prefix that NVIPC uses if the file has none.
const DEFAULT_PREFIX: &str = "nvipc";

/// `transport`: one map, or in the multi-instance form a list of maps.
#[derive(Debug)]
pub(super) struct Transports(Vec<Spanned<OpenMap<Transport>>>);

impl<'de> Deserialize<'de> for Transports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;

        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Transports;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a transport map or a list of them")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Transports, A::Error> {
                let open = OpenVisitor(PhantomData).visit_map(map)?;
                // The position is not known here; the caller knows the position of the whole value.
                let unknown = serde_saphyr::Location::UNKNOWN;
                Ok(Transports(vec![Spanned::new(open, unknown, unknown)]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Transports, A::Error> {
                let mut list = Vec::new();
                while let Some(transport) = seq.next_element()? {
                    list.push(transport);
                }
                Ok(Transports(list))
            }
        }

        deserializer.deserialize_any(OneOrMany)
    }
}

#[derive(Debug, Default)]
struct Transport {
    kind: SpannedOption<String>,
    shm_config: Option<OpenMap<ShmConfig>>,
    app_config: Option<(Position, Leaf)>,
}

impl<'de> KnownKeys<'de> for Transport {
    fn read<A: MapAccess<'de>>(&mut self, key: &Spanned<String>, map: &mut A) -> Result<bool, A::Error> {
        match key.value.as_str() {
            "type" => self.kind = map.next_value()?,
            "shm_config" => self.shm_config = map.next_value()?,
            "app_config" => self.app_config = Some((Position::of(key), map.next_value()?)),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

#[derive(Debug, Default)]
struct ShmConfig {
    prefix: SpannedOption<String>,
    ring_len: SpannedOption<Leaf>,
    mempool_size: Option<OpenMap<Mempools>>,
}

impl<'de> KnownKeys<'de> for ShmConfig {
    fn read<A: MapAccess<'de>>(&mut self, key: &Spanned<String>, map: &mut A) -> Result<bool, A::Error> {
        match key.value.as_str() {
            "prefix" => self.prefix = map.next_value()?,
            "ring_len" => self.ring_len = map.next_value()?,
            "mempool_size" => self.mempool_size = map.next_value()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

#[derive(Debug, Default)]
struct Mempools([Option<OpenMap<Mempool>>; PoolId::COUNT]);

impl<'de> KnownKeys<'de> for Mempools {
    fn read<A: MapAccess<'de>>(&mut self, key: &Spanned<String>, map: &mut A) -> Result<bool, A::Error> {
        match PoolId::ALL.into_iter().find(|pool| pool.name() == key.value) {
            Some(pool) => self.0[pool.index()] = map.next_value()?,
            None => return Ok(false),
        }
        Ok(true)
    }
}

#[derive(Debug, Default)]
struct Mempool(PoolLeaves);

impl<'de> KnownKeys<'de> for Mempool {
    fn read<A: MapAccess<'de>>(&mut self, key: &Spanned<String>, map: &mut A) -> Result<bool, A::Error> {
        match key.value.as_str() {
            "buf_size" => self.0.buf_size = map.next_value()?,
            "pool_len" => self.0.pool_len = map.next_value()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A key that was ignored.
///
/// ```
/// let text = "transport:\n  type: shm\n  shm_config:\n    prefix: nvipc\n    cuda_device_id: -1\n";
/// let ignored = &shmesh::config::from_yaml(text)?.ignored[0];
/// assert_eq!((ignored.path.as_str(), ignored.line), ("transport.shm_config.cuda_device_id", 5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IgnoredKey {
    /// The key with its parents, such as `transport.app_config.pcap_enable`. The instances of a multi-instance
    /// file share one path.
    pub path: String,
    /// The line of its first occurrence, from 1; 0 if unknown.
    pub line: u64,
}

/// Collects the ignored keys, each path once: ten instances repeat the same keys.
#[derive(Debug, Default)]
pub(super) struct IgnoredKeys(Vec<IgnoredKey>);

impl IgnoredKeys {
    pub(super) fn add(&mut self, parent: &str, keys: &[Spanned<String>]) {
        for key in keys {
            let dot = if parent.is_empty() { "" } else { "." };
            self.push(format!("{parent}{dot}{}", key.value.escape_debug()), Position::of(key));
        }
    }

    pub(super) fn push(&mut self, path: String, place: Position) {
        self.0.push(IgnoredKey { path, line: place.line_column().map_or(0, |(line, _)| line) });
    }

    /// In order of the file, each path with its first line.
    pub(super) fn into_keys(mut self) -> Vec<IgnoredKey> {
        self.0.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
        self.0.dedup_by(|later, first| later.path == first.path);
        self.0.sort_by_key(|key| key.line);
        self.0
    }
}

/// Turns the transports into checked links.
pub(super) fn links(
    transports: Spanned<Transports>,
    ignored: &mut IgnoredKeys,
) -> Result<Vec<LinkConfig>, ConfigError> {
    let whole = Position::of(&transports);
    let list = transports.value.0;
    if list.is_empty() {
        return Err(ConfigError::NoLinks { place: whole });
    }
    if let Some(first_too_many) = list.get(MAX_LINKS) {
        return Err(ConfigError::TooManyLinks { count: list.len(), place: Position::of(first_too_many) });
    }
    let mut names = Names::default();
    list.into_iter()
        .map(|transport| {
            let place = Position::of(&transport);
            let at = if place == Position::UNKNOWN { whole } else { place };
            ignored.add("transport", &transport.value.unknown);
            transport.value.known.into_config(&mut names, at, ignored)
        })
        .collect()
}

impl Transport {
    fn into_config(
        self,
        names: &mut Names,
        at: Position,
        ignored: &mut IgnoredKeys,
    ) -> Result<LinkConfig, ConfigError> {
        if let Some(kind) = &self.kind.0 {
            check_type(kind)?;
        }
        // Each key is reported, because some, such as pcap_enable, enable a function that shmesh does not have.
        if let Some((place, value)) = &self.app_config {
            ignored.push("transport.app_config".to_owned(), *place);
            if let Leaf::Map(keys) = value {
                ignored.add("transport.app_config", keys);
            }
        }
        let shm = self.shm_config.unwrap_or_default();
        ignored.add("transport.shm_config", &shm.unknown);
        let (prefix, prefix_at) = match &shm.known.prefix.0 {
            Some(prefix) => (prefix.value.as_str(), Position::of(prefix)),
            None => (DEFAULT_PREFIX, at),
        };
        let mut link = LinkConfig::nvipc_defaults(names.take(prefix, prefix_at)?);
        let mut places = LinkPlaces::all_at(at);
        if let Some(pools) = shm.known.mempool_size {
            pools.known.apply(&mut link, &mut places, ignored)?;
            ignored.add("transport.shm_config.mempool_size", &pools.unknown);
        }
        if let Some((value, place)) = shm.known.ring_len.whole("shm_config.ring_len")? {
            places.ring_len = place;
            let name = || link.name.clone();
            link.ring_len = u32::try_from(value).map_err(|_| ConfigError::RingLenOutOfRange {
                link: name(),
                value,
                place,
            })?;
        }
        // NVIPC ignores ring_len and gives its queues as many slots as cpu_msg has buffers, so that a send never finds
        // the queue full. Its users rely on that. If cpu_msg is above its limit, the error is about cpu_msg and not about the ring.
        let msg_len = link.pool(PoolId::CpuMsg).pool_len.min(super::MAX_POOL_LEN);
        link.ring_len = link.ring_len.max(msg_len);
        link.check(&places)?;
        Ok(link)
    }
}

fn check_type(kind: &Spanned<String>) -> Result<(), ConfigError> {
    let (found, place) = (shown(&kind.value), Position::of(kind));
    match kind.value.to_ascii_lowercase().as_str() {
        "shm" => Ok(()),
        "udp" | "dpdk" | "doca" => Err(ConfigError::TransportUnsupported { found, place }),
        _ => Err(ConfigError::TransportUnknown { found, place }),
    }
}

impl Mempools {
    fn apply(
        self,
        link: &mut LinkConfig,
        places: &mut LinkPlaces,
        ignored: &mut IgnoredKeys,
    ) -> Result<(), ConfigError> {
        const PATH: &str = "shm_config.mempool_size";
        for (pool, given) in PoolId::ALL.into_iter().zip(self.0) {
            let Some(given) = given else { continue };
            ignored.add(&format!("transport.{PATH}.{pool}"), &given.unknown);
            given.known.0.overlay((PATH, "buf_size"), pool, link, &mut places.pools[pool.index()])?;
        }
        Ok(())
    }
}
