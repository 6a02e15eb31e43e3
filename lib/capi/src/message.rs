//! Loans and messages: structures of the caller's, in which the Rust value lies as some words.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use shmesh::{Loan, Message, SendError};

use crate::error::{Failed, argument, guarded, shmesh_error_t};
use crate::link::{Entered, pool_of, shmesh_link_t};
use shmesh_error_t::*;

/// Words in which a loan or message lies; more than either takes.
pub const SHMESH_PRIVATE_WORDS: usize = 8;

/// A message being written: buffers that nobody else has. End it with `shmesh_loan_send` or `shmesh_loan_drop`, once, in
/// the same structure. Not to be copied.
#[repr(C)]
#[derive(Debug)]
pub struct shmesh_loan_t {
    /// The MSG part.
    pub msg: *mut c_void,
    /// Bytes that `msg` has room for.
    pub msg_size: usize,
    /// The DATA part; NULL without one.
    pub data: *mut c_void,
    /// Bytes that `data` has room for.
    pub data_size: usize,
    /// Not for you.
    pub private_words: [u64; SHMESH_PRIVATE_WORDS],
    /// Not for you: the handle, or NULL once the loan has ended.
    pub private_link: *const shmesh_link_t,
}

/// A message that was received. It holds its buffers until `shmesh_message_release`, once, in the same structure. Not to be
/// copied.
#[repr(C)]
#[derive(Debug)]
pub struct shmesh_message_t {
    /// The sender's to choose.
    pub msg_id: i32,
    /// The sender's to choose.
    pub cell_id: i32,
    /// The MSG part.
    pub msg: *const c_void,
    /// Bytes of it.
    pub msg_len: usize,
    /// The DATA part; NULL without one, and when it is in memory of a device.
    pub data: *const c_void,
    /// Bytes at `data`.
    pub data_len: usize,
    /// A `shmesh_pool_t`: that of the DATA part, or SHMESH_NO_DATA.
    pub data_pool: c_int,
    /// Not for you.
    pub private_words: [u64; SHMESH_PRIVATE_WORDS],
    /// Not for you: the handle, or NULL once the message was released.
    pub private_link: *const shmesh_link_t,
}

const _: () = assert!(size_of::<Loan<'_>>() <= SHMESH_PRIVATE_WORDS * 8 && align_of::<Loan<'_>>() <= 8);
const _: () = assert!(size_of::<Message<'_>>() <= SHMESH_PRIVATE_WORDS * 8 && align_of::<Message<'_>>() <= 8);

/// Puts a loan or message into the words.
fn put<T>(words: &mut [u64; SHMESH_PRIVATE_WORDS], value: T) {
    // SAFETY: the words have the size and alignment, as asserted above.
    unsafe { std::ptr::from_mut(words).cast::<T>().write(value) }
}

/// Takes it out again.
///
/// # Safety
/// `put` wrote a `T` there that was not taken out since.
unsafe fn take<T>(words: &mut [u64; SHMESH_PRIVATE_WORDS]) -> T {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::from_mut(words).cast::<T>().read() }
}

#[cold]
fn ended(what: &str) -> Failed {
    Failed(SHMESH_ERROR_ENDED, format!("this {what} has ended, or never was one; take another"))
}

/// Loans a MSG buffer, and with `pool`, which is a `shmesh_pool_t`, a DATA buffer; SHMESH_NO_DATA for none. Never waits. The
/// bytes are what their last user left.
///
/// # Safety
/// `link` is NULL or a handle; `loan` is NULL or points to a structure, whose content does not matter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_loan(
    link: *const shmesh_link_t,
    pool: c_int,
    loan: *mut MaybeUninit<shmesh_loan_t>,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { loan.as_mut() }.ok_or_else(|| argument("loan is NULL; pass where to put it"))?;
        // What is refused leaves one that has ended.
        let out = place.write(shmesh_loan_t {
            msg: std::ptr::null_mut(),
            msg_size: 0,
            data: std::ptr::null_mut(),
            data_size: 0,
            private_words: [0; SHMESH_PRIVATE_WORDS],
            private_link: std::ptr::null(),
        });
        // SAFETY: the caller's promise.
        let entered = unsafe { Entered::new(link) }?;
        let link = entered.link();
        let size = |pool| link.pool(pool).map_or(0, |(size, _)| size as usize);
        let mut loan = if pool < 0 {
            link.loan()?
        } else {
            let pool = pool_of(pool)?;
            let mut loan = link.loan_with(pool)?;
            out.data_size = size(pool);
            out.data = loan.data_mut(0)?.as_mut_ptr().cast();
            loan
        };
        out.msg_size = size(shmesh::config::PoolId::CpuMsg);
        out.msg = loan.msg_mut(0)?.as_mut_ptr().cast();
        put(&mut out.private_words, loan);
        let handle = entered.handle();
        handle.held.set(handle.held.get() + 1);
        out.private_link = handle;
        Ok(SHMESH_OK)
    })
}

/// Sends a loan: its first `msg_len` and `data_len` bytes. After success it has ended. If it is refused it has not, unless
/// this participant was EVICTED.
///
/// # Safety
/// `loan` is NULL or was filled by `shmesh_link_loan`, in this place.
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
        let given = unsafe { loan.as_mut() }.ok_or_else(|| argument("loan is NULL; pass one"))?;
        if given.private_link.is_null() {
            return Err(ended("loan"));
        }
        // SAFETY: a loan that has not ended keeps its handle from being closed.
        let entered = unsafe { Entered::new(given.private_link) }?;
        // SAFETY: it has not ended, so `put` wrote it and nobody took it.
        let mut loan = unsafe { take::<Loan<'_>>(&mut given.private_words) };
        let fits = loan.msg_mut(msg_len).map(|_| ()).and_then(|()| {
            if data_len > 0 || loan.data_pool().is_some() {
                loan.data_mut(data_len).map(|_| ())
            } else {
                Ok(())
            }
        });
        if let Err(error) = fits {
            put(&mut given.private_words, loan);
            return Err(error.into());
        }
        match loan.with_msg_id(msg_id).with_cell_id(cell_id).send_or_return() {
            Ok(()) => {}
            Err(SendError { loan, error }) => {
                let failed = Failed::from(error);
                if failed.0 != SHMESH_ERROR_EVICTED {
                    put(&mut given.private_words, loan);
                    return Err(failed);
                }
                drop(loan);
                end(given, &entered);
                return Err(failed);
            }
        }
        end(given, &entered);
        Ok(SHMESH_OK)
    })
}

#[inline(always)]
fn end(given: &mut shmesh_loan_t, entered: &Entered<'_>) {
    given.private_link = std::ptr::null();
    (given.msg, given.data) = (std::ptr::null_mut(), std::ptr::null_mut());
    let held = &entered.handle().held;
    held.set(held.get() - 1);
}

/// Gives the buffers of a loan back, unsent.
///
/// # Safety
/// As `shmesh_loan_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_loan_drop(loan: *mut shmesh_loan_t) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { loan.as_mut() }.ok_or_else(|| argument("loan is NULL; pass one"))?;
        if given.private_link.is_null() {
            return Err(ended("loan"));
        }
        // SAFETY: as in `shmesh_loan_send`.
        let entered = unsafe { Entered::new(given.private_link) }?;
        // SAFETY: as in `shmesh_loan_send`.
        drop(unsafe { take::<Loan<'_>>(&mut given.private_words) });
        end(given, &entered);
        Ok(SHMESH_OK)
    })
}

/// Sends up to 48 bytes inside of the ring, without a buffer.
///
/// # Safety
/// `link` is NULL or a handle; `msg` is NULL or points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_send_inline(
    link: *const shmesh_link_t,
    msg_id: i32,
    cell_id: i32,
    msg: *const c_void,
    len: usize,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let entered = unsafe { Entered::new(link) }?;
        let bytes = if len == 0 {
            &[]
        } else if msg.is_null() {
            return Err(argument("msg is NULL; pass the bytes, or a length of 0"));
        } else if len > isize::MAX.unsigned_abs() {
            return Err(argument("len is no length; pass that of msg"));
        } else {
            // SAFETY: the caller's promise.
            unsafe { std::slice::from_raw_parts(msg.cast::<u8>(), len) }
        };
        entered.link().send_inline(msg_id, cell_id, bytes)?;
        Ok(SHMESH_OK)
    })
}

/// Takes the oldest message; EMPTY if there is none. Never waits.
///
/// # Safety
/// `link` is NULL or a handle; `message` is NULL or points to a structure, whose content does not matter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_link_receive(
    link: *const shmesh_link_t,
    message: *mut MaybeUninit<shmesh_message_t>,
) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let place =
            unsafe { message.as_mut() }.ok_or_else(|| argument("message is NULL; pass where to put it"))?;
        let out = place.write(shmesh_message_t {
            msg_id: 0,
            cell_id: 0,
            msg: std::ptr::null(),
            msg_len: 0,
            data: std::ptr::null(),
            data_len: 0,
            data_pool: -1,
            private_words: [0; SHMESH_PRIVATE_WORDS],
            private_link: std::ptr::null(),
        });
        // SAFETY: the caller's promise.
        let entered = unsafe { Entered::new(link) }?;
        let Some(message) = entered.link().receive()? else { return Ok(SHMESH_ERROR_EMPTY) };
        (out.msg_id, out.cell_id) = (message.msg_id(), message.cell_id());
        (out.msg, out.msg_len) = (message.msg().as_ptr().cast(), message.msg().len());
        if let Some(pool) = message.data_pool() {
            if !pool.is_device() {
                (out.data, out.data_len) = (message.data().as_ptr().cast(), message.data().len());
            }
            out.data_pool = c_int::try_from(pool.index()).unwrap_or(-1);
        }
        put(&mut out.private_words, message);
        let handle = entered.handle();
        handle.held.set(handle.held.get() + 1);
        out.private_link = handle;
        Ok(SHMESH_OK)
    })
}

/// Ends a message: its buffers can be loaned again.
///
/// # Safety
/// `message` is NULL or was filled by `shmesh_link_receive`, in this place.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_message_release(message: *mut shmesh_message_t) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { message.as_mut() }.ok_or_else(|| argument("message is NULL; pass one"))?;
        if given.private_link.is_null() {
            return Err(ended("message"));
        }
        // SAFETY: a message that was not released keeps its handle from being closed.
        let entered = unsafe { Entered::new(given.private_link) }?;
        // SAFETY: it was not released, so `put` wrote it and nobody took it.
        drop(unsafe { take::<Message<'_>>(&mut given.private_words) });
        given.private_link = std::ptr::null();
        (given.msg, given.data) = (std::ptr::null(), std::ptr::null());
        let held = &entered.handle().held;
        held.set(held.get() - 1);
        Ok(SHMESH_OK)
    })
}
