//! Requests and replies: structures of the caller that refer to entries in tables of the handle.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use shmesh::{Loan, SendError};

use crate::error::{CallError, argument, guarded, shmesh_error_t, uncancelled};
use crate::link::{LinkGuard, in_time, limit, shmesh_link_t, with};
use crate::message::{bytes, clear, ended, enter, nothing, resize, shmesh_loan_t, shmesh_message_t, show};
use shmesh_error_t::*;

/// A pending request of a client. End it once, with `shmesh_pending_drop`, even after its last reply. A copy of the
/// structure is the same request and ends with it.
#[repr(C)]
#[derive(Debug)]
pub struct shmesh_pending_t {
    /// Private: do not use.
    pub private_words: [u64; 2],
    /// Private: the handle, or NULL after the request has ended.
    pub private_link: *const shmesh_link_t,
}

/// A request that a server received. End it once, with `shmesh_request_release`. A copy of the structure is the same
/// request and ends with it.
#[repr(C)]
#[derive(Debug)]
pub struct shmesh_request_t {
    /// The client's message. It is valid until the request is released, and must not be released itself.
    pub message: shmesh_message_t,
    /// The seat of the client.
    pub client: u8,
    /// Private: do not use.
    pub private_words: [u64; 2],
    /// Private: the handle, or NULL after the request was released.
    pub private_link: *const shmesh_link_t,
}

fn no_pending() -> shmesh_pending_t {
    shmesh_pending_t { private_words: [0; 2], private_link: std::ptr::null() }
}

/// Sends the first `msg_len` and `data_len` bytes of a loan as a request; `pending` receives its replies. Only on the
/// secondary side of a link with requests. After success the loan has ended. After a failure it can be sent again or
/// dropped, except after EVICTED. FULL also if this client has the maximum number of pending requests.
///
/// # Safety
/// Each pointer is NULL or points to a structure; `pending` may be uninitialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_loan_request(
    loan: *mut shmesh_loan_t,
    msg_id: i32,
    cell_id: i32,
    msg_len: usize,
    data_len: usize,
    pending: *mut MaybeUninit<shmesh_pending_t>,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (given, out) = unsafe { (loan.as_mut(), pending.as_mut()) };
        let given = given.ok_or_else(|| argument("loan is NULL; pass one"))?;
        let out = out
            .ok_or_else(|| argument("pending is NULL; pass the address of a variable for it"))?
            .write(no_pending());
        let mut entered = enter(given.private_link, "loan")?;
        let (open, borrows) = (entered.link(), entered.borrows());
        let found = borrows.loans.find(given.private_words);
        let Some((index, place @ Some(_))) = found else { return Err(ended("loan")) };
        resize(place, msg_len, data_len)?;
        let Some(loan) = place.take() else { return Err(ended("loan")) };
        match open.request(loan.with_msg_id(msg_id).with_cell_id(cell_id)) {
            Ok(made) => {
                borrows.loans.end(index);
                let (at, place) = borrows.pending.vacancy();
                *place = Some(made);
                out.private_words = borrows.pending.fill(at);
                out.private_link = given.private_link;
                clear(given);
                Ok(SHMESH_OK)
            }
            Err(SendError { loan, error }) => {
                let failed = CallError::from(error);
                if failed.0 == SHMESH_ERROR_EVICTED {
                    borrows.loans.end(index);
                    clear(given);
                } else {
                    *place = Some(loan);
                }
                Err(failed)
            }
        }
    })
}

/// Sends a request of up to 104 bytes, without a buffer. Otherwise as `shmesh_loan_request`.
///
/// # Safety
/// `msg` is NULL or points to `len` bytes; `pending` is NULL or points to a structure, which may be uninitialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_request_inline(
    link: *const shmesh_link_t,
    msg_id: i32,
    cell_id: i32,
    msg: *const c_void,
    len: usize,
    pending: *mut MaybeUninit<shmesh_pending_t>,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (out, msg) = unsafe { (pending.as_mut(), bytes(msg, len)?) };
        let out = out
            .ok_or_else(|| argument("pending is NULL; pass the address of a variable for it"))?
            .write(no_pending());
        let mut entered = LinkGuard::new(link)?;
        let made = entered.link().request_inline(msg_id, cell_id, msg)?;
        let all = &mut entered.borrows().pending;
        let (at, place) = all.vacancy();
        *place = Some(made);
        out.private_words = all.fill(at);
        out.private_link = link;
        Ok(SHMESH_OK)
    })
}

/// Waits for the next reply, at most `timeout_ns` nanoseconds (negative: without a limit; 0: returns EMPTY instead of
/// TIMEOUT), and takes it. Release the reply with `shmesh_message_release`. Sets `*is_last` to whether no further reply
/// follows; `is_last` may be NULL.
///
/// PEER_GONE: the server ended before its last reply. UNANSWERED: the server dropped the request. Earlier replies are
/// returned before these errors. ENDED: the last reply was taken before, or `shmesh_pending_drop` was called.
///
/// # Safety
/// Each pointer is NULL or points to a structure; `reply` may be uninitialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_pending_wait(
    pending: *const shmesh_pending_t,
    timeout_ns: i64,
    reply: *mut MaybeUninit<shmesh_message_t>,
    is_last: *mut bool,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (given, out) = unsafe { (pending.as_ref(), reply.as_mut()) };
        let given = given.ok_or_else(|| argument("pending is NULL; pass one"))?;
        let out = out
            .ok_or_else(|| argument("reply is NULL; pass the address of a variable for it"))?
            .write(nothing());
        let mut entered = enter(given.private_link, "pending request")?;
        let borrows = entered.borrows();
        let found = borrows.pending.find(given.private_words);
        let Some((_, Some(pending))) = found else { return Err(ended("pending request")) };
        let taken = if timeout_ns == 0 { pending.try_take()? } else { pending.wait(limit(timeout_ns))? };
        let Some(message) = taken else {
            return Ok(if timeout_ns == 0 { SHMESH_ERROR_EMPTY } else { SHMESH_ERROR_TIMEOUT });
        };
        // SAFETY: the caller's promise.
        if let Some(is_last) = unsafe { is_last.as_mut() } {
            *is_last = pending.is_over();
        }
        show(&message, out);
        let (at, place) = borrows.messages.vacancy();
        *place = Some(message);
        out.private_words = borrows.messages.fill(at);
        out.private_link = given.private_link;
        Ok(SHMESH_OK)
    })
}

/// Ends a pending request: waiting replies are freed, and no further ones are received.
///
/// # Safety
/// `pending` is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_pending_drop(pending: *mut shmesh_pending_t) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { pending.as_mut() }.ok_or_else(|| argument("pending is NULL; pass one"))?;
        let mut entered = enter(given.private_link, "pending request")?;
        let all = &mut entered.borrows().pending;
        let Some((index, place)) = all.find(given.private_words) else {
            return Err(ended("pending request"));
        };
        *place = None;
        all.end(index);
        given.private_link = std::ptr::null();
        Ok(SHMESH_OK)
    })
}

/// Waits for a request, at most `timeout_ns` nanoseconds; negative: without a limit. Only on the primary side.
#[unsafe(no_mangle)]
pub extern "C" fn shmesh_link_wait_request(link: *const shmesh_link_t, timeout_ns: i64) -> shmesh_error_t {
    with(link, |link| Ok(in_time(link.wait_request(limit(timeout_ns))?)))
}

/// Receives the oldest request; EMPTY if there is none. Never blocks. Only on the primary side.
///
/// # Safety
/// `request` is NULL or points to a structure, which may be uninitialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_receive_request(
    link: *const shmesh_link_t,
    request: *mut MaybeUninit<shmesh_request_t>,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { request.as_mut() }
            .ok_or_else(|| argument("request is NULL; pass the address of a variable for it"))?;
        let out = out.write(shmesh_request_t {
            message: nothing(),
            client: 0,
            private_words: [0; 2],
            private_link: std::ptr::null(),
        });
        let mut entered = LinkGuard::new(link)?;
        let Some(request) = entered.link().receive_request()? else { return Ok(SHMESH_ERROR_EMPTY) };
        show(&request, &mut out.message);
        out.client = request.client().value();
        let all = &mut entered.borrows().requests;
        let (at, place) = all.vacancy();
        *place = Some(request);
        out.private_words = all.fill(at);
        out.private_link = link;
        Ok(SHMESH_OK)
    })
}

/// Sends the first `msg_len` and `data_len` bytes of a loan as a reply. Pass false for `is_last` if more replies follow. At most 7
/// replies wait for the client, or fewer if it has not taken replies to its other requests. Beyond that this returns FULL at once:
/// wait with `shmesh_request_wait_room`. UNWANTED: the client does not wait any more. After success and UNWANTED the loan has
/// ended.
///
/// # Safety
/// Each pointer is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_request_reply(
    request: *const shmesh_request_t,
    loan: *mut shmesh_loan_t,
    msg_id: i32,
    cell_id: i32,
    msg_len: usize,
    data_len: usize,
    is_last: bool,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (given, answer) = unsafe { (request.as_ref(), loan.as_mut()) };
        let given = given.ok_or_else(|| argument("request is NULL; pass one"))?;
        let answer = answer.ok_or_else(|| argument("loan is NULL; pass one"))?;
        if given.private_link != answer.private_link {
            return Err(argument(
                "request and loan belong to different handles; loan with the handle of the request",
            ));
        }
        let mut entered = enter(given.private_link, "request")?;
        let borrows = entered.borrows();
        let found = borrows.requests.find(given.private_words);
        let Some((_, Some(request))) = found else { return Err(ended("request")) };
        let found = borrows.loans.find(answer.private_words);
        let Some((index, place @ Some(_))) = found else { return Err(ended("loan")) };
        resize(place, msg_len, data_len)?;
        let Some(loan) = place.take() else { return Err(ended("loan")) };
        let loan: Loan<'static> = loan.with_msg_id(msg_id).with_cell_id(cell_id);
        let sent = if is_last { request.reply(loan) } else { request.stream(loan) };
        let code = match sent {
            Ok(sent) => Ok(wanted(sent)),
            Err(SendError { loan, error }) => {
                let failed = CallError::from(error);
                if failed.0 != SHMESH_ERROR_EVICTED {
                    *place = Some(loan);
                    return Err(failed);
                }
                Err(failed)
            }
        };
        borrows.loans.end(index);
        clear(answer);
        code
    })
}

/// Sends a reply of up to 112 bytes, without a buffer. Otherwise as `shmesh_request_reply`.
///
/// # Safety
/// `request` is NULL or points to a structure, `msg` is NULL or points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_request_reply_inline(
    request: *const shmesh_request_t,
    msg_id: i32,
    cell_id: i32,
    msg: *const c_void,
    len: usize,
    is_last: bool,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let (given, msg) = unsafe { (request.as_ref(), bytes(msg, len)?) };
        let given = given.ok_or_else(|| argument("request is NULL; pass one"))?;
        let mut entered = enter(given.private_link, "request")?;
        let found = entered.borrows().requests.find(given.private_words);
        let Some((_, Some(request))) = found else { return Err(ended("request")) };
        let sent = if is_last {
            request.reply_inline(msg_id, cell_id, msg)?
        } else {
            request.stream_inline(msg_id, cell_id, msg)?
        };
        Ok(wanted(sent))
    })
}

fn wanted(sent: bool) -> shmesh_error_t {
    if sent { SHMESH_OK } else { SHMESH_ERROR_UNWANTED }
}

/// Waits until there is room for one more reply, or the client does not wait any more; at most `timeout_ns`
/// nanoseconds, negative: without a limit.
///
/// # Safety
/// `request` is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_request_wait_room(
    request: *const shmesh_request_t,
    timeout_ns: i64,
) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { request.as_ref() }.ok_or_else(|| argument("request is NULL; pass one"))?;
        let mut entered = enter(given.private_link, "request")?;
        let found = entered.borrows().requests.find(given.private_words);
        let Some((_, Some(request))) = found else { return Err(ended("request")) };
        Ok(in_time(request.wait_room(limit(timeout_ns))?))
    })
}

/// Releases a request and frees its buffers. If no last reply was sent, its client gets UNANSWERED.
///
/// # Safety
/// `request` is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_request_release(request: *mut shmesh_request_t) -> shmesh_error_t {
    uncancelled(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { request.as_mut() }.ok_or_else(|| argument("request is NULL; pass one"))?;
        let mut entered = enter(given.private_link, "request")?;
        let all = &mut entered.borrows().requests;
        let Some((index, place)) = all.find(given.private_words) else { return Err(ended("request")) };
        *place = None;
        all.end(index);
        given.private_link = std::ptr::null();
        given.message = nothing();
        Ok(SHMESH_OK)
    })
}
