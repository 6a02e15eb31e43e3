//! Copies of messages for a tap.

use std::ptr::NonNull;

use super::{Buffers, Fields, PoolId};

/// A copied message that only its reader can change. Its parts are aligned for any type.
#[derive(Debug)]
pub struct CopiedMessage {
    pub(crate) fields: Fields,
    msg: Vec<u128>,
    data: Option<Vec<u128>>,
}

/// Copies a part. Returns `None` if memory is short. The helpers read 16 bytes of a MSG part, whatever its length says.
///
/// # Safety
/// As for [`CopiedMessage::of`].
unsafe fn part(from: NonNull<u8>, len: u32) -> Option<Vec<u128>> {
    let len = len as usize;
    let words = len.div_ceil(size_of::<u128>()).max(1);
    let mut part = Vec::<u128>::new();
    part.try_reserve_exact(words).ok()?;
    let to = part.as_mut_ptr().cast::<u8>();
    // SAFETY: `len` bytes are valid, as the caller guarantees, and the vector has room for them. With the padding of the
    // last word, all bytes of `words` are written.
    unsafe {
        to.copy_from_nonoverlapping(from.as_ptr(), len);
        to.add(len).write_bytes(0, words * size_of::<u128>() - len);
        part.set_len(words);
    }
    Some(part)
}

impl CopiedMessage {
    /// Copies the parts. Returns `None` if memory is short. A DATA part that no CPU can read is left out.
    ///
    /// # Safety
    /// `buffers` must have as many valid bytes as `fields` says, and they must not be written meanwhile.
    pub(crate) unsafe fn of(mut fields: Fields, buffers: Buffers) -> Option<Self> {
        let data = buffers.data.filter(|_| fields.data_pool.is_some_and(|pool| !pool.is_device()));
        if data.is_none() {
            (fields.data_pool, fields.data_len) = (None, 0);
        }
        // SAFETY: guaranteed by the caller.
        let msg = unsafe { part(buffers.msg, fields.msg_len) }?;
        let data = match data {
            // SAFETY: guaranteed by the caller.
            Some(data) => Some(unsafe { part(data, fields.data_len) }?),
            None => None,
        };
        Some(Self { fields, msg, data })
    }

    pub(crate) fn buffers(&mut self) -> Buffers {
        let first = |part: &mut Vec<u128>| NonNull::from(part.as_mut_slice()).cast();
        Buffers { msg: first(&mut self.msg), data: self.data.as_mut().map(first) }
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.msg.len() + self.data.as_ref().map_or(0, Vec::len)) * size_of::<u128>()
    }

    /// The pools whose share of the tap it uses.
    pub(crate) fn pools(&self) -> impl Iterator<Item = PoolId> + use<> {
        [Some(PoolId::CpuMsg), self.fields.data_pool].into_iter().flatten()
    }
}
