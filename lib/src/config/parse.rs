//! Calling the YAML parser: its limits, and the wording of its errors.

use std::borrow::Cow;

use serde::Deserialize;
use serde_saphyr::localizer::Localizer;
use serde_saphyr::{DuplicateKeyPolicy, MessageFormatter, Options, UserMessageFormatter};

use super::error::{ConfigError, Position};
use super::show::{show_mistake, shown};

/// Parses one document within limits that are far above the needs of a configuration.
///
/// A list of 1024 links needs about 50 000 nodes, and NVIPC's files nest 8 deep.
pub(super) fn parse<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, ConfigError> {
    serde_saphyr::from_str_with_options(text, options()).map_err(|error| convert(&error))
}

/// As [`parse`], where a map may have a key twice: the visitor of the map gets both.
pub(super) fn parse_with_duplicates<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, ConfigError> {
    let mut options = options();
    options.duplicate_keys = DuplicateKeyPolicy::LastWins;
    serde_saphyr::from_str_with_options(text, options).map_err(|error| convert(&error))
}

fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: 32,
            flow_nesting_limit: 32,
            max_nodes: 200_000,
            max_events: 400_000,
            max_documents: 8,
            max_anchors: 1024,
            max_aliases: 16_384,
            max_merge_keys: 4096,
            max_recorded_anchor_events: 50_000,
            // Many links that share one anchored pool are legitimate; the replay limits below bound the work.
            enforce_alias_anchor_ratio: false,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 100_000,
            max_replay_stack_depth: 8,
        },
        strict_booleans: true,
        reject_unsupported_tags: true,
        // The parser accepts at most 32 comments in a row if it keeps them, and a licence header has more.
        emit_comments: false,
        with_snippet: false,
    }
}

/// The parser's messages without their positions, which the caller prints.
struct BareMessage;

impl MessageFormatter for BareMessage {
    fn localizer(&self) -> &dyn Localizer {
        self
    }

    fn format_message<'a>(&self, error: &'a serde_saphyr::Error) -> Cow<'a, str> {
        UserMessageFormatter.format_message(error)
    }
}

impl Localizer for BareMessage {
    fn attach_location<'a>(&self, base: Cow<'a, str>, _: serde_saphyr::Location) -> Cow<'a, str> {
        base
    }
}

/// An error of the parser about `text`, in the form of [`show_mistake`]. `name` says where the text is from.
///
/// ```
/// let text = "a: 1\nb: [\n";
/// let error = serde_saphyr::from_str::<std::collections::BTreeMap<String, u8>>(text).unwrap_err();
/// let shown = shmesh::config::show_yaml_error("a.yaml", text, &error);
/// assert!(shown.contains("--> a.yaml:2:") && shown.contains("2 | b: ["), "{shown}");
/// ```
pub fn show_yaml_error(name: &str, text: &str, error: &serde_saphyr::Error) -> String {
    let inner = error.without_snippet();
    let location = inner.location().or(error.location()).filter(|at| at.line() > 0);
    let message: String = inner.render_with_formatter(&BareMessage).chars().take(300).collect();
    show_mistake(name, text, &message, location.map(|at| (at.line(), at.column())))
}

fn convert(error: &serde_saphyr::Error) -> ConfigError {
    use serde_saphyr::Error;

    // The error of an alias contains the error of the anchored value, which is the value to change.
    let mut inner = error.without_snippet();
    while let Error::AliasError { error, .. } = inner {
        inner = error.without_snippet();
    }
    let place = inner
        .location()
        .or(error.location())
        .map_or(Position::UNKNOWN, |at| Position::at(at.line(), at.column()));
    let message = || -> String {
        let text = inner.render_with_formatter(&BareMessage);
        // The renderer has escaped control characters; the text may still be too long.
        text.chars().take(300).collect()
    };
    match inner {
        Error::SerdeUnknownField { field, expected, .. } => {
            ConfigError::UnknownKey { key: shown(field), known: expected.join(", "), place }
        }
        Error::SerdeMissingField { field, .. } => ConfigError::MissingKey { key: shown(field), place },
        Error::DuplicateMappingKey { key, .. } => {
            ConfigError::DuplicateKey { key: shown(key.as_deref().unwrap_or("(not a text)")), place }
        }
        Error::Budget { .. }
        | Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::RecursiveReferencesRequireWeakTypes { .. } => {
            ConfigError::TooComplex { message: message(), place }
        }
        _ => ConfigError::Yaml { message: message(), place },
    }
}
