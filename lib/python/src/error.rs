//! Errors: each is an instance of a class of `shmesh._errors`, which also inherits from the built-in one that fits.

use std::fmt::Display;

use pyo3::prelude::*;
use pyo3::types::PyAnyMethods;
use shmesh::ErrorKind;
use shmesh_sys::causes::with_causes;
use shmesh_sys::errno;

/// An instance of a class of `shmesh._errors`.
pub(crate) fn error(class: &str, text: impl Display) -> PyErr {
    Python::attach(|py| {
        let made = py
            .import("shmesh._errors")
            .and_then(|errors| errors.getattr(class))
            .and_then(|class| class.call1((text.to_string(),)));
        made.map_or_else(|error| error, PyErr::from_value)
    })
}

/// The error of a failed system call.
pub(crate) fn system(doing: &str, source: &std::io::Error) -> PyErr {
    let class = match source.raw_os_error() {
        Some(errno::EACCES | errno::EPERM) => "Denied",
        Some(errno::ENOENT) => "NotFound",
        Some(errno::ENOSPC | errno::ENOMEM) => "NoSpace",
        _ => "System",
    };
    let class = if source.kind() == std::io::ErrorKind::OutOfMemory { "NoSpace" } else { class };
    let remedy = match source.raw_os_error() {
        Some(errno::EMFILE) => {
            "; each array takes one: raise the limit (`ulimit -n`), or share one array and pass slices of it"
        }
        Some(errno::ENAMETOOLONG) => "; the path of a socket has at most 107 bytes: use a shorter directory",
        _ => "",
    };
    error(class, format_args!("cannot {doing}: {source}{remedy}"))
}

/// An error of the transport, with its causes.
pub(crate) fn of_link(failed: shmesh::Error) -> PyErr {
    let class = match failed.kind() {
        ErrorKind::Name(_) | ErrorKind::Config(_) => "Invalid",
        ErrorKind::NotFound { .. } | ErrorKind::NoDirectory { .. } | ErrorKind::NoBroker { .. } => "NotFound",
        ErrorKind::AlreadyOwned { .. } | ErrorKind::InUse { .. } | ErrorKind::ReceiverTaken { .. } => {
            "AlreadyExists"
        }
        ErrorKind::Differs { .. } => "Mismatch",
        ErrorKind::NoSpace { .. } | ErrorKind::MemoryLimit { .. } => "NoSpace",
        ErrorKind::Permission { .. } | ErrorKind::Denied { .. } | ErrorKind::Refused { .. } => "Denied",
        ErrorKind::Exhausted { .. }
        | ErrorKind::InlineExhausted { .. }
        | ErrorKind::HoldingTooMany { .. }
        | ErrorKind::Full { .. }
        | ErrorKind::WindowFull { .. }
        | ErrorKind::Crowded { .. } => "Exhausted",
        ErrorKind::RepliesFull { .. } => "RepliesFull",
        ErrorKind::TooLong { .. }
        | ErrorKind::InlineTooLong { .. }
        | ErrorKind::InlineRequestTooLong { .. } => "TooLong",
        ErrorKind::ServerGone { .. } => "PeerDied",
        ErrorKind::Unanswered { .. } => "Unanswered",
        ErrorKind::RequestOver { .. } => "Closed",
        ErrorKind::NoPool { .. }
        | ErrorKind::MsgPool { .. }
        | ErrorKind::NoDataPart { .. }
        | ErrorKind::NoRequests { .. }
        | ErrorKind::RequestSide { .. }
        | ErrorKind::ForeignLoan { .. }
        | ErrorKind::OnDevice { .. } => "Invalid",
        ErrorKind::Evicted { .. } => "Evicted",
        ErrorKind::StillMapped { .. } => "StillViewed",
        ErrorKind::Busy { .. } => "Busy",
        ErrorKind::NotOurs { .. }
        | ErrorKind::Version { .. }
        | ErrorKind::Truncated { .. }
        | ErrorKind::Damaged { .. }
        | ErrorKind::Corrupt { .. }
        | ErrorKind::Host { .. } => "Damaged",
        ErrorKind::System { .. } => "System",
        _ => "Error",
    };
    let text = match failed.kind() {
        ErrorKind::StillMapped { link } => {
            format!(
                "link {link}: arrays over the imported memory are still alive; `del` them and their views, then close"
            )
        }
        _ => with_causes(&failed),
    };
    error(class, text)
}

pub(crate) fn forked(what: &str) -> PyErr {
    error(
        "Forked",
        format_args!("this {what} was created before a fork, by the parent process; create one in the child"),
    )
}
