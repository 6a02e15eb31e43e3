//! The payload of every message, and how it is written and read: the same for all rows.

/// Words of the small payload of most rows, and of the large one.
pub(crate) const SMALL: usize = 8;
pub(crate) const BULK: usize = 8192;

/// From here on a payload is filled by the C library's `memset` and the compiler leaves it alone.
const LARGE: usize = 512;

/// The words after the first: all of them `word` in a small payload, its low byte repeated in a large one.
#[inline(always)]
fn rest(words: usize, word: u64) -> u64 {
    if words < LARGE { word } else { (word & 0xff) * 0x0101_0101_0101_0101 }
}

/// Writes a payload of `words` words at `dst`.
///
/// # Safety
/// `dst` must be valid for writing `words` words, aligned, and not accessed by others meanwhile.
#[inline(always)]
pub(crate) unsafe fn fill(dst: *mut u64, words: usize, word: u64) {
    if words < LARGE {
        for i in 0..words {
            // SAFETY: in range and exclusive, by the caller's promise.
            unsafe { dst.add(i).write(word) }
        }
    } else {
        // SAFETY: as above; the words are overwritten whole.
        unsafe {
            dst.write_bytes(word as u8, words);
            dst.write(word);
        }
    }
}

/// Reads a payload of `words` words at `src` and returns its word.
///
/// # Safety
/// `src` must be valid for reading `words` initialised words, aligned, and not written by others meanwhile.
///
/// # Panics
/// If the words are not what [`fill`] writes, as far as their sum shows.
#[inline(always)]
pub(crate) unsafe fn read(src: *const u64, words: usize) -> u64 {
    let mut sum = 0u64;
    // From the first word on: reading the same pieces that were written lets one core forward them to itself.
    for i in 0..words {
        // SAFETY: in range and not written meanwhile, by the caller's promise.
        sum = sum.wrapping_add(unsafe { src.add(i).read() });
    }
    // SAFETY: every payload has at least one word, readable by the caller's promise.
    let word = unsafe { src.read() };
    let expected = rest(words, word).wrapping_mul(words as u64 - 1).wrapping_add(word);
    assert!(sum == expected, "a payload was damaged in flight");
    word
}
