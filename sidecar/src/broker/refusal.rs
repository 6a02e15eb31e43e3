//! Refusals: a text for the caller, and a precise reason for the audit log and the metrics.

use std::borrow::Cow;

use shmesh_proto::broker::{Code, Refused, Reply, reply};

use super::audit::Reason;

/// The text for every caller that may not have a key, whether the key exists or not.
pub(super) const NO_KEY: &str = "no such key, or this process is not admitted to it";

/// The text for every caller whose grant is unknown, expired or another process's.
pub(super) const NO_GRANT: &str = "no such grant, or it has expired or belongs to another process";

#[derive(Debug)]
pub(super) struct Refusal {
    code: Code,
    pub(super) reason: Reason,
    text: Cow<'static, str>,
    importers: Vec<i32>,
}

impl Refusal {
    fn new(code: Code, reason: Reason, text: impl Into<Cow<'static, str>>) -> Self {
        Self { code, reason, text: text.into(), importers: Vec::new() }
    }

    /// A refusal whose text is the same for every reason, so that it does not reveal whether the key exists.
    pub(super) fn key(reason: Reason) -> Self {
        Self::new(Code::Denied, reason, NO_KEY)
    }

    /// A refusal whose text is the same for every reason, so that it does not reveal whether the grant exists.
    pub(super) fn grant(reason: Reason) -> Self {
        Self::new(Code::Denied, reason, NO_GRANT)
    }

    pub(super) fn denied(reason: Reason, text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Denied, reason, text)
    }

    pub(super) fn invalid(reason: Reason, text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Invalid, reason, text)
    }

    /// The refusal at a limit. `limit` is the largest number that is accepted.
    pub(super) fn limit(reason: Reason, limit: impl std::fmt::Display, what: &str) -> Self {
        Self::new(Code::Limit, reason, format!("at most {limit} {what}"))
    }

    pub(super) fn busy(importers: Vec<i32>) -> Self {
        let text = if importers.is_empty() {
            "the sidecar was restarted, and importers of this key may not have registered yet: retry in some \
             seconds, or force it"
        } else {
            "other processes import this key: wait until they have closed it, or force the close"
        };
        Self { importers, ..Self::new(Code::Busy, Reason::Busy, text) }
    }

    pub(super) fn version(theirs: u32) -> Self {
        let ours = shmesh_proto::limits::VERSION;
        let text = format!(
            "the broker supports protocol version {ours}, the request has version {theirs}; run the same version on both sides"
        );
        Self::new(Code::Version, Reason::Version, text)
    }

    pub(super) fn unsupported() -> Self {
        Self::new(
            Code::Unsupported,
            Reason::Unsupported,
            "the broker of device keys does not support this operation",
        )
    }

    pub(super) fn unidentified() -> Self {
        let text = "this process cannot be identified: the identity service did not answer; connect again";
        Self::new(Code::Unidentified, Reason::Unidentified, text)
    }

    pub(super) fn no_answer() -> Self {
        let text = "these processes cannot be identified: the identity service did not answer in time";
        Self::new(Code::Unidentified, Reason::NoAnswer, text)
    }

    /// The refusal if the source of random numbers repeats itself: its next numbers could be guessed.
    pub(super) fn entropy() -> Self {
        Self::new(
            Code::Denied,
            Reason::Entropy,
            "the sidecar's source of random numbers repeats itself, so keys could be guessed; restart the sidecar",
        )
    }

    pub(super) fn draining() -> Self {
        Self::new(Code::Draining, Reason::Draining, "the sidecar is shutting down; connect to the next one")
    }

    pub(super) fn into_reply(self, id: u64) -> Reply {
        let refused =
            Refused { code: self.code.into(), text: self.text.into_owned(), importers: self.importers };
        Reply::new(id, reply::Result::Refused(refused))
    }
}
