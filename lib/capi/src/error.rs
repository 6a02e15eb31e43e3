//! Codes, their texts, and what went wrong last.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use shmesh::{Error, ErrorKind};
use shmesh_sys::cancel::Uncancelled;

/// Why a call failed. 0 is success; the others never change their number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum shmesh_error_t {
    /// Success.
    SHMESH_OK = 0,
    /// There is no message, or no signal.
    SHMESH_ERROR_EMPTY = 1,
    /// The time is over.
    SHMESH_ERROR_TIMEOUT = 2,
    /// No buffer of the pool is free. Try again when some were released.
    SHMESH_ERROR_EXHAUSTED = 3,
    /// The ring is full. Try again when some were received.
    SHMESH_ERROR_FULL = 4,
    /// A pointer is NULL, a text is no UTF-8, or a number is none of those that it can be.
    SHMESH_ERROR_ARGUMENT = 5,
    /// The handle was closed, the configuration freed, the loan sent or dropped, or the message released; or it never was one.
    SHMESH_ERROR_ENDED = 6,
    /// Another thread is in a call with this handle. Each takes its own with `shmesh_link_clone`.
    SHMESH_ERROR_BUSY = 7,
    /// Loans or messages of this handle are still held.
    SHMESH_ERROR_HELD = 8,
    /// A length does not fit into the buffer.
    SHMESH_ERROR_TOO_LONG = 9,
    /// The link does not have this pool, or it cannot hold a DATA part.
    SHMESH_ERROR_NO_POOL = 10,
    /// The configuration is refused.
    SHMESH_ERROR_CONFIG = 11,
    /// There is no such link, or no directory for it.
    SHMESH_ERROR_NOT_FOUND = 12,
    /// The side, a role on it or every seat is taken, or `fresh` was asked for while another participant is attached.
    SHMESH_ERROR_TAKEN = 13,
    /// The link exists and was made otherwise.
    SHMESH_ERROR_DIFFERS = 14,
    /// What is there is no link of this library, or a damaged one, or of another version.
    SHMESH_ERROR_DAMAGED = 15,
    /// There is no memory for it.
    SHMESH_ERROR_NO_SPACE = 16,
    /// This user may not.
    SHMESH_ERROR_PERMISSION = 17,
    /// This participant was declared dead. Close the handle and attach again.
    SHMESH_ERROR_EVICTED = 18,
    /// A peer wrote what it must not. The next message can be received.
    SHMESH_ERROR_CORRUPT = 19,
    /// The link was made without notification.
    SHMESH_ERROR_NO_NOTIFICATION = 20,
    /// The kernel, or who serves the link, refused something.
    SHMESH_ERROR_SYSTEM = 21,
    /// This library failed inside.
    SHMESH_ERROR_INTERNAL = 22,
}

use shmesh_error_t::*;

const ALL: [(shmesh_error_t, &CStr); 23] = [
    (SHMESH_OK, c"success"),
    (SHMESH_ERROR_EMPTY, c"nothing is there"),
    (SHMESH_ERROR_TIMEOUT, c"the time is over"),
    (SHMESH_ERROR_EXHAUSTED, c"no buffer of the pool is free"),
    (SHMESH_ERROR_FULL, c"the ring is full"),
    (SHMESH_ERROR_ARGUMENT, c"an argument is none that it can be"),
    (SHMESH_ERROR_ENDED, c"the handle, loan or message has ended"),
    (SHMESH_ERROR_BUSY, c"another thread uses this handle"),
    (SHMESH_ERROR_HELD, c"loans or messages are still held"),
    (SHMESH_ERROR_TOO_LONG, c"it does not fit into the buffer"),
    (SHMESH_ERROR_NO_POOL, c"the link has no such pool"),
    (SHMESH_ERROR_CONFIG, c"the configuration is refused"),
    (SHMESH_ERROR_NOT_FOUND, c"there is no such link"),
    (SHMESH_ERROR_TAKEN, c"the place is taken"),
    (SHMESH_ERROR_DIFFERS, c"the link exists and was made otherwise"),
    (SHMESH_ERROR_DAMAGED, c"it is no link of this library"),
    (SHMESH_ERROR_NO_SPACE, c"there is no memory for it"),
    (SHMESH_ERROR_PERMISSION, c"this user may not"),
    (SHMESH_ERROR_EVICTED, c"this participant was declared dead"),
    (SHMESH_ERROR_CORRUPT, c"a peer wrote what it must not"),
    (SHMESH_ERROR_NO_NOTIFICATION, c"the link has no notification"),
    (SHMESH_ERROR_SYSTEM, c"the kernel refused something"),
    (SHMESH_ERROR_INTERNAL, c"this library failed inside"),
];

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// What a code means, in a few words. Never NULL, whatever the number is; valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_error_string(error: c_int) -> *const c_char {
    let known = ALL.iter().find(|(code, _)| *code as c_int == error);
    known.map_or(c"no error of this library", |(_, text)| text).as_ptr()
}

/// What went wrong in this thread last: the link, the limit and the remedy. Never NULL; valid until the next call of this
/// thread that fails. Codes that are part of ordinary work (EMPTY, TIMEOUT) leave it as it is.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_last_error() -> *const c_char {
    let nothing = c"nothing has failed";
    LAST.try_with(|last| last.borrow().as_deref().unwrap_or(nothing).as_ptr()).unwrap_or(nothing.as_ptr())
}

/// A failed call, with its text.
pub(crate) struct Failed(pub(crate) shmesh_error_t, pub(crate) String);

impl From<Error> for Failed {
    #[cold]
    fn from(error: Error) -> Self {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(source) = cause {
            text = format!("{text}: {source}");
            cause = source.source();
        }
        Self(code_of(error.kind()), text)
    }
}

#[cold]
pub(crate) fn argument(text: &str) -> Failed {
    Failed(SHMESH_ERROR_ARGUMENT, text.to_owned())
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
        ErrorKind::Exhausted { .. } | ErrorKind::InlineExhausted { .. } => SHMESH_ERROR_EXHAUSTED,
        ErrorKind::Full { .. } => SHMESH_ERROR_FULL,
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

/// Nothing unwinds into C. What is refused is kept for [`shmesh_last_error`].
#[inline(always)]
pub(crate) fn guarded(act: impl FnOnce() -> Result<shmesh_error_t, Failed>) -> shmesh_error_t {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(code)) => code,
        Ok(Err(failed)) => keep(failed),
        Err(_) => keep(Failed(
            SHMESH_ERROR_INTERNAL,
            "libshmesh failed inside; report it with what it wrote to standard error".into(),
        )),
    }
}

/// As [`guarded`], of what may make a system call.
pub(crate) fn uncancelled(act: impl FnOnce() -> Result<shmesh_error_t, Failed>) -> shmesh_error_t {
    let _uncancelled = Uncancelled::new();
    guarded(act)
}

#[cold]
#[inline(never)]
fn keep(Failed(code, text): Failed) -> shmesh_error_t {
    // Texts come from this library and from file names, which hold no NUL.
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // A thread that ends has no use for it.
    let _ = LAST.try_with(|last| last.replace(Some(text)));
    code
}
