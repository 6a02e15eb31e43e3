//! Payload of messages, written and read as in `lib/comparison/src/payload.rs`, so that both sides of a comparison
//! access the same bytes in the same way.

/// From this size on, the C library's `memset` fills a payload.
const LARGE: usize = 512;
const WORD: usize = 8;

/// Writes a whole payload made of `word`: small ones word by word, large ones by `memset` with the word in front.
#[inline(always)]
pub(super) fn fill(bytes: &mut [u8], word: u64) {
    let words = bytes.as_chunks_mut::<WORD>().0;
    // The usual sizes as constants, as in `lib/comparison`.
    match words.len() {
        6 => fill_fixed::<6>(words, word),
        8 => fill_fixed::<8>(words, word),
        len if len < LARGE => words.fill(word.to_ne_bytes()),
        _ => {
            bytes.fill(word.to_le_bytes()[0]);
            if let Some(first) = bytes.first_chunk_mut::<WORD>() {
                *first = word.to_ne_bytes();
            }
        }
    }
}

#[inline(always)]
fn fill_fixed<const WORDS: usize>(words: &mut [[u8; WORD]], word: u64) {
    if let Some(words) = words.first_chunk_mut::<WORDS>() {
        *words = [word.to_ne_bytes(); WORDS];
    }
}

/// Reads a whole payload and returns its word; `None` if its sum differs from the sum of [`fill`].
#[inline(always)]
pub(super) fn read(bytes: &[u8]) -> Option<u64> {
    let words = bytes.as_chunks::<WORD>().0;
    let word = u64::from_ne_bytes(*words.first()?);
    let sum = match words.len() {
        6 => sum_fixed::<6>(words),
        8 => sum_fixed::<8>(words),
        _ => sum(words),
    };
    let rest = if words.len() < LARGE { word } else { (word & 0xff) * 0x0101_0101_0101_0101 };
    let expected = rest.wrapping_mul(words.len() as u64 - 1).wrapping_add(word);
    (sum == expected).then_some(word)
}

#[inline(always)]
fn sum(words: &[[u8; WORD]]) -> u64 {
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

#[inline(always)]
fn sum_fixed<const WORDS: usize>(words: &[[u8; WORD]]) -> u64 {
    words.first_chunk::<WORDS>().map_or(0, |words| sum(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_payload_is_detected() {
        for len in [8, 48, 64, 104, 4096, 65_536] {
            for word in [0, 7, 0x1234, u64::MAX] {
                let mut bytes = vec![0xee; len];
                fill(&mut bytes, word);
                assert_eq!(read(&bytes), Some(word), "{len}");
                if len > 8 {
                    bytes[len - 1] ^= 1;
                    assert_eq!(read(&bytes), None, "{len}");
                }
            }
        }
        assert_eq!(read(&[]), None);
    }
}
