//! Reading the shmesh form, in which unknown keys are errors and names of keys contain the unit.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::Spanned;

use super::MAX_LINKS;
use super::error::{ConfigError, Position};
use super::leaf::{Leaf, PoolLeaves, SpannedOption};
use super::link::{
    Backing, DEFAULT_LATENCY_SAMPLE, DEFAULT_REQUEST_WINDOW, HugePages, LinkConfig, LinkPlaces, Receivers,
    RingMode, SlowReaders,
};
use super::name::LinkName;
use super::pool::PoolId;
use super::show::shown;

/// The keys of a link in a file; the keys in `pod.rs` are valid only in an annotation.
const KEYS: &str = "name, ring, receivers, pools, backing, memory, notify, requests";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkYaml {
    name: Spanned<String>,
    #[serde(default)]
    ring: Option<RingYaml>,
    #[serde(default)]
    pools: Option<PoolsYaml>,
    #[serde(default)]
    receivers: SpannedOption<Leaf>,
    #[serde(default)]
    backing: SpannedOption<Leaf>,
    #[serde(default)]
    memory: Option<MemoryYaml>,
    #[serde(default)]
    notify: Option<NotifyYaml>,
    #[serde(default)]
    requests: Option<Spanned<RequestsYaml>>,
    #[serde(default)]
    latency: Option<Spanned<LatencyYaml>>,
    #[serde(default)]
    pub(super) scope: SpannedOption<Leaf>,
    #[serde(default)]
    pub(super) side: SpannedOption<Leaf>,
    #[serde(default)]
    pub(super) far: SpannedOption<Leaf>,
    #[serde(default)]
    pub(super) containers: Option<Spanned<Vec<Spanned<String>>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RingYaml {
    len: SpannedOption<Leaf>,
    mode: SpannedOption<Leaf>,
    slow: SpannedOption<Leaf>,
    history: SpannedOption<Leaf>,
    evict_after_ms: SpannedOption<Leaf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LatencyYaml {
    sample: SpannedOption<Leaf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RequestsYaml {
    window: SpannedOption<Leaf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PoolsYaml {
    cpu_msg: Option<Spanned<PoolYaml>>,
    cpu_data: Option<Spanned<PoolYaml>>,
    cpu_large: Option<Spanned<PoolYaml>>,
    cuda_data: Option<Spanned<PoolYaml>>,
    gpu_data: Option<Spanned<PoolYaml>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PoolYaml {
    buf_size_bytes: SpannedOption<Leaf>,
    pool_len: SpannedOption<Leaf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct MemoryYaml {
    huge_pages: SpannedOption<Leaf>,
    prefault: SpannedOption<Leaf>,
    lock: SpannedOption<Leaf>,
    // A text and not a number, because YAML reads 0600 without quotes as six hundred.
    file_mode: SpannedOption<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NotifyYaml {
    enabled: SpannedOption<Leaf>,
    spin_us: SpannedOption<Leaf>,
}

/// Checks the version, if the file has one.
pub(super) fn check_version(version: &SpannedOption<Leaf>) -> Result<(), ConfigError> {
    match &version.0 {
        None | Some(Spanned { value: Leaf::Int(1), .. }) => Ok(()),
        Some(other) => Err(ConfigError::VersionUnsupported {
            found: other.value.to_string(),
            place: Position::of(other),
        }),
    }
}

/// Turns the list of a file into checked links.
pub(super) fn links(list: Spanned<Vec<Spanned<LinkYaml>>>) -> Result<Vec<LinkConfig>, ConfigError> {
    each(list, |link, name, at| {
        let of_pods = [
            ("scope", link.scope.0.as_ref().map(Position::of)),
            ("side", link.side.0.as_ref().map(Position::of)),
            ("far", link.far.0.as_ref().map(Position::of)),
            ("containers", link.containers.as_ref().map(Position::of)),
        ];
        if let Some((key, place)) = of_pods.into_iter().find_map(|(key, place)| Some((key, place?))) {
            let (key, known) = (shown(key), KEYS.to_owned());
            return Err(ConfigError::UnknownKey { key, known, place });
        }
        link.into_config(LinkConfig::new(name), at)
    })
}

/// Turns each item of a list into a checked link.
pub(super) fn each<T>(
    list: Spanned<Vec<Spanned<LinkYaml>>>,
    mut into: impl FnMut(LinkYaml, LinkName, Position) -> Result<T, ConfigError>,
) -> Result<Vec<T>, ConfigError> {
    if list.value.is_empty() {
        return Err(ConfigError::NoLinks { place: Position::of(&list) });
    }
    if let Some(first_too_many) = list.value.get(MAX_LINKS) {
        let place = Position::of(first_too_many);
        return Err(ConfigError::TooManyLinks { count: list.value.len(), place });
    }
    let mut names = Names::default();
    list.value
        .into_iter()
        .map(|link| {
            let name = names.take(&link.value.name.value, Position::of(&link.value.name))?;
            let at = Position::of(&link);
            into(link.value, name, at)
        })
        .collect()
}

/// The names read so far. Parses names, and refuses a name that was used before.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<LinkName, Position>);

impl Names {
    pub(super) fn take(&mut self, text: &str, place: Position) -> Result<LinkName, ConfigError> {
        let link: LinkName = text.parse().map_err(|reason| ConfigError::BadName { reason, place })?;
        match self.0.insert(link.clone(), place) {
            None => Ok(link),
            Some(first) => Err(ConfigError::DuplicateLink { link, first, place }),
        }
    }
}

impl LinkYaml {
    /// Replaces the defaults in `link` by the values that are given.
    pub(super) fn into_config(self, mut link: LinkConfig, at: Position) -> Result<LinkConfig, ConfigError> {
        let mut places = LinkPlaces::all_at(at);
        if let Some(ring) = self.ring {
            ring.apply(&mut link, &mut places)?;
        }
        if let Some(requests) = self.requests {
            (places.request_window, link.request_window) = (Position::of(&requests), DEFAULT_REQUEST_WINDOW);
            requests.value.apply(&mut link, &mut places)?;
        }
        if let Some(latency) = self.latency {
            (places.latency_sample, link.latency_sample) = (Position::of(&latency), DEFAULT_LATENCY_SAMPLE);
            latency.value.apply(&mut link, &mut places)?;
        }
        if let Some(pools) = self.pools {
            pools.apply(&mut link, &mut places)?;
        }
        let words = [("many", Receivers::Many), ("one", Receivers::One)];
        self.receivers.word_into("receivers", "many or one", &words, &mut link.receivers)?;
        let words = [("named", Backing::Named), ("memfd", Backing::Memfd)];
        self.backing.word_into("backing", "named or memfd", &words, &mut link.backing)?;
        if let Some(memory) = self.memory {
            memory.apply(&mut link, &mut places)?;
        }
        if let Some(notify) = self.notify {
            notify.apply(&mut link, &mut places)?;
        }
        link.check(&places)?;
        Ok(link)
    }
}

impl RingYaml {
    fn apply(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        if let Some((value, place)) = self.len.whole("ring.len")? {
            places.ring_len = place;
            let link_name = || link.name.clone();
            link.ring_len = u32::try_from(value).map_err(|_| ConfigError::RingLenOutOfRange {
                link: link_name(),
                value,
                place,
            })?;
        }
        let words = [("spsc", RingMode::Spsc), ("mpmc", RingMode::Mpmc), ("broadcast", RingMode::Broadcast)];
        self.mode.word_into("ring.mode", "spsc, mpmc or broadcast", &words, &mut link.ring_mode)?;
        self.apply_broadcast(link, places)
    }

    fn apply_broadcast(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        let name = link.name.clone();
        let words = [("wait", SlowReaders::Wait), ("skip", SlowReaders::Skip), ("evict", SlowReaders::Evict)];
        let slow =
            self.slow.word_into("ring.slow", "wait, skip or evict", &words, &mut link.broadcast.slow)?;
        let history = self.history.whole("ring.history")?;
        let evict_after = self.evict_after_ms.whole("ring.evict_after_ms")?;
        let of_broadcast = [
            ("ring.slow", slow),
            ("ring.history", history.map(|(_, place)| place)),
            ("ring.evict_after_ms", evict_after.map(|(_, place)| place)),
        ];
        if link.ring_mode != RingMode::Broadcast
            && let Some((field, place)) =
                of_broadcast.into_iter().find_map(|(field, place)| Some((field, place?)))
        {
            return Err(ConfigError::NeedsBroadcast { link: name, field, place });
        }
        if let Some((value, place)) = history {
            places.history = place;
            link.broadcast.history = u32::try_from(value).map_err(|_| {
                let what = "ring.len".to_owned();
                ConfigError::HistoryTooLong { link: name.clone(), value, what, limit: link.ring_len, place }
            })?;
        }
        if let Some((value, place)) = evict_after {
            places.evict_after_ms = place;
            if link.broadcast.slow != SlowReaders::Evict {
                return Err(ConfigError::NeedsEvict { link: name, place });
            }
            link.broadcast.evict_after_ms = u32::try_from(value)
                .map_err(|_| ConfigError::EvictAfterOutOfRange { link: name, value, place })?;
        }
        Ok(())
    }
}

impl LatencyYaml {
    fn apply(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        if let Some((value, place)) = self.sample.whole("latency.sample")? {
            places.latency_sample = place;
            link.latency_sample = u32::try_from(value).map_err(|_| ConfigError::BadLatencySample {
                link: link.name.clone(),
                value,
                place,
            })?;
        }
        Ok(())
    }
}

impl RequestsYaml {
    fn apply(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        if let Some((value, place)) = self.window.whole("requests.window")? {
            places.request_window = place;
            link.request_window = u32::try_from(value).map_err(|_| ConfigError::RequestWindowTooLarge {
                link: link.name.clone(),
                value,
                place,
            })?;
        }
        Ok(())
    }
}

impl PoolsYaml {
    fn apply(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        let given = [self.cpu_msg, self.cpu_data, self.cpu_large, self.cuda_data, self.gpu_data];
        for (pool, yaml) in PoolId::ALL.into_iter().zip(given) {
            let Some(yaml) = yaml else { continue };
            let at = Position::of(&yaml);
            let leaves = PoolLeaves { buf_size: yaml.value.buf_size_bytes, pool_len: yaml.value.pool_len };
            let places = &mut places.pools[pool.index()];
            (places.buf_size, places.pool_len) = (at, at);
            leaves.overlay(("pools", "buf_size_bytes"), pool, link, places)?;
            // A pool that is disabled by default and gets only one of its numbers would stay disabled without an error.
            let size = link.pool(pool);
            let missing = match (&leaves.buf_size.0, &leaves.pool_len.0) {
                (Some(_), None) if size.buf_size_bytes > 0 && size.pool_len == 0 => "pool_len",
                (None, Some(_)) if size.pool_len > 0 && size.buf_size_bytes == 0 => "buf_size_bytes",
                _ => continue,
            };
            return Err(ConfigError::PoolIncomplete { link: link.name.clone(), pool, missing, place: at });
        }
        Ok(())
    }
}

impl MemoryYaml {
    fn apply(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        // "off" stays a string because the parser is configured to accept only true and false as booleans.
        let words = [
            ("off", HugePages::Off),
            ("transparent", HugePages::Transparent),
            ("hugetlb", HugePages::Hugetlb),
        ];
        let expected = "off, transparent or hugetlb";
        if let Some(place) =
            self.huge_pages.word_into("memory.huge_pages", expected, &words, &mut link.huge_pages)?
        {
            places.huge_pages = place;
        }
        self.prefault.flag_into("memory.prefault", &mut link.prefault)?;
        self.lock.flag_into("memory.lock", &mut link.lock_memory)?;
        if let Some(mode) = self.file_mode.0 {
            places.file_mode = Position::of(&mode);
            link.file_mode = match mode.value.as_str() {
                "0600" | "600" | "0o600" => 0o600,
                "0660" | "660" | "0o660" => 0o660,
                other => {
                    let (link, found) = (link.name.clone(), shown(other));
                    return Err(ConfigError::FileModeRefused { link, found, place: places.file_mode });
                }
            };
        }
        Ok(())
    }
}

impl NotifyYaml {
    fn apply(self, link: &mut LinkConfig, places: &mut LinkPlaces) -> Result<(), ConfigError> {
        self.enabled.flag_into("notify.enabled", &mut link.notify)?;
        if let Some((value, place)) = self.spin_us.whole("notify.spin_us")? {
            places.spin_us = place;
            let link_name = || link.name.clone();
            link.spin_us = u32::try_from(value).map_err(|_| ConfigError::SpinTooLong {
                link: link_name(),
                value,
                place,
            })?;
        }
        Ok(())
    }
}
