//! Loans and messages: structures of the caller's that name what the handle keeps.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use shmesh::{Loan, Message, SendError};

use crate::error::{Failed, argument, guarded, shmesh_error_t};
use crate::link::{Entered, pool_of, shmesh_link_t};
use shmesh_error_t::*;

/// A message being written, with buffers that belong to it alone. End it with `shmesh_loan_send` or `shmesh_loan_drop`, once. A copy
/// of the structure is the same loan, and ends with it.
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
    pub private_words: [u64; 2],
    /// Not for you: the handle, or NULL once the loan has ended.
    pub private_link: *const shmesh_link_t,
}

/// A message that was received. It holds its buffers until `shmesh_message_release`, once. A copy of the structure is the
/// same message, and ends with it.
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
    pub private_words: [u64; 2],
    /// Not for you: the handle, or NULL once the message was released.
    pub private_link: *const shmesh_link_t,
}

/// What the application has of one handle, whose link ends after it.
#[derive(Debug)]
pub(crate) struct Outstanding {
    loans: Kept<Loan<'static>>,
    messages: Kept<Message<'static>>,
}

impl Outstanding {
    pub(crate) fn new() -> Self {
        Self { loans: Kept::new(), messages: Kept::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.loans.in_use() + self.messages.in_use()
    }
}

/// Loans, or messages. A structure of C names one by its place and number. A number is used once, so a copy of what has ended
/// names nothing.
#[derive(Debug)]
struct Kept<T> {
    places: Vec<Place<T>>,
    vacant: Vec<u32>,
    /// Numbers end at 0, which none of these has.
    last_number: u64,
}

#[derive(Debug)]
struct Place<T> {
    /// 0: vacant.
    number: u64,
    value: Option<T>,
}

impl<T> Kept<T> {
    fn new() -> Self {
        // Far apart, so that what has the words of one handle and the pointer of another is refused.
        static TABLES: AtomicUsize = AtomicUsize::new(1);
        let table = TABLES.fetch_add(1, Ordering::Relaxed) as u64;
        let last_number = table.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { places: Vec::new(), vacant: Vec::new(), last_number }
    }

    fn in_use(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// A vacant place, which stays vacant until [`fill`](Self::fill). Values are made in it: moving them costs more than the rest
    /// of a call.
    #[inline(always)]
    fn vacancy(&mut self) -> (u32, &mut Option<T>) {
        if self.vacant.is_empty() {
            self.grow();
        }
        let index = self.vacant[self.vacant.len() - 1];
        (index, &mut self.places[index as usize].value)
    }

    #[cold]
    fn grow(&mut self) {
        // As many as a link has buffers at most: far fewer than 2^32.
        self.vacant.push(u32::try_from(self.places.len()).unwrap_or(u32::MAX));
        self.places.push(Place { number: 0, value: None });
    }

    /// Ends the vacancy of the place that [`vacancy`](Self::vacancy) gave; the words that name it.
    #[inline(always)]
    fn fill(&mut self, index: u32) -> [u64; 2] {
        self.vacant.pop();
        self.last_number = self.last_number.wrapping_add(1).max(1);
        self.places[index as usize].number = self.last_number;
        [index.into(), self.last_number]
    }

    #[inline(always)]
    fn find(&mut self, [index, number]: [u64; 2]) -> Option<(u32, &mut Option<T>)> {
        let index = u32::try_from(index).ok()?;
        let place = self.places.get_mut(index as usize)?;
        (place.number == number && number != 0).then_some((index, &mut place.value))
    }

    /// Makes a place vacant that [`find`](Self::find) has found, and that was emptied.
    #[inline(always)]
    fn end(&mut self, index: u32) {
        self.places[index as usize].number = 0;
        self.vacant.push(index);
    }
}

#[cold]
fn ended(what: &str) -> Failed {
    Failed(SHMESH_ERROR_ENDED, format!("this {what} has ended, or never was one; take another"))
}

/// Enters the handle of a loan or message.
#[inline(always)]
fn enter(link: *const shmesh_link_t, what: &str) -> Result<Entered, Failed> {
    if link.is_null() {
        return Err(ended(what));
    }
    Entered::new(link)
}

/// Loans a MSG buffer, and with `pool`, which is a `shmesh_pool_t`, a DATA buffer; SHMESH_NO_DATA for none. Never waits. The
/// bytes are what their last user left.
///
/// # Safety
/// `loan` is NULL or points to a structure, whose content does not matter.
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
            private_words: [0; 2],
            private_link: std::ptr::null(),
        });
        let mut entered = Entered::new(link)?;
        let (open, loans) = (entered.link(), &mut entered.outstanding().loans);
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
        let filled: Result<(), Failed> = fill();
        if filled.is_err() {
            // What was loaned goes back at once, not when the place is used again.
            *place = None;
        }
        filled?;
        out.msg_size = size(shmesh::config::PoolId::CpuMsg);
        out.private_words = loans.fill(index);
        out.private_link = link;
        Ok(SHMESH_OK)
    })
}

/// Sends a loan: its first `msg_len` and `data_len` bytes. After success it has ended. If it is refused it has not, unless
/// this participant was EVICTED.
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
        let given = unsafe { loan.as_mut() }.ok_or_else(|| argument("loan is NULL; pass one"))?;
        let mut entered = enter(given.private_link, "loan")?;
        let loans = &mut entered.outstanding().loans;
        let found = loans.find(given.private_words);
        let Some((index, place @ Some(_))) = found else { return Err(ended("loan")) };
        // In its place, where it stays if this is refused.
        if let Some(loan) = place {
            loan.resize_msg(msg_len)?;
            if data_len > 0 || loan.data_pool().is_some() {
                loan.resize_data(data_len)?;
            }
        }
        let Some(loan) = place.take() else { return Err(ended("loan")) };
        let sent = loan.with_msg_id(msg_id).with_cell_id(cell_id).send();
        let failed = match sent {
            Ok(()) => None,
            Err(SendError { loan, error }) => {
                let failed = Failed::from(error);
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

#[inline(always)]
fn clear(given: &mut shmesh_loan_t) {
    given.private_link = std::ptr::null();
    (given.msg, given.data) = (std::ptr::null_mut(), std::ptr::null_mut());
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
        let mut entered = enter(given.private_link, "loan")?;
        let loans = &mut entered.outstanding().loans;
        let Some((index, place)) = loans.find(given.private_words) else { return Err(ended("loan")) };
        *place = None;
        loans.end(index);
        clear(given);
        Ok(SHMESH_OK)
    })
}

/// Sends up to 112 bytes inside of the ring, without a buffer.
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
        let entered = Entered::new(link)?;
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
/// `message` is NULL or points to a structure, whose content does not matter.
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
            private_words: [0; 2],
            private_link: std::ptr::null(),
        });
        let mut entered = Entered::new(link)?;
        let (open, messages) = (entered.link(), &mut entered.outstanding().messages);
        let (index, place) = messages.vacancy();
        *place = open.receive()?;
        let Some(message) = place else { return Ok(SHMESH_ERROR_EMPTY) };
        (out.msg_id, out.cell_id) = (message.msg_id(), message.cell_id());
        (out.msg, out.msg_len) = (message.msg().as_ptr().cast(), message.msg().len());
        if let Some(pool) = message.data_pool() {
            if !pool.is_device() {
                (out.data, out.data_len) = (message.data().as_ptr().cast(), message.data().len());
            }
            out.data_pool = c_int::try_from(pool.index()).unwrap_or(-1);
        }
        out.private_words = messages.fill(index);
        out.private_link = link;
        Ok(SHMESH_OK)
    })
}

/// Ends a message: its buffers can be loaned again.
///
/// # Safety
/// `message` is NULL or points to a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmesh_message_release(message: *mut shmesh_message_t) -> shmesh_error_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let given = unsafe { message.as_mut() }.ok_or_else(|| argument("message is NULL; pass one"))?;
        let mut entered = enter(given.private_link, "message")?;
        let messages = &mut entered.outstanding().messages;
        let Some((index, place)) = messages.find(given.private_words) else { return Err(ended("message")) };
        *place = None;
        messages.end(index);
        given.private_link = std::ptr::null();
        (given.msg, given.data) = (std::ptr::null(), std::ptr::null());
        Ok(SHMESH_OK)
    })
}
