//! Why a pod is refused.

use shmesh::config::{ConfigError, Position};
use thiserror::Error;

/// Why a pod is refused: the problem, the remedy, and the position in the annotation.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("metadata.annotations[{annotation}]: {what}; {remedy} (line {line}, column {column})")]
pub struct Refusal {
    /// Key of the annotation.
    pub annotation: String,
    /// The problem, with the values involved.
    pub what: String,
    /// The remedy, as an instruction to the user.
    pub remedy: String,
    /// Line in the value of the annotation, from 1.
    pub line: u64,
    /// Column in that line, from 1.
    pub column: u64,
    /// The reason as one word, for metrics.
    pub reason: &'static str,
}

impl Refusal {
    pub(crate) fn new(
        annotation: &str,
        place: Position,
        reason: &'static str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (line, column) = place.line_column().unwrap_or((1, 1));
        let (what, remedy) = (what.into(), remedy.into());
        Self { annotation: annotation.to_owned(), what, remedy, line, column, reason }
    }

    /// Creates a refusal for an annotation that cannot be parsed or violates a rule of links.
    pub(crate) fn of_text(annotation: &str, error: &ConfigError) -> Self {
        let (line, column) = error.location().unwrap_or((1, 1));
        let text = error.to_string();
        let text = text.strip_suffix(&format!(" (line {line}, column {column})")).unwrap_or(&text);
        // By convention the remedy follows a semicolon.
        let (what, remedy) = match text.rsplit_once("; ") {
            Some((what, remedy)) => (what, remedy.to_owned()),
            None => (text, "write a list of links, such as `- name: fronthaul`".to_owned()),
        };
        Self {
            annotation: annotation.to_owned(),
            what: what.to_owned(),
            remedy,
            line,
            column,
            reason: "annotation",
        }
    }
}
