//! The location of an inline message: ids and 48 bytes in one line, the rest in a second line elsewhere.
//!
//! The second lines are not next to the first ones, so messages of up to 48 bytes cost the same as without second lines.

use crate::sync::{Line, Ordering, WORDS_PER_LINE};

/// Maximum size of an inline message. Up to 48 bytes need one cache line, more need two.
pub const INLINE_MAX_BYTES: usize = 112;
/// Bytes of an inline message in its first line.
pub(crate) const FIRST_LINE_BYTES: usize = FIRST_WORDS * size_of::<u64>();
/// Words of the first line before the bytes: the word of the ring or table, and the ids.
const WORDS_BEFORE: usize = 2;
const FIRST_WORDS: usize = WORDS_PER_LINE - WORDS_BEFORE;
const IDS: usize = 1;

/// The bytes of an inline message in private memory.
pub(crate) type InlineWords = [u64; FIRST_WORDS + WORDS_PER_LINE];

const _: () = assert!(INLINE_MAX_BYTES == size_of::<InlineWords>());

/// The two lines of an inline message. Only the holder of the slot or cell writes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InlineLines<'a> {
    first: &'a Line,
    seconds: &'a [Line],
    index: usize,
}

impl<'a> InlineLines<'a> {
    /// The second line is `seconds[index]`.
    #[inline(always)]
    pub(crate) fn new(first: &'a Line, seconds: &'a [Line], index: usize) -> Self {
        Self { first, seconds, index }
    }

    /// The line with the bytes after the first 48.
    #[inline(always)]
    pub(crate) fn second(&self) -> &'a Line {
        &self.seconds[self.index]
    }

    /// Writes ids and at most [`INLINE_MAX_BYTES`] bytes. The last word is padded with zeros.
    #[inline(always)]
    pub(crate) fn write(&self, ids: u64, msg: &[u8]) {
        // One arm per number of words, each straight-line code: with a length known only at run time, a loop over words, or
        // a `memcpy` for the last bytes, costs more than the whole rest of sending.
        macro_rules! by_words {
            ($($words:literal)*) => {
                match msg.len().div_ceil(8) {
                    0 => {}
                    1 => self.store(0, first_word(msg)),
                    $($words => {
                        if let (Some(whole), Some(last)) =
                            (msg.first_chunk::<{ 8 * ($words - 1) }>(), msg.last_chunk::<8>())
                        {
                            for (i, bytes) in whole.as_chunks::<8>().0.iter().enumerate() {
                                self.store(i, u64::from_ne_bytes(*bytes));
                            }
                            // The last eight bytes, without the bytes of the word before.
                            let last = u64::from_le_bytes(*last) >> (8 * (8 * $words - msg.len()));
                            self.store($words - 1, last.to_le());
                        }
                    })*
                    _ => unreachable!("senders check the length"),
                }
            };
        }
        self.first.word(IDS).store(ids, Ordering::Relaxed);
        by_words!(2 3 4 5 6 7 8 9 10 11 12 13 14);
    }

    /// Stores one word of the bytes.
    #[inline(always)]
    fn store(&self, i: usize, word: u64) {
        let place = match i.checked_sub(FIRST_WORDS) {
            None => self.first.word(WORDS_BEFORE + i),
            Some(i) => self.second().word(i),
        };
        place.store(word, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn ids(&self) -> u64 {
        self.first.word(IDS).load(Ordering::Relaxed)
    }

    /// Copies the ids and all bytes, for an observer: others may write them meanwhile.
    pub(crate) fn copied(&self) -> (u64, InlineWords) {
        let mut words = InlineWords::default();
        self.read(u32::MAX, &mut words);
        (self.ids(), words)
    }

    /// Copies the first `len` bytes, rounded up to whole words or lines.
    #[inline(always)]
    pub(crate) fn read(&self, len: u32, into: &mut InlineWords) {
        let (head, rest) = into.split_at_mut(FIRST_WORDS);
        for (i, word) in head.iter_mut().enumerate() {
            *word = self.first.word(WORDS_BEFORE + i).load(Ordering::Relaxed);
        }
        if len as usize > FIRST_LINE_BYTES {
            let second = self.second();
            for (i, word) in rest.iter_mut().enumerate() {
                *word = second.word(i).load(Ordering::Relaxed);
            }
        }
    }
}

/// Converts one to eight bytes to a word in memory order, padded with zeros, by one load, or two or three that overlap.
#[inline(always)]
fn first_word(bytes: &[u8]) -> u64 {
    let len = bytes.len();
    if let Some(whole) = bytes.first_chunk::<8>() {
        return u64::from_ne_bytes(*whole);
    }
    let word = match (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        (Some(first), Some(last)) => {
            u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << (8 * (len - 4))
        }
        _ => [0, len / 2, len - 1].iter().fold(0, |word, &i| word | u64::from(bytes[i]) << (8 * i)),
    };
    word.to_le()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::segment::Lines;

    #[test]
    fn messages_of_each_length_are_read_as_written_and_padded_to_a_word() {
        let bytes: [u8; INLINE_MAX_BYTES] = std::array::from_fn(|i| u8::try_from(i).unwrap() ^ 0xa5);
        // Miri takes seconds for all of them.
        let is_wanted =
            |len: &usize| !cfg!(miri) || [0, 1, 7, 8, 47, 48, 49, 55, 56, 105, 111, 112].contains(len);
        for len in (0..=INLINE_MAX_BYTES).filter(is_wanted) {
            let memory = Lines::heap(2);
            memory.iter().for_each(|line| {
                (0..WORDS_PER_LINE).for_each(|i| line.word(i).store(u64::MAX, Ordering::Relaxed))
            });
            let lines = InlineLines::new(&memory[0], &memory, 1);
            lines.write(7, &bytes[..len]);
            let (ids, words) = lines.copied();
            let stored: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!((ids, &stored[..len]), (7, &bytes[..len]));
            let (padding, behind) = stored[len..].split_at(len.next_multiple_of(8) - len);
            assert!(
                padding.iter().all(|&byte| byte == 0) && behind.iter().all(|&byte| byte == 0xff),
                "{len}"
            );
            assert_eq!(memory[0].word(0).load(Ordering::Relaxed), u64::MAX, "the slot word or owner word");
        }
    }
}
