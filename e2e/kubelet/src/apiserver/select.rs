//! Selectors of lists, watches and DeleteCollection.

use serde_json::Value;

use super::errors::ApiError;
use super::kinds::{Kind, field};

/// Which objects of a collection a request is about.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    namespace: Option<String>,
    fields: Vec<Term>,
    labels: Vec<Term>,
}

#[derive(Clone, Debug)]
struct Term {
    key: String,
    value: Option<String>,
    equal: bool,
}

impl Selection {
    /// Parses the selectors of a request. Labels can be compared with `=`, `==` and `!=`, or tested for existence.
    pub(crate) fn parse(
        kind: &Kind,
        namespace: Option<&str>,
        fields: Option<&str>,
        labels: Option<&str>,
    ) -> Result<Self, ApiError> {
        let fields = terms(fields.unwrap_or_default())?;
        if let Some(term) = fields.iter().find(|term| !kind.is_selectable(&term.key) || term.value.is_none())
        {
            let message = format!("field label not supported: {}", term.key);
            return Err(ApiError::bad_request(message));
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            fields,
            labels: terms(labels.unwrap_or_default())?,
        })
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let here = self.namespace.as_deref().is_none_or(|name| field(object, "metadata.namespace") == name);
        let fields = |term: &Term| {
            term.value.as_deref().is_none_or(|value| (text(field(object, &term.key)) == value) == term.equal)
        };
        let labels = |term: &Term| {
            let label = object.pointer("/metadata/labels").and_then(|labels| labels.get(&term.key));
            match &term.value {
                None => label.is_some() == term.equal,
                Some(value) => (label.and_then(Value::as_str) == Some(value)) == term.equal,
            }
        };
        here && self.fields.iter().all(fields) && self.labels.iter().all(labels)
    }
}

fn terms(text: &str) -> Result<Vec<Term>, ApiError> {
    let term = |text: &str| {
        if text.contains([' ', '(', ')', '>', '<']) {
            let message = format!("the selector {text:?} is not supported: use =, == and != only");
            return Err(ApiError::bad_request(message));
        }
        let (key, value, equal) = match (text.split_once("!="), text.split_once("=")) {
            (Some((key, value)), _) => (key, Some(value), false),
            (None, Some((key, value))) => (key, Some(value.trim_start_matches('=')), true),
            (None, None) => (text.trim_start_matches('!'), None, !text.starts_with('!')),
        };
        Ok(Term { key: key.to_owned(), value: value.map(str::to_owned), equal })
    };
    text.split(',').filter(|text| !text.is_empty()).map(term).collect()
}
