//! Loans and messages: structures of the caller that refer to entries in tables of the handle.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use shmesh::{Loan, Message, SendError};

use crate::error::{CallError, argument, guarded, shmesh_error_t};
use crate::link::{LinkGuard, pool_of, shmesh_link_t};
use shmesh_error_t::*;

/// A message that is being written, in buffers of its own. End it once, with `shmesh_loan_send` or `shmesh_loan_drop`. A copy of
/// the structure is the same loan and ends with it.
#[repr(C)]
#[derive(Debug)]
pub struct shmesh_loan_t {
    /// Pointer to the MSG part.
    pub msg: *mut c_void,
    /// Capacity of `msg` in bytes.
    pub msg_size: usize,
    /// Pointer to the DATA part; NULL if there is none.
    pub data: *mut c_void,
    /// Capacity of `data` in bytes.
    pub data_size: usize,
    /// Private: do not use.
    pub private_words: [u64; 2],
    /// Private: the handle, or NULL after the loan has ended.
    pub private_link: *const shmesh_link_t,
}

/// A received message. It holds its buffers until it is released, once, with `shmesh_message_release`. A copy of the structure is
/// the same message and ends with it.
#[repr(C)]
#[derive(Debug)]
pub struct shmesh_message_t {
    /// An id that the sender chose.
    pub msg_id: i32,
    /// The id of a radio cell, or any other number that the sender chose.
    pub cell_id: i32,
    /// Pointer to the MSG part.
    pub msg: *const c_void,
    /// Length of `msg` in bytes.
    pub msg_len: usize,
    /// Pointer to the DATA part; NULL if there is none, or if it is in device memory.
    pub data: *const c_void,
    /// Length of `data` in bytes.
    pub data_len: usize,
    /// A `shmesh_pool_t`: the pool of the DATA part, or SHMESH_NO_DATA.
    pub data_pool: c_int,
    /// Private: do not use.
    pub private_words: [u64; 2],
    /// Private: the handle, or NULL after the message was released.
    pub private_link: *const shmesh_link_t,
}

#[cold]
pub(crate) fn ended(what: &str) -> CallError {
    CallError(SHMESH_ERROR_ENDED, format!("this {what} has ended, or was never valid; take another one"))
}

/// Gets access to the link of a loan or message.
#[inline(always)]
pub(crate) fn enter(link: *const shmesh_link_t, what: &str) -> Result<LinkGuard, CallError> {
    if link.is_null() {
        return Err(ended(what));
    }
    LinkGuard::new(link)
}

/// Loans a MSG buffer and a DATA buffer of `pool`, a `shmesh_pool_t`; SHMESH_NO_DATA for no DATA part. Never blocks. The bytes
/// are undefined: a previous user may have written them.
///
/// # Safety
/// `loan` is NULL or points to a structure, which may be uninitialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_loan(
    link: *const shmesh_link_t,
    pool: c_int,
    loan: *mut MaybeUninit<shmesh_loan_t>,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { loan.as_mut() }
            .ok_or_else(|| argument("loan is NULL; pass the address of a variable for it"))?;
        // A failed call leaves a loan that has ended.
        let out = place.write(shmesh_loan_t {
            msg: std::ptr::null_mut(),
            msg_size: 0,
            data: std::ptr::null_mut(),
            data_size: 0,
            private_words: [0; 2],
            private_link: std::ptr::null(),
        });
        let mut entered = LinkGuard::new(link)?;
        let (open, loans) = (entered.link(), &mut entered.borrows().loans);
        let size = |pool| open.pool(pool).map_or(0, |(size, _)| size as usize);
        let (index, place) = loans.vacancy();
        let mut fill = || {
            if pool < 0 {
                out.msg = place.insert(open.loan()?).resize_msg(0)?.as_mut_ptr().cast();
            } else {
                let pool = pool_of(pool)?;
                let loan = place.insert(open.loan_with(pool)?);
                out.data = loan.resize_data(0)?.as_mut_ptr().cast();
                out.data_size = size(pool);
                out.msg = loan.resize_msg(0)?.as_mut_ptr().cast();
            }
            Ok(())
        };
        let filled: Result<(), CallError> = fill();
        if filled.is_err() {
            // The buffers are released at once, not when the entry is reused.
            *place = None;
        }
        filled?;
        out.msg_size = size(shmesh::config::PoolId::CpuMsg);
        out.private_words = loans.fill(index);
        out.private_link = link;
        Ok(SHMESH_OK)
    })
}

/// Sends the first `msg_len` and `data_len` bytes of a loan. After success the loan has ended. After a failure it can be sent
/// again or dropped, except after EVICTED.
///
/// # Safety
/// `loan` is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_loan_send(
    loan: *mut shmesh_loan_t,
    msg_id: i32,
    cell_id: i32,
    msg_len: usize,
    data_len: usize,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { loan.as_mut() }.ok_or_else(|| argument("loan is NULL; pass a loan"))?;
        let mut entered = enter(given.private_link, "loan")?;
        let loans = &mut entered.borrows().loans;
        let found = loans.find(given.private_words);
        let Some((index, place @ Some(_))) = found else { return Err(ended("loan")) };
        resize(place, msg_len, data_len)?;
        let Some(loan) = place.take() else { return Err(ended("loan")) };
        let sent = loan.with_msg_id(msg_id).with_cell_id(cell_id).send();
        let failed = match sent {
            Ok(()) => None,
            Err(SendError { loan, error }) => {
                let failed = CallError::from(error);
                if failed.0 != SHMESH_ERROR_EVICTED {
                    *place = Some(loan);
                    return Err(failed);
                }
                Some(failed)
            }
        };
        loans.end(index);
        clear(given);
        failed.map_or(Ok(SHMESH_OK), Err)
    })
}

/// Sets the lengths of a loan while it is in the table, where it stays if they are refused.
#[inline(always)]
pub(crate) fn resize(
    entry: &mut Option<Loan<'static>>,
    msg_len: usize,
    data_len: usize,
) -> Result<(), CallError> {
    if let Some(loan) = entry {
        loan.resize_msg(msg_len)?;
        if data_len > 0 || loan.data_pool().is_some() {
            loan.resize_data(data_len)?;
        }
    }
    Ok(())
}

#[inline(always)]
pub(crate) fn clear(given: &mut shmesh_loan_t) {
    given.private_link = std::ptr::null();
    (given.msg, given.data) = (std::ptr::null_mut(), std::ptr::null_mut());
}

/// Drops a loan without sending it, and frees its buffers.
///
/// # Safety
/// As `shmesh_loan_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_loan_drop(loan: *mut shmesh_loan_t) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { loan.as_mut() }.ok_or_else(|| argument("loan is NULL; pass a loan"))?;
        let mut entered = enter(given.private_link, "loan")?;
        let loans = &mut entered.borrows().loans;
        let Some((index, place)) = loans.find(given.private_words) else { return Err(ended("loan")) };
        *place = None;
        loans.end(index);
        clear(given);
        Ok(SHMESH_OK)
    })
}

/// Sends up to 112 bytes in the ring itself, without a buffer.
///
/// # Safety
/// `msg` is NULL or points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_send_inline(
    link: *const shmesh_link_t,
    msg_id: i32,
    cell_id: i32,
    msg: *const c_void,
    len: usize,
) -> shmesh_error_t {
    guarded(|| {
        let entered = LinkGuard::new(link)?;
        // SAFETY: the caller's promise.
        let bytes = unsafe { bytes(msg, len)? };
        entered.link().send_inline(msg_id, cell_id, bytes)?;
        Ok(SHMESH_OK)
    })
}

/// Receives the oldest message; EMPTY if there is none. Never blocks.
///
/// # Safety
/// `message` is NULL or points to a structure, which may be uninitialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_receive(
    link: *const shmesh_link_t,
    message: *mut MaybeUninit<shmesh_message_t>,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { message.as_mut() }
            .ok_or_else(|| argument("message is NULL; pass the address of a variable for it"))?;
        let out = place.write(nothing());
        let mut entered = LinkGuard::new(link)?;
        let (open, messages) = (entered.link(), &mut entered.borrows().messages);
        let (index, place) = messages.vacancy();
        *place = open.receive()?;
        let Some(message) = place else { return Ok(SHMESH_ERROR_EMPTY) };
        show(message, out);
        out.private_words = messages.fill(index);
        out.private_link = link;
        Ok(SHMESH_OK)
    })
}

/// Releases a message: its buffers can be loaned again.
///
/// # Safety
/// `message` is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_message_release(message: *mut shmesh_message_t) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { message.as_mut() }.ok_or_else(|| argument("message is NULL; pass a message"))?;
        let mut entered = enter(given.private_link, "message")?;
        let messages = &mut entered.borrows().messages;
        let Some((index, place)) = messages.find(given.private_words) else { return Err(ended("message")) };
        *place = None;
        messages.end(index);
        given.private_link = std::ptr::null();
        (given.msg, given.data) = (std::ptr::null(), std::ptr::null());
        Ok(SHMESH_OK)
    })
}

/// The bytes of a caller.
///
/// # Safety
/// `msg` is NULL or points to `len` bytes, which outlive the result.
#[inline(always)]
pub(crate) unsafe fn bytes<'a>(msg: *const c_void, len: usize) -> Result<&'a [u8], CallError> {
    if len == 0 {
        Ok(&[])
    } else if msg.is_null() {
        Err(argument("msg is NULL; pass the bytes, or a length of 0"))
    } else if len > isize::MAX.unsigned_abs() {
        Err(argument("len is too large; pass the length of msg"))
    } else {
        // SAFETY: the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts(msg.cast::<u8>(), len) })
    }
}

/// A message that was released.
#[inline(always)]
pub(crate) fn nothing() -> shmesh_message_t {
    shmesh_message_t {
        msg_id: 0,
        cell_id: 0,
        msg: std::ptr::null(),
        msg_len: 0,
        data: std::ptr::null(),
        data_len: 0,
        data_pool: -1,
        private_words: [0; 2],
        private_link: std::ptr::null(),
    }
}

/// Writes ids, bytes and lengths of a message into a structure of the caller.
#[inline(always)]
pub(crate) fn show(message: &Message<'_>, out: &mut shmesh_message_t) {
    (out.msg_id, out.cell_id) = (message.msg_id(), message.cell_id());
    (out.msg, out.msg_len) = (message.msg().as_ptr().cast(), message.msg().len());
    if let Some(pool) = message.data_pool() {
        if !pool.is_device() {
            (out.data, out.data_len) = (message.data().as_ptr().cast(), message.data().len());
        }
        out.data_pool = c_int::try_from(pool.index()).unwrap_or(-1);
    }
}
