//! Error codes, their texts, and the last error of each thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use shmesh::{Error, ErrorKind};
use shmesh_sys::cancel::Uncancelled;

/// The result of a call: 0 is success, any other value is the reason of the failure. Numbers never change.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_error_t {
    /// The call has succeeded.
    SHMESH_OK = 0,
    /// There is no message, signal or event to take.
    SHMESH_ERROR_EMPTY = 1,
    /// The call timed out.
    SHMESH_ERROR_TIMEOUT = 2,
    /// No buffer of the pool is free. Retry after some were released.
    SHMESH_ERROR_EXHAUSTED = 3,
    /// The ring is full. Retry after the receiver has taken messages.
    SHMESH_ERROR_FULL = 4,
    /// Invalid argument: a pointer is NULL, a string is not UTF-8, or a number is out of range.
    SHMESH_ERROR_ARGUMENT = 5,
    /// The object is not valid: the handle was closed, the configuration freed, the loan sent or dropped, the message
    /// released; or the pointer was never valid.
    SHMESH_ERROR_ENDED = 6,
    /// Another thread is in a call with this handle. Use one handle per thread, from `shmesh_link_clone`.
    SHMESH_ERROR_BUSY = 7,
    /// The handle still has loans that were not sent or dropped, or messages that were not released.
    SHMESH_ERROR_HELD = 8,
    /// The length is larger than the buffer.
    SHMESH_ERROR_TOO_LONG = 9,
    /// The link does not have this pool, or the pool cannot hold a DATA part.
    SHMESH_ERROR_NO_POOL = 10,
    /// The configuration is invalid.
    SHMESH_ERROR_CONFIG = 11,
    /// The link or the IPC directory does not exist.
    SHMESH_ERROR_NOT_FOUND = 12,
    /// The side, its role on a ring, or every seat is taken, or `fresh` was set while another participant is attached.
    SHMESH_ERROR_TAKEN = 13,
    /// The link exists with a different configuration.
    SHMESH_ERROR_DIFFERS = 14,
    /// The files are damaged, of another version, or not a link of shmesh.
    SHMESH_ERROR_DAMAGED = 15,
    /// There is not enough memory.
    SHMESH_ERROR_NO_SPACE = 16,
    /// This user does not have permission.
    SHMESH_ERROR_PERMISSION = 17,
    /// This participant was evicted. Close the handle and attach again.
    SHMESH_ERROR_EVICTED = 18,
    /// A peer wrote invalid data into shared memory. Further messages can be received.
    SHMESH_ERROR_CORRUPT = 19,
    /// The link was created without notification.
    SHMESH_ERROR_NO_NOTIFICATION = 20,
    /// A system call failed, or the host of the link refused a request.
    SHMESH_ERROR_SYSTEM = 21,
    /// Internal error of this library.
    SHMESH_ERROR_INTERNAL = 22,
    /// The process that had taken the request ended before its last reply.
    SHMESH_ERROR_PEER_GONE = 23,
    /// The server dropped the request without a last reply.
    SHMESH_ERROR_UNANSWERED = 24,
    /// The client does not wait for the reply any more.
    SHMESH_ERROR_UNWANTED = 25,
}

use shmesh_error_t::*;

const ALL: [(shmesh_error_t, &CStr); 26] = [
    (SHMESH_OK, c"success"),
    (SHMESH_ERROR_EMPTY, c"no message, signal or event"),
    (SHMESH_ERROR_TIMEOUT, c"timed out"),
    (SHMESH_ERROR_EXHAUSTED, c"no free buffer in the pool"),
    (SHMESH_ERROR_FULL, c"the ring is full"),
    (SHMESH_ERROR_ARGUMENT, c"invalid argument"),
    (SHMESH_ERROR_ENDED, c"the handle, loan or message is not valid any more"),
    (SHMESH_ERROR_BUSY, c"another thread is using this handle"),
    (SHMESH_ERROR_HELD, c"loans or messages of this handle have not ended"),
    (SHMESH_ERROR_TOO_LONG, c"too long for the buffer"),
    (SHMESH_ERROR_NO_POOL, c"the link has no such pool"),
    (SHMESH_ERROR_CONFIG, c"invalid configuration"),
    (SHMESH_ERROR_NOT_FOUND, c"link not found"),
    (SHMESH_ERROR_TAKEN, c"the side, role or seat is taken"),
    (SHMESH_ERROR_DIFFERS, c"the link exists with a different configuration"),
    (SHMESH_ERROR_DAMAGED, c"damaged, of another version, or not a shmesh link"),
    (SHMESH_ERROR_NO_SPACE, c"not enough memory"),
    (SHMESH_ERROR_PERMISSION, c"permission denied"),
    (SHMESH_ERROR_EVICTED, c"this participant was evicted"),
    (SHMESH_ERROR_CORRUPT, c"a peer wrote invalid data"),
    (SHMESH_ERROR_NO_NOTIFICATION, c"the link has no notification"),
    (SHMESH_ERROR_SYSTEM, c"a system call failed"),
    (SHMESH_ERROR_INTERNAL, c"internal error"),
    (SHMESH_ERROR_PEER_GONE, c"the server of the request has ended"),
    (SHMESH_ERROR_UNANSWERED, c"the server dropped the request"),
    (SHMESH_ERROR_UNWANTED, c"the client does not wait any more"),
];

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// A short text for an error code, valid for the life of the process. Never NULL, even for unknown codes.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_error_string(error: c_int) -> *const c_char {
    let known = ALL.iter().find(|(code, _)| *code as c_int == error);
    known.map_or(c"unknown error code", |(_, text)| text).as_ptr()
}

/// Describes the last failed call of this thread: the link, the limit and the remedy. Never NULL; valid until the next call
/// of this thread that fails. EMPTY and TIMEOUT do not change it.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_last_error() -> *const c_char {
    let nothing = c"no error";
    LAST.try_with(|last| last.borrow().as_deref().unwrap_or(nothing).as_ptr()).unwrap_or(nothing.as_ptr())
}

/// A failed call: its code and its text.
pub(crate) struct CallError(pub(crate) shmesh_error_t, pub(crate) String);

impl From<Error> for CallError {
    #[cold]
    fn from(error: Error) -> Self {
        Self(code_of(error.kind()), shmesh_sys::causes::with_causes(&error))
    }
}

#[cold]
pub(crate) fn argument(text: &str) -> CallError {
    CallError(SHMESH_ERROR_ARGUMENT, text.to_owned())
}

fn code_of(kind: &ErrorKind) -> shmesh_error_t {
    match kind {
        ErrorKind::Name(_) => SHMESH_ERROR_ARGUMENT,
        ErrorKind::Config(_) => SHMESH_ERROR_CONFIG,
        ErrorKind::NotFound { .. } | ErrorKind::NoDirectory { .. } => SHMESH_ERROR_NOT_FOUND,
        ErrorKind::AlreadyOwned { .. }
        | ErrorKind::InUse { .. }
        | ErrorKind::ReceiverTaken { .. }
        | ErrorKind::RoleTaken { .. }
        | ErrorKind::Crowded { .. } => SHMESH_ERROR_TAKEN,
        ErrorKind::Differs { .. } => SHMESH_ERROR_DIFFERS,
        ErrorKind::NotOurs { .. }
        | ErrorKind::Version { .. }
        | ErrorKind::Truncated { .. }
        | ErrorKind::Damaged { .. } => SHMESH_ERROR_DAMAGED,
        ErrorKind::NoSpace { .. } | ErrorKind::MemoryLimit { .. } => SHMESH_ERROR_NO_SPACE,
        ErrorKind::Permission { .. } => SHMESH_ERROR_PERMISSION,
        ErrorKind::Exhausted { .. }
        | ErrorKind::InlineExhausted { .. }
        | ErrorKind::HoldingTooMany { .. } => SHMESH_ERROR_EXHAUSTED,
        ErrorKind::Full { .. } | ErrorKind::WindowFull { .. } | ErrorKind::RepliesFull { .. } => {
            SHMESH_ERROR_FULL
        }
        ErrorKind::ServerGone { .. } => SHMESH_ERROR_PEER_GONE,
        ErrorKind::Unanswered { .. } => SHMESH_ERROR_UNANSWERED,
        ErrorKind::RequestOver { .. } => SHMESH_ERROR_ENDED,
        ErrorKind::InlineRequestTooLong { .. } => SHMESH_ERROR_TOO_LONG,
        ErrorKind::NoRequests { .. } | ErrorKind::RequestSide { .. } => SHMESH_ERROR_ARGUMENT,
        ErrorKind::TooLong { .. } | ErrorKind::InlineTooLong { .. } => SHMESH_ERROR_TOO_LONG,
        ErrorKind::NoPool { .. }
        | ErrorKind::MsgPool { .. }
        | ErrorKind::NoDataPart { .. }
        | ErrorKind::OnDevice { .. } => SHMESH_ERROR_NO_POOL,
        ErrorKind::Evicted { .. } => SHMESH_ERROR_EVICTED,
        ErrorKind::Corrupt { .. } => SHMESH_ERROR_CORRUPT,
        ErrorKind::NoNotification { .. } => SHMESH_ERROR_NO_NOTIFICATION,
        _ => SHMESH_ERROR_SYSTEM,
    }
}

/// Runs the body of a call without unwinding into C, and keeps the text of a failure for [`shmesh_last_error`].
#[inline(always)]
pub(crate) fn guarded(act: impl FnOnce() -> Result<shmesh_error_t, CallError>) -> shmesh_error_t {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(code)) => code,
        Ok(Err(failed)) => keep(failed),
        Err(_) => keep(CallError(
            SHMESH_ERROR_INTERNAL,
            "internal error of libshmesh; please report it with its output on standard error".into(),
        )),
    }
}

/// Like [`guarded`], for calls that may make a system call: they are not a cancellation point.
pub(crate) fn uncancelled(act: impl FnOnce() -> Result<shmesh_error_t, CallError>) -> shmesh_error_t {
    let _uncancelled = Uncancelled::new();
    guarded(act)
}

#[cold]
#[inline(never)]
fn keep(CallError(code, text): CallError) -> shmesh_error_t {
    // Texts come from this library and from file names, which hold no NUL.
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // Fails only while the thread ends.
    let _ = LAST.try_with(|last| last.replace(Some(text)));
    code
}
