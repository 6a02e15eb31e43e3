//! Reading a configuration, in either form.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::MapAccess;
use serde_saphyr::Spanned;

use super::error::{ConfigError, Position};
use super::leaf::{KnownKeys, Leaf, OpenMap, SpannedOption};
use super::link::LinkConfig;
use super::pod::{PodLink, pod_links};
use super::show::shown;
use super::{MAX_FILE_BYTES, nvipc, parse, yaml};

/// A configuration that was read and checked.
///
/// ```
/// let loaded = shmesh::config::from_yaml("links:\n  - name: uplink\n  - name: downlink\n")?;
/// let names: Vec<_> = loaded.links.iter().map(|link| link.name.as_str()).collect();
/// assert_eq!(names, ["uplink", "downlink"]);
/// assert!(loaded.ignored.is_empty(), "our own form ignores nothing");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedConfig {
    /// The links, in the order of the file; at least one, names unique.
    pub links: Vec<LinkConfig>,
    /// Keys of an NVIPC file without a meaning for shmesh, in the order of the file. Show them to the user once.
    pub ignored: Vec<nvipc::IgnoredKey>,
    /// The form of the text.
    pub form: ConfigForm,
}

/// The form of a configuration text.
///
/// ```
/// use shmesh::config::{ConfigForm, from_yaml};
/// assert_eq!(from_yaml("links:\n  - name: fronthaul\n")?.form, ConfigForm::Shmesh);
/// let text = "transport:\n  type: shm\n  shm_config: { prefix: nvipc }\n";
/// assert_eq!(from_yaml(text)?.form, ConfigForm::Nvipc);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConfigForm {
    /// The form of shmesh, with `links` at its top.
    Shmesh,
    /// The form of NVIPC, with `transport` at its top.
    Nvipc,
}

/// Reads a configuration in either form.
///
/// # Errors
/// A [`ConfigError`] with the position of the first mistake. If there is one, no link of the text is returned.
///
/// ```
/// use shmesh::config::{self, ConfigForm};
///
/// let text = "
/// transport:
///   type: shm
///   shm_config: { prefix: nvipc, cuda_device_id: -1 }
/// ";
/// let loaded = config::from_yaml(text)?;
/// assert_eq!(loaded.form, ConfigForm::Nvipc);
/// assert_eq!(loaded.links[0].name.as_str(), "nvipc");
/// assert_eq!(loaded.ignored[0].path, "transport.shm_config.cuda_device_id");
/// # Ok::<(), config::ConfigError>(())
/// ```
pub fn from_yaml(text: &str) -> Result<LoadedConfig, ConfigError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(ConfigError::TextTooLarge);
    }
    let (OpenMap { known: top, unknown }, twice) = match parse::parse::<OpenMap<Top>>(text) {
        Ok(read) => (read, None),
        // Files of NVIPC have duplicate keys in parts that shmesh ignores. A key that shmesh reads must occur once.
        Err(ConfigError::DuplicateKey { key, place }) => {
            match parse::parse_with_duplicates::<OpenMap<Top>>(text) {
                Ok(read) if read.known.transport.is_some() => (read, Some((key, place))),
                _ => return Err(ConfigError::DuplicateKey { key, place }),
            }
        }
        Err(error) => return Err(error),
    };
    if let Some(transport) = top.transport {
        let ours = top.version.0.as_ref().map(Position::of).or(top.links.as_ref().map(Position::of));
        if let Some(place) = ours {
            return Err(ConfigError::MixedForms { place });
        }
        let mut ignored = nvipc::IgnoredKeys::default();
        ignored.add("", &unknown);
        if let Some((key, place)) = twice {
            ignored.push(format!("{key} (given twice)"), place);
        }
        let links = nvipc::links(transport, &mut ignored)?;
        return Ok(LoadedConfig { links, ignored: ignored.into_keys(), form: ConfigForm::Nvipc });
    }
    if top.links.is_none() && top.version.0.is_none() {
        return Err(ConfigError::UnknownForm);
    }
    if let Some(key) = unknown.first() {
        let (known, place) = ("version, links".to_owned(), Position::of(key));
        return Err(ConfigError::UnknownKey { key: shown(&key.value), known, place });
    }
    yaml::check_version(&top.version)?;
    let list = top.links.ok_or_else(|| ConfigError::NoLinks {
        place: top.version.0.as_ref().map_or(Position::UNKNOWN, Position::of),
    })?;
    Ok(LoadedConfig { links: yaml::links(list)?, ignored: Vec::new(), form: ConfigForm::Shmesh })
}

/// Reads the value of the annotation `shmesh.io/links`: the links that the pod's own sidecar keeps.
///
/// The annotation is a list of links, each as in the shmesh form, with the additional keys of [`PodLink`]. A link whose
/// secondary side is this pod is kept by the sidecar of the primary's pod, so it is not among the returned links.
///
/// # Errors
/// As [`from_yaml`]; [`NothingKept`](ConfigError::NothingKept) if other pods keep all links.
///
/// ```
/// use shmesh::config;
/// let text = "- name: fronthaul\n  ring: { len: 64 }\n- name: midhaul\n  scope: pool/radio\n  side: secondary\n";
/// let loaded = config::from_annotation(text)?;
/// assert_eq!((loaded.links.len(), loaded.links[0].ring_len), (1, 64), "midhaul has a sidecar elsewhere");
/// let error = config::from_annotation("- name: fronthaul\n  ringlen: 64\n").unwrap_err();
/// assert_eq!(error.location(), Some((2, 3)), "line and column are those of the annotation");
/// # Ok::<(), config::ConfigError>(())
/// ```
pub fn from_annotation(text: &str) -> Result<LoadedConfig, ConfigError> {
    let links: Vec<_> =
        pod_links(text)?.into_iter().filter(PodLink::is_kept_here).map(|link| link.config).collect();
    if links.is_empty() {
        return Err(ConfigError::NothingKept);
    }
    Ok(LoadedConfig { links, ignored: Vec::new(), form: ConfigForm::Shmesh })
}

/// Reads a configuration file in either form. Each error names the path.
///
/// # Errors
/// [`Read`](ConfigError::Read) when the file cannot be read; [`File`](ConfigError::File) when its content is refused; the
/// source has the reason.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("links.yaml");
/// std::fs::write(&path, "links:\n  - name: fronthaul\n")?;
/// let loaded = shmesh::config::from_file(&path)?;
/// assert_eq!(loaded.links[0].name.as_str(), "fronthaul");
///
/// std::fs::write(&path, "links: 7\n")?;
/// let refused = shmesh::config::from_file(&path).unwrap_err();
/// assert!(refused.to_string().contains("links.yaml"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn from_file(path: &Path) -> Result<LoadedConfig, ConfigError> {
    let bytes = read_limited(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let in_file = |error: ConfigError, text: &str| {
        let shown = error.shown_in(&path.display().to_string(), text);
        ConfigError::File { path: path.to_owned(), error: Box::new(error), shown }
    };
    if bytes.len() > MAX_FILE_BYTES {
        return Err(in_file(ConfigError::TextTooLarge, ""));
    }
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let place = place_after(&bytes[..error.valid_up_to()]);
        in_file(ConfigError::NotUtf8 { place }, &String::from_utf8_lossy(&bytes))
    })?;
    from_yaml(text).map_err(|error| in_file(error, text))
}

/// Reads at most one byte more than the limit, which suffices to refuse the file: it may be endless.
fn read_limited(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(MAX_FILE_BYTES + 1).unwrap_or(u64::MAX);
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the position just after this text.
pub(super) fn place_after(text: &[u8]) -> Position {
    let line_start = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let lines = text.iter().filter(|byte| **byte == b'\n').count();
    let columns = String::from_utf8_lossy(&text[line_start..]).chars().count();
    Position::at(to_u64(lines + 1), to_u64(columns + 1))
}

fn to_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// The top level of a text of either form; its keys say which form it is.
#[derive(Debug, Default)]
struct Top {
    version: SpannedOption<Leaf>,
    links: Option<Spanned<Vec<Spanned<yaml::LinkYaml>>>>,
    transport: Option<Spanned<nvipc::Transports>>,
}

impl<'de> KnownKeys<'de> for Top {
    fn read<A: MapAccess<'de>>(&mut self, key: &Spanned<String>, map: &mut A) -> Result<bool, A::Error> {
        match key.value.as_str() {
            "version" => self.version = map.next_value()?,
            "links" => self.links = Some(map.next_value()?),
            "transport" => self.transport = Some(map.next_value()?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}
