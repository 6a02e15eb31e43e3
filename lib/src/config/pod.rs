//! A link in the annotation of a pod: its configuration, and the containers that use it.

use std::fmt;

use serde_saphyr::Spanned;

use super::error::{ConfigError, Position};
use super::leaf::{Leaf, SpannedOption};
use super::link::LinkConfig;
use super::name::LinkName;
use super::show::shown;
use super::{MAX_FILE_BYTES, parse, yaml};
use crate::participant::Side;

/// Which IPC directory a link is in.
///
/// ```
/// use shmesh::config::{Scope, pod_links};
/// let links = pod_links("- name: a\n- name: b\n  scope: claim/radio\n  side: primary\n")?;
/// assert_eq!(links[0].scope, Scope::Pod);
/// assert_eq!(links[1].scope.to_string(), "claim/radio");
/// # Ok::<(), shmesh::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The pod's own directory: both sides are containers of this pod.
    #[default]
    Pod,
    /// The node's pool of this name: the other side may be another pod.
    Pool(String),
    /// The directory of the ResourceClaim of this name: the other side may be another pod of the namespace.
    Claim(String),
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod => f.write_str("pod"),
            Self::Pool(name) => write!(f, "pool/{name}"),
            Self::Claim(name) => write!(f, "claim/{name}"),
        }
    }
}

/// Whether the two sides of a link may be on different nodes, where a bridge carries the messages.
///
/// ```
/// use shmesh::config::{Far, pod_links};
/// let links = pod_links("- { name: a, scope: pool/radio, side: secondary, far: allow }\n")?;
/// assert_eq!(links[0].far, Far::Allow);
/// assert_eq!(links[0].far.to_string(), "allow");
/// # Ok::<(), shmesh::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Far {
    /// Both sides are on one node.
    #[default]
    Never,
    /// The other side may be on another node; on one node nothing is carried.
    Allow,
    /// A bridge carries the messages, wherever the other side is.
    Require,
}

impl fmt::Display for Far {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "never",
            Self::Allow => "allow",
            Self::Require => "require",
        })
    }
}

/// One link of the annotation `shmesh.io/links`.
///
/// ```
/// use shmesh::{Side, config::{Scope, pod_links}};
/// let text = "- name: fronthaul\n  scope: pool/radio\n  side: secondary\n  containers: [mac]\n";
/// let link = &pod_links(text)?[0];
/// assert_eq!((&link.scope, link.side), (&Scope::Pool("radio".into()), Side::Secondary));
/// assert_eq!(link.containers.as_deref(), Some(&["mac".to_owned()][..]));
/// assert!(!link.is_kept_here());
/// assert_eq!(link.places.scope.line_column(), Some((2, 10)));
/// # Ok::<(), shmesh::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLink {
    /// The configuration of the link. In a pool or a claim the file mode is `0660` unless the annotation sets another: the
    /// processes of the other side are in the group of its directory.
    pub config: LinkConfig,
    /// The IPC directory of the link.
    pub scope: Scope,
    /// Which side this pod is: the primary for a link in the pod's own directory; elsewhere the annotation sets it.
    pub side: Side,
    /// Whether the other side may be on another node.
    pub far: Far,
    /// The containers that use the link; `None` means the containers in the pod's annotation `shmesh.io/containers`.
    pub containers: Option<Vec<String>>,
    /// Positions of these values in the annotation.
    pub places: PodPlaces,
}

/// Positions of the values of a [`PodLink`] in the annotation; the position of the link for values that the annotation does
/// not have.
///
/// ```
/// let links = shmesh::config::pod_links("- name: a\n  side: primary\n")?;
/// assert_eq!(links[0].places.link.line_column(), Some((1, 3)));
/// assert_eq!(links[0].places.side.line_column(), Some((2, 9)));
/// # Ok::<(), shmesh::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodPlaces {
    /// Position of the link.
    pub link: Position,
    /// Position of its `scope`.
    pub scope: Position,
    /// Position of its `side`.
    pub side: Position,
    /// Position of its `far`.
    pub far: Position,
    /// Position of its `containers`.
    pub containers: Position,
}

impl PodLink {
    /// Whether the sidecar of this pod keeps the link. A link in a pool or a claim is kept by the sidecar of the primary's pod.
    #[must_use]
    pub fn is_kept_here(&self) -> bool {
        self.scope == Scope::Pod || self.side == Side::Primary
    }

    pub(super) fn from_yaml(yaml: yaml::LinkYaml, name: LinkName, at: Position) -> Result<Self, ConfigError> {
        let mut places = PodPlaces { link: at, scope: at, side: at, far: at, containers: at };
        let scope = scope(&yaml.scope, &mut places.scope)?;
        let mut side = Side::Primary;
        let words = [("primary", Side::Primary), ("secondary", Side::Secondary)];
        if let Some(place) = yaml.side.word_into("side", "primary or secondary", &words, &mut side)? {
            places.side = place;
        }
        if scope != Scope::Pod && yaml.side.0.is_none() {
            return Err(ConfigError::SideMissing {
                link: name,
                scope: shown(&scope.to_string()),
                place: places.scope,
            });
        }
        if scope == Scope::Pod && side == Side::Secondary {
            return Err(ConfigError::SideNeedsScope { link: name, place: places.side });
        }
        let mut far = Far::Never;
        let words = [("never", Far::Never), ("allow", Far::Allow), ("require", Far::Require)];
        if let Some(place) = yaml.far.word_into("far", "never, allow or require", &words, &mut far)? {
            places.far = place;
        }
        let containers = match &yaml.containers {
            None => None,
            Some(list) => {
                places.containers = Position::of(list);
                if list.value.is_empty() {
                    return Err(ConfigError::NoContainers { link: name, place: places.containers });
                }
                Some(list.value.iter().map(|name| name.value.clone()).collect())
            }
        };
        let mut config = LinkConfig::new(name);
        if scope != Scope::Pod {
            config.file_mode = 0o660;
        }
        let link = Self { config: yaml.into_config(config, at)?, scope, side, far, containers, places };
        if far != Far::Never {
            link.check_far()?;
        }
        Ok(link)
    }

    /// Refuses what a bridge cannot carry.
    fn check_far(&self) -> Result<(), ConfigError> {
        let (link, place) = (self.config.name.clone(), self.places.far);
        if self.scope == Scope::Pod {
            return Err(ConfigError::FarNeedsScope { link, place });
        }
        if !is_dns_label(link.as_str()) {
            return Err(ConfigError::FarName { link, place });
        }
        if let Some(pool) = self.config.device_pool() {
            return Err(ConfigError::FarDevicePool { link, pool, place });
        }
        if self.config.request_window > 0 {
            return Err(ConfigError::FarRequests { link, place });
        }
        Ok(())
    }
}

/// Whether a name can be a part of the name of a Service.
fn is_dns_label(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn scope(given: &SpannedOption<Leaf>, at: &mut Position) -> Result<Scope, ConfigError> {
    let Some(given) = &given.0 else { return Ok(Scope::Pod) };
    *at = Position::of(given);
    if let Leaf::Text(text) = &given.value {
        if text == "pod" {
            return Ok(Scope::Pod);
        }
        match text.split_once('/') {
            Some(("pool", name)) if !name.is_empty() => return Ok(Scope::Pool(name.to_owned())),
            Some(("claim", name)) if !name.is_empty() => return Ok(Scope::Claim(name.to_owned())),
            _ => {}
        }
    }
    let (field, found) = ("scope".to_owned(), given.value.to_string());
    Err(ConfigError::WrongType { field, expected: "pod, pool/<name> or claim/<name>", found, place: *at })
}

/// Reads the value of the annotation `shmesh.io/links`: all links of the pod, with scope, side and containers of each.
///
/// [`from_annotation`](super::from_annotation) returns only those that the pod's sidecar keeps.
///
/// # Errors
/// As [`from_yaml`](super::from_yaml).
///
/// ```
/// use shmesh::config::{ConfigError, pod_links};
/// assert_eq!(pod_links("- name: fronthaul\n")?.len(), 1);
/// let error = pod_links("- name: fronthaul\n  scope: node\n").unwrap_err();
/// assert_eq!(error.location(), Some((2, 10)));
/// # Ok::<(), ConfigError>(())
/// ```
pub fn pod_links(text: &str) -> Result<Vec<PodLink>, ConfigError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(ConfigError::TextTooLarge);
    }
    if text.trim().is_empty() {
        return Err(ConfigError::NoLinks { place: Position::UNKNOWN });
    }
    let list: Spanned<Vec<Spanned<yaml::LinkYaml>>> = parse::parse(text)?;
    yaml::each(list, PodLink::from_yaml)
}
