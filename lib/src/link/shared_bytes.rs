//! Payload bytes that another process may change while they are read.
// UNSAFETY: reads memory through a pointer, within a length that was checked when the pointer was created.
#![expect(unsafe_code, reason = "volatile reads of memory that other processes can write")]

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// Payload in shared memory, to be copied out, or read through a raw pointer.
///
/// A process that breaks the protocol can change the bytes between two reads. So a value that is checked and then used must
/// be copied once, and checked in the copy. A `&[u8]` over such bytes is sound only if all processes of the link keep the
/// protocol.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let options = shmesh::LinkOptions::new().dir(dir.path());
/// # let phy = options.create(&shmesh::config::LinkConfig::new("fronthaul".parse()?))?;
/// # let mac = options.attach("fronthaul", shmesh::Side::Secondary)?;
/// mac.send_inline(1, 0, &[2, 0, 0, 0, 7, 8, 9])?;
/// let message = phy.receive()?.expect("it was just sent");
/// let bytes = message.msg_shared();
/// let mut len = [0; 4];
/// assert_eq!(bytes.copy_to(&mut len), 4);
/// let len = u32::from_le_bytes(len) as usize; // cannot change any more
/// let body = bytes.get(4..4 + len).ok_or("the message is shorter than it says")?;
/// assert_eq!(body.to_vec(), [7, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SharedBytes<'a> {
    start: NonNull<u8>,
    len: usize,
    held: PhantomData<&'a u8>,
}

impl<'a> SharedBytes<'a> {
    /// Bytes that do not change while `holder` lives, if all processes keep the protocol: the bytes of a buffer that its owner
    /// word gives to the holder, or of a private buffer, with a length that was checked against it.
    #[inline]
    pub(super) fn of<T>(_holder: &'a T, (start, len): (NonNull<u8>, u32)) -> Self {
        Self { start, len: len as usize, held: PhantomData }
    }

    /// The bytes as a slice, for receivers that trust the other processes of the link.
    #[inline]
    pub(super) fn trusted(self) -> &'a [u8] {
        // SAFETY: the caller of `of` guarantees what the bytes are. The holder has them until it is dropped, and no process
        // that keeps the protocol writes them meanwhile. Any bytes are valid.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, valid for [`len`](Self::len) bytes while the message is held. Read it with
    /// [`read_volatile`](std::ptr::read_volatile), or pass it to a system call or a C library.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// A part of the bytes; `None` if the range ends past them.
    #[must_use]
    pub fn get(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len {
            return None;
        }
        // SAFETY: the check above keeps it inside the bytes, or one past them.
        let start = unsafe { self.start.add(range.start) };
        Some(Self { start, len: range.end - range.start, held: PhantomData })
    }

    /// Copies as many bytes as fit into `out`, reading each once. Returns their number.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        const WORD: usize = size_of::<u64>();
        let len = out.len().min(self.len);
        let start = self.start.as_ptr().cast_const();
        // SAFETY: `at` is below `len`, so it is inside the bytes.
        let byte = |at: usize| unsafe { start.add(at).read_volatile() };
        // SAFETY: the word at `at` is aligned, and ends at `len` or before.
        let word = |at: usize| unsafe { start.add(at).cast::<u64>().read_volatile() };
        let first = start.align_offset(WORD).min(len);
        let words = first + (len - first) / WORD * WORD;
        (0..first).for_each(|at| out[at] = byte(at));
        for (at, out) in (first..words).step_by(WORD).zip(out[first..words].chunks_exact_mut(WORD)) {
            out.copy_from_slice(&word(at).to_ne_bytes());
        }
        (words..len).for_each(|at| out[at] = byte(at));
        len
    }

    /// Copies all bytes, reading each once.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.copy_to(&mut copy);
        copy
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn each_range_is_copied_as_it_is() {
        let bytes: Vec<u8> = (0..40).collect();
        let shared = SharedBytes::of(&bytes, (NonNull::from(&bytes[..]).cast(), 40));
        for from in (0..=bytes.len()).step_by(if cfg!(miri) { 3 } else { 1 }) {
            for to in from..=bytes.len() {
                assert_eq!(shared.get(from..to).map(|some| some.to_vec()), Some(bytes[from..to].to_vec()));
            }
        }
        let (mut short, mut long) = ([0xff; 3], [0xff; 42]);
        assert_eq!((shared.copy_to(&mut short), shared.copy_to(&mut long)), (3, 40));
        assert_eq!((&short[..], &long[40..]), (&bytes[..3], &[0xff; 2][..]));
        assert!(shared.get(0..41).is_none() && shared.get(41..41).is_none());
        #[expect(clippy::reversed_empty_ranges, reason = "what must be refused")]
        let reversed = 3..2;
        assert!(shared.get(reversed).is_none());
    }
}
