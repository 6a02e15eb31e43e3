//! Errors of a configuration, with the position in its text.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::limits::{
    MAX_EVICT_AFTER_MS, MAX_FILE_BYTES, MAX_LATENCY_SAMPLE, MAX_LINKS, MAX_REQUEST_WINDOW, MAX_RING_LEN,
    MAX_SPIN_US, MIN_RING_LEN,
};
use super::name::{LinkName, NameError};
use super::pool::{MAX_BUF_SIZE_BYTES, MAX_POOL_LEN, MAX_SEGMENT_BYTES, PoolId};
use super::show::show_mistake;
use shmesh_sys::quantity::Bytes;

/// A position in the YAML text, if one is known. Prints as ` (line L, column C)`, or as nothing.
///
/// ```
/// use shmesh::config::{ConfigError, from_yaml};
/// let error = from_yaml("links:\n  - name: a\n    ring: { len: 0 }\n").unwrap_err();
/// let ConfigError::RingLenOutOfRange { value: 0, place, .. } = error else { panic!("{error}") };
/// assert_eq!(place.to_string(), " (line 3, column 18)");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(Option<(u64, u64)>);

impl Position {
    /// No position: the value did not come from a text.
    pub(super) const UNKNOWN: Self = Self(None);

    /// Line and column, both from 1.
    ///
    /// `None` when the value did not come from a text.
    ///
    /// ```
    /// use shmesh::config::{ConfigError, Position, from_yaml};
    /// let error = from_yaml("links: []").unwrap_err();
    /// let ConfigError::NoLinks { place } = error else { panic!("{error}") };
    /// assert_eq!(place.line_column(), Some((1, 8)));
    /// assert_eq!(Position::default().line_column(), None);
    /// ```
    pub const fn line_column(self) -> Option<(u64, u64)> {
        self.0
    }

    #[cfg(feature = "yaml")]
    pub(super) fn at(line: u64, column: u64) -> Self {
        // The parser reports an unknown position as 0, 0.
        Self((line > 0).then_some((line, column)))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some((line, column)) => write!(f, " (line {line}, column {column})"),
            None => Ok(()),
        }
    }
}

/// Why a configuration is refused. Each message names the field, the value, the limit and the remedy.
///
/// ```
/// let text = "links:\n  - name: a\n    ring: { len: 0 }\n";
/// let error = shmesh::config::from_yaml(text).unwrap_err();
/// assert_eq!(error.location(), Some((3, 18)));
/// assert!(error.to_string().ends_with("(line 3, column 18)"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields: the link, pool, value and place that the message names")]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path:?}")]
    Read { path: PathBuf, source: io::Error },
    /// The file was read and its content is refused; `shown` is `error` with the line that it is about.
    #[error("cannot use the configuration file {path:?}: {shown}")]
    File { path: PathBuf, error: Box<ConfigError>, shown: String },
    /// The text is larger than [`MAX_FILE_BYTES`].
    #[error("the configuration has more than {MAX_FILE_BYTES} bytes; split it into several files")]
    TextTooLarge,
    /// The file is not UTF-8.
    #[error("the configuration is not UTF-8; save it as UTF-8{place}")]
    NotUtf8 { place: Position },
    /// The text is not YAML, or has another structure than expected.
    #[error("the YAML is not as expected: {message}{place}")]
    Yaml { message: String, place: Position },
    /// The file exceeds a limit of the parser on nesting, aliases or the number of nodes.
    #[error("the YAML exceeds a safety limit: {message}; use less nesting and fewer aliases{place}")]
    TooComplex { message: String, place: Position },
    /// A key that has no meaning here.
    #[error("unknown key {key}; known here: {known}{place}")]
    UnknownKey { key: String, known: String, place: Position },
    /// A key that occurs twice in one map.
    #[error("key {key} occurs twice in the same map; remove one{place}")]
    DuplicateKey { key: String, place: Position },
    /// A mandatory key is missing.
    #[error("key {key} is missing; add it{place}")]
    MissingKey { key: String, place: Position },
    /// The file has neither the shmesh form nor the NVIPC form.
    #[error("the file has neither 'links' (shmesh form) nor 'transport' (NVIPC form) at its top; add one")]
    UnknownForm,
    /// The file mixes the shmesh form and the NVIPC form.
    #[error(
        "the file has both 'transport' (NVIPC form) and 'links' or 'version' (shmesh form); keep one{place}"
    )]
    MixedForms { place: Position },
    /// A version of the form that this library does not know.
    #[error("version is {found}, this library reads version 1; set it to 1{place}")]
    VersionUnsupported { found: String, place: Position },
    /// A value of the wrong type.
    #[error("{field} is {found}; write {expected}{place}")]
    WrongType { field: String, expected: &'static str, found: String, place: Position },
    /// A number below zero.
    #[error("{field} is {value}, and must not be below 0; give a whole number from 0 up{place}")]
    Negative { field: String, value: i128, place: Position },
    /// A number that does not fit 64 bits.
    #[error("{field} is {found}, which does not fit 64 bits; give a smaller whole number{place}")]
    NumberTooLarge { field: String, found: String, place: Position },
    /// The list of links is empty.
    #[error("there is no link; write at least one, such as `- name: fronthaul`{place}")]
    NoLinks { place: Position },
    /// All links of an annotation are secondary in a pool.
    #[error(
        "every link is secondary in a pool: the primary's sidecar keeps it; remove the sidecar of this pod"
    )]
    NothingKept,
    /// A link whose two sides are in one pod, where this pod is the secondary.
    #[error(
        "link {link}: side secondary needs a primary in another pod; give scope claim/<name> or pool/<name>, or remove \
         side{place}"
    )]
    SideNeedsScope { link: LinkName, place: Position },
    /// A link in a pool or a claim without the key `side`, which says whether this pod is the primary or the secondary.
    #[error(
        "link {link}: scope {scope} joins two pods, and this one has no key side; write side: primary in one of them and \
         side: secondary in the other{place}"
    )]
    SideMissing { link: LinkName, scope: String, place: Position },
    /// A link in the pod's own directory whose other side is to be on another node.
    #[error(
        "link {link}: far needs a peer in another pod; give scope claim/<name> or pool/<name>, or remove far{place}"
    )]
    FarNeedsScope { link: LinkName, place: Position },
    /// The name of a link with `far` is a part of the name of a Service, and this one cannot be.
    #[error(
        "link {link}: far makes its name a part of a Service's name; use lower-case letters, digits and `-` inside only{place}"
    )]
    FarName { link: LinkName, place: Position },
    /// A pool in device memory on a link with `far`.
    #[error(
        "link {link}: no bridge carries pool {pool} in device memory to another node; remove the pool, or far{place}"
    )]
    FarDevicePool { link: LinkName, pool: PoolId, place: Position },
    /// Requests on a link with `far`.
    #[error(
        "link {link}: no bridge carries requests to another node; use two links with messages, or remove far{place}"
    )]
    FarRequests { link: LinkName, place: Position },
    /// An empty list of containers.
    #[error(
        "link {link}: the list containers is empty; name at least one container, or remove the key{place}"
    )]
    NoContainers { link: LinkName, place: Position },
    /// More than [`MAX_LINKS`] links.
    #[error("the file has {count} links, the limit is {MAX_LINKS}; split it into several files{place}")]
    TooManyLinks { count: usize, place: Position },
    /// A name that is not a [`LinkName`].
    #[error("{reason}{place}")]
    BadName { reason: NameError, place: Position },
    /// Two links with one name.
    #[error("link {link} is already defined{first}; rename or remove this one{place}")]
    DuplicateLink { link: LinkName, first: Position, place: Position },
    /// `cpu_msg`, the mandatory pool, is disabled.
    #[error("link {link}: pool cpu_msg is mandatory; set its buffer size and pool_len above 0{place}")]
    CpuMsgMissing { link: LinkName, place: Position },
    /// One of the two numbers of a pool is missing and has no default.
    #[error("link {link}: pool {pool} has no {missing}; give both numbers, or neither{place}")]
    PoolIncomplete { link: LinkName, pool: PoolId, missing: &'static str, place: Position },
    /// A buffer above [`MAX_BUF_SIZE_BYTES`].
    #[error(
        "link {link}: pool {pool} has buffers of {value} bytes, the limit is {MAX_BUF_SIZE_BYTES}; lower it{place}"
    )]
    BufSizeTooLarge { link: LinkName, pool: PoolId, value: u64, place: Position },
    /// More than [`MAX_POOL_LEN`] buffers.
    #[error("link {link}: pool {pool} has pool_len {value}, the limit is {MAX_POOL_LEN}; lower it{place}")]
    PoolLenTooLarge { link: LinkName, pool: PoolId, value: u64, place: Position },
    /// A pool above [`MAX_SEGMENT_BYTES`].
    #[error(
        "link {link}: pool {pool} would have {}, the limit of a segment is {}; lower its pool_len or buffer size{place}",
        Bytes(*.bytes).rounded(), Bytes(MAX_SEGMENT_BYTES).rounded()
    )]
    SegmentTooLarge { link: LinkName, pool: PoolId, bytes: u64, place: Position },
    /// All pools of a link together above [`MAX_SEGMENT_BYTES`].
    #[error(
        "link {link}: its pools would have {} together, the limit is {}; lower a pool_len{place}",
        Bytes(*.bytes).rounded(), Bytes(MAX_SEGMENT_BYTES).rounded()
    )]
    LinkTooLarge { link: LinkName, bytes: u64, place: Position },
    /// A ring outside [`MIN_RING_LEN`] to [`MAX_RING_LEN`].
    #[error("link {link}: ring length is {value}; give {MIN_RING_LEN} to {MAX_RING_LEN}{place}")]
    RingLenOutOfRange { link: LinkName, value: u64, place: Position },
    /// Polling longer than [`MAX_SPIN_US`].
    #[error("link {link}: spin_us is {value}, the limit is {MAX_SPIN_US}; lower it{place}")]
    SpinTooLong { link: LinkName, value: u64, place: Position },
    /// A key of `ring` that only ring mode `broadcast` has.
    #[error("link {link}: {field} needs ring.mode broadcast; set it, or remove {field}{place}")]
    NeedsBroadcast { link: LinkName, field: &'static str, place: Position },
    /// `ring.evict_after_ms` on a link that does not evict readers.
    #[error(
        "link {link}: ring.evict_after_ms needs ring.slow evict; set it, or remove ring.evict_after_ms{place}"
    )]
    NeedsEvict { link: LinkName, place: Position },
    /// `ring.history` is larger than the ring or a pool can keep.
    #[error(
        "link {link}: ring.history is {value}, the limit is {limit} ({what}); lower it, or raise {what}{place}"
    )]
    HistoryTooLong { link: LinkName, value: u64, what: String, limit: u32, place: Position },
    /// `ring.evict_after_ms` is 0 or above [`MAX_EVICT_AFTER_MS`].
    #[error("link {link}: ring.evict_after_ms is {value}; give 1 to {MAX_EVICT_AFTER_MS}{place}")]
    EvictAfterOutOfRange { link: LinkName, value: u64, place: Position },
    /// `ring.slow: skip` with a ring of one slot, whose writer would overwrite the only message.
    #[error("link {link}: ring.slow skip needs ring.len 2 or more; raise it{place}")]
    SkipNeedsSlots { link: LinkName, place: Position },
    /// `receivers: one` with a broadcast ring.
    #[error(
        "link {link}: ring.mode broadcast is for many readers; set receivers to many, or ring.mode to spsc{place}"
    )]
    BroadcastReceivers { link: LinkName, place: Position },
    /// A request window above [`MAX_REQUEST_WINDOW`].
    #[error("link {link}: requests.window is {value}, the limit is {MAX_REQUEST_WINDOW}; lower it{place}")]
    RequestWindowTooLarge { link: LinkName, value: u64, place: Position },
    /// A sample that is no power of two, or above [`MAX_LATENCY_SAMPLE`].
    #[error(
        "link {link}: latency.sample is {value}; give a power of two up to {MAX_LATENCY_SAMPLE}, or 0 to time no message{place}"
    )]
    BadLatencySample { link: LinkName, value: u64, place: Position },
    /// Requests on a link whose rings have one producer and one consumer.
    #[error("link {link}: requests need ring mode mpmc; set ring.mode to mpmc, or remove requests{place}")]
    RequestsNeedMpmc { link: LinkName, place: Position },
    /// A file mode other than `0600` and `0660`.
    #[error("link {link}: file_mode is {found}; give \"0600\" (owner) or \"0660\" (owner and group){place}")]
    FileModeRefused { link: LinkName, found: String, place: Position },
    /// Reserved huge pages with named segments: tmpfs cannot hold them.
    #[error(
        "link {link}: huge_pages hugetlb needs memfd backing; set backing to memfd, or huge_pages to off{place}"
    )]
    HugetlbNeedsMemfd { link: LinkName, place: Position },
    /// A transport of NVIPC that this library does not support.
    #[error("transport type {found} is not supported by this version of the library; set it to shm{place}")]
    TransportUnsupported { found: String, place: Position },
    /// The type of an NVIPC transport is unknown.
    #[error("transport type {found} is unknown; set it to shm{place}")]
    TransportUnknown { found: String, place: Position },
}

impl ConfigError {
    /// Line and column of the value that is wrong, both from 1; `None` if the value did not come from a text.
    ///
    /// ```
    /// # let mut link = shmesh::config::LinkConfig::new("fronthaul".parse()?);
    /// let error = shmesh::config::from_yaml("links:\n  - name: a\n    ring: { len: 0 }\n").unwrap_err();
    /// assert_eq!(error.location(), Some((3, 18)));
    /// link.ring_len = 0;
    /// assert_eq!(link.validate().unwrap_err().location(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn location(&self) -> Option<(u64, u64)> {
        self.place().line_column()
    }

    /// The error with the line of `text` that it is about, in the form of [`show_mistake`]. `name` is where the text is from.
    ///
    /// ```
    /// let text = "links:\n  - name: a\n    ring: { len: 0 }\n";
    /// let error = shmesh::config::from_yaml(text).unwrap_err();
    /// let shown = error.shown_in("links.yaml", text);
    /// assert!(shown.ends_with("\n --> links.yaml:3:18\n  |\n3 |     ring: { len: 0 }\n  |                  ^"), "{shown}");
    /// ```
    pub fn shown_in(&self, name: &str, text: &str) -> String {
        let whole = self.to_string();
        let message = whole.strip_suffix(&self.place().to_string()).unwrap_or(&whole);
        show_mistake(name, text, message, self.location())
    }

    pub(super) fn place(&self) -> Position {
        match self {
            Self::Read { .. } | Self::TextTooLarge | Self::UnknownForm | Self::NothingKept => {
                Position::UNKNOWN
            }
            Self::File { error, .. } => error.place(),
            Self::NotUtf8 { place }
            | Self::Yaml { place, .. }
            | Self::TooComplex { place, .. }
            | Self::UnknownKey { place, .. }
            | Self::DuplicateKey { place, .. }
            | Self::MissingKey { place, .. }
            | Self::MixedForms { place }
            | Self::VersionUnsupported { place, .. }
            | Self::WrongType { place, .. }
            | Self::Negative { place, .. }
            | Self::NumberTooLarge { place, .. }
            | Self::NoLinks { place }
            | Self::TooManyLinks { place, .. }
            | Self::BadName { place, .. }
            | Self::DuplicateLink { place, .. }
            | Self::CpuMsgMissing { place, .. }
            | Self::PoolIncomplete { place, .. }
            | Self::BufSizeTooLarge { place, .. }
            | Self::PoolLenTooLarge { place, .. }
            | Self::SegmentTooLarge { place, .. }
            | Self::LinkTooLarge { place, .. }
            | Self::RingLenOutOfRange { place, .. }
            | Self::SpinTooLong { place, .. }
            | Self::NeedsBroadcast { place, .. }
            | Self::NeedsEvict { place, .. }
            | Self::HistoryTooLong { place, .. }
            | Self::EvictAfterOutOfRange { place, .. }
            | Self::SkipNeedsSlots { place, .. }
            | Self::BroadcastReceivers { place, .. }
            | Self::BadLatencySample { place, .. }
            | Self::RequestWindowTooLarge { place, .. }
            | Self::RequestsNeedMpmc { place, .. }
            | Self::FileModeRefused { place, .. }
            | Self::HugetlbNeedsMemfd { place, .. }
            | Self::SideNeedsScope { place, .. }
            | Self::SideMissing { place, .. }
            | Self::FarNeedsScope { place, .. }
            | Self::FarName { place, .. }
            | Self::FarDevicePool { place, .. }
            | Self::FarRequests { place, .. }
            | Self::NoContainers { place, .. }
            | Self::TransportUnsupported { place, .. }
            | Self::TransportUnknown { place, .. } => *place,
        }
    }
}
