//! Errors with the texts of Go, which appear in the status of pods.

use std::error::Error;
use std::fmt;

use tonic::{Code, Status};

use super::channel::ChannelError;

/// A failed call, with the text of grpc-go.
#[derive(Clone, Debug)]
pub(crate) struct GoError {
    code: Code,
    desc: String,
}

impl GoError {
    /// Converts tonic's `status` to the error of grpc-go.
    pub(crate) fn of(status: &Status) -> Self {
        if let Some(bytes) = too_large(status) {
            let limit = super::MESSAGE_BYTES_MAX;
            let desc = format!("grpc: received message larger than max ({bytes} vs. {limit})");
            return Self { code: Code::ResourceExhausted, desc };
        }
        if let Some(error) = cause(status) {
            return Self::of_http2(error);
        }
        match cause(status) {
            Some(ChannelError::Closing) => return Self::closing(),
            Some(ChannelError::Broken(_)) => return Self::end_of_file(),
            None => {}
        }
        Self { code: status.code(), desc: status.message().to_owned() }
    }

    /// The connection was closed from this side.
    pub(crate) fn closing() -> Self {
        Self { code: Code::Cancelled, desc: ChannelError::Closing.to_string() }
    }

    /// The deadline of a call has passed.
    pub(crate) fn deadline() -> Self {
        Self { code: Code::DeadlineExceeded, desc: "context deadline exceeded".to_owned() }
    }

    /// There is no connection to the server.
    pub(crate) fn unavailable(desc: String) -> Self {
        Self { code: Code::Unavailable, desc }
    }

    fn of_http2(error: &h2::Error) -> Self {
        match error.reason() {
            Some(reason) if error.is_reset() => {
                let code = match reason {
                    h2::Reason::CANCEL => Code::Cancelled,
                    h2::Reason::REFUSED_STREAM => Code::Unavailable,
                    h2::Reason::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
                    _ => Code::Internal,
                };
                Self { code, desc: format!("stream terminated by RST_STREAM with error code: {reason:?}") }
            }
            _ => Self::end_of_file(),
        }
    }

    fn end_of_file() -> Self {
        Self { code: Code::Unavailable, desc: "error reading from server: EOF".to_owned() }
    }
}

/// The first error of this kind among those that led to `status`.
fn cause<T: Error + 'static>(status: &Status) -> Option<&T> {
    let mut cause = status.source();
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

/// The length that tonic refused.
fn too_large(status: &Status) -> Option<u64> {
    let text = status.message().strip_prefix("Error, decoded message length too large: found ")?;
    text.split_whitespace().next()?.parse().ok()
}

impl fmt::Display for GoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = match self.code {
            Code::Ok => "OK".to_owned(),
            Code::Cancelled => "Canceled".to_owned(),
            other => format!("{other:?}"),
        };
        write!(f, "rpc error: code = {code} desc = {}", self.desc)
    }
}
