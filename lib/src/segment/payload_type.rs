//! The types of a link's payload, as the first process that uses typed messages wrote them: one of what the primary side sends,
//! messages and replies, and one of what the secondary side sends, messages and requests.
//!
//! Each has a line of the link's own segment, all zero until then:
//!
//! ```text
//! word 0    fingerprint: FNV-1a over the bytes of the other words; 0: no type was declared
//!      1    bits 0-31 size of a value, or of an element of a slice; bits 32-39 log2 of its alignment; bit 40: a slice
//!      2-7  its name: up to 48 printable ASCII characters, padded with zeros
//! ```
//!
//! The fingerprint alone decides: one compare-exchange from 0 declares a type. The other words are for error messages,
//! and are written after it, only by processes whose type has that fingerprint. They all write the same bytes, so a
//! process that dies meanwhile leaves words that the next one completes. A reader checks them against the fingerprint,
//! so no access needs an ordering.
//!
//! This detects mistakes, not attacks: a hostile peer can write any word, and the worst that follows is a refusal, or
//! the acceptance of another type. Payload is still safe to read, because all types of payload are valid for all bytes.

use std::fmt;

#[cfg(feature = "typed")]
use crate::participant::Side;
use crate::sync::{AtomicU64, Line, Ordering, WORDS_PER_LINE};

/// Words of a type. Each word that is read costs a model time.
const WORDS: usize = if cfg!(loom) { 2 } else { WORDS_PER_LINE - 1 };
/// Characters in the name of a type, at most.
pub(crate) const NAME_MAX: usize = (WORDS - 1) * size_of::<u64>();
const SLICE: u64 = 1 << 40;
const FINGERPRINT: usize = 0;

/// Name, size and alignment of a type: words 1 to 7 of the line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct PayloadType([u64; WORDS]);

impl PayloadType {
    /// Describes a type. `None` if it does not fit the line: the name must have 1 to [`NAME_MAX`] printable ASCII
    /// characters, and the size 32 bits.
    #[cfg_attr(not(feature = "typed"), expect(dead_code, reason = "inspection only reads types"))]
    pub(crate) fn new(name: &str, size: usize, align: usize, is_slice: bool) -> Option<Self> {
        let mut words = [0; WORDS];
        words[0] = u64::from(u32::try_from(size).ok()?)
            | u64::from(align.trailing_zeros()) << 32
            | if is_slice { SLICE } else { 0 };
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_printable) {
            return None;
        }
        let mut bytes = [0; NAME_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        for (word, bytes) in words[1..].iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Some(Self(words))
    }

    /// The fingerprint of the type.
    pub(crate) fn fingerprint(&self) -> u64 {
        let bytes = self.0.iter().flat_map(|word| word.to_le_bytes());
        let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        // 0 means that no type is declared.
        bytes.fold(0xcbf2_9ce4_8422_2325, hash).max(1)
    }

    /// Size of a value, or of an element of a slice.
    fn size(&self) -> u64 {
        self.0[0] & u64::from(u32::MAX)
    }

    fn is_slice(&self) -> bool {
        self.0[0] & SLICE != 0
    }

    /// The name, without the brackets of a slice. Printable, whatever the words contain.
    pub(crate) fn name(&self) -> String {
        let bytes = self.0[1..].iter().flat_map(|word| word.to_le_bytes());
        bytes
            .take_while(|&byte| byte != 0)
            .map(|byte| if is_printable(byte) { byte.into() } else { '?' })
            .collect()
    }
}

/// The payload types of both sides.
#[cfg(feature = "typed")]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct PayloadTypes {
    pub(crate) of_primary: PayloadType,
    pub(crate) of_secondary: PayloadType,
}

#[cfg(feature = "typed")]
impl PayloadTypes {
    /// One type for both sides.
    pub(crate) fn both(payload: PayloadType) -> Self {
        Self { of_primary: payload, of_secondary: payload }
    }

    /// The type of what `side` sends.
    pub(crate) fn of(&self, side: Side) -> &PayloadType {
        match side {
            Side::Primary => &self.of_primary,
            Side::Secondary => &self.of_secondary,
        }
    }
}

#[cfg(feature = "typed")]
impl fmt::Display for PayloadTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = |payload| Some(DeclaredType::Known(payload));
        DeclaredTypes { of_primary: known(self.of_primary), of_secondary: known(self.of_secondary) }.fmt(f)
    }
}

/// The payload types of both sides that another process declared.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DeclaredTypes {
    pub(crate) of_primary: Option<DeclaredType>,
    pub(crate) of_secondary: Option<DeclaredType>,
}

impl DeclaredTypes {
    /// Whether the other process has declared both, with their names.
    #[cfg_attr(not(feature = "typed"), expect(dead_code, reason = "inspection only reads types"))]
    pub(crate) fn are_known(&self) -> bool {
        [self.of_primary, self.of_secondary]
            .iter()
            .all(|declared| matches!(declared, Some(DeclaredType::Known(_))))
    }
}

impl fmt::Display for DeclaredTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |declared: Option<DeclaredType>| {
            declared.map_or_else(|| "no type yet".to_owned(), |declared| declared.to_string())
        };
        let (primary, secondary) = (side(self.of_primary), side(self.of_secondary));
        if self.of_primary == self.of_secondary {
            f.write_str(&primary)
        } else {
            write!(f, "{primary} from the primary side and {secondary} from the secondary side")
        }
    }
}

fn is_printable(byte: u8) -> bool {
    byte == b' ' || byte.is_ascii_graphic()
}

impl fmt::Display for PayloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, size) = (self.name(), self.size());
        // The 8 bits may have any value.
        let align = 1_u128.checked_shl((self.0[0] >> 32 & 0xff) as u32).unwrap_or(0);
        match self.is_slice() {
            true => write!(f, "[{name}] ({size} bytes each, aligned to {align})"),
            false => write!(f, "{name} ({size} bytes, aligned to {align})"),
        }
    }
}

/// A type that another process declared.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum DeclaredType {
    Known(PayloadType),
    /// Its process has not written the name yet, or ended before it did.
    Unnamed {
        fingerprint: u64,
    },
}

impl fmt::Display for DeclaredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(known) => known.fmt(f),
            Self::Unnamed { fingerprint } => {
                write!(f, "a type without a name (fingerprint {fingerprint:#x})")
            }
        }
    }
}

/// A line that holds the type of what one side sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadTypeLine<'a>(pub(crate) &'a Line);

impl PayloadTypeLine<'_> {
    fn fingerprint(&self) -> &AtomicU64 {
        self.0.word(FINGERPRINT)
    }

    /// Declares the type. Returns `false` if another type is declared.
    #[cfg_attr(not(feature = "typed"), expect(dead_code, reason = "inspection only reads types"))]
    pub(crate) fn declare(&self, payload: &PayloadType) -> bool {
        let ours = payload.fingerprint();
        let declared = self.fingerprint().compare_exchange(0, ours, Ordering::Relaxed, Ordering::Relaxed);
        if declared.is_err_and(|theirs| theirs != ours) {
            return false;
        }
        for (i, &word) in payload.0.iter().enumerate() {
            self.0.word(i + 1).store(word, Ordering::Relaxed);
        }
        true
    }

    /// The type that was declared.
    pub(crate) fn declared(&self) -> Option<DeclaredType> {
        let fingerprint = self.fingerprint().load(Ordering::Relaxed);
        let read = self.named();
        match fingerprint {
            0 => None,
            _ if read.fingerprint() == fingerprint => Some(DeclaredType::Known(read)),
            fingerprint => Some(DeclaredType::Unnamed { fingerprint }),
        }
    }

    /// The fingerprint of the declared type. 0 if none is declared.
    #[cfg(feature = "typed")]
    pub(crate) fn declared_fingerprint(&self) -> u64 {
        self.fingerprint().load(Ordering::Relaxed)
    }

    /// Removes the declaration. Only while no other participant is attached.
    pub(crate) fn clear(&self) {
        // The name, too: `restore` would declare it again.
        (0..=WORDS).for_each(|i| self.0.word(i).store(0, Ordering::Relaxed));
    }

    /// Removes the declaration of the type with this fingerprint, to replace it.
    #[cfg(feature = "typed")]
    pub(crate) fn withdraw(&self, fingerprint: u64) {
        let _ = self.fingerprint().compare_exchange(fingerprint, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Declares the type that was withdrawn again: the one with this fingerprint, or for 0 the one with the name that is
    /// still there, if there is one. Does nothing if a type is declared.
    #[cfg(feature = "typed")]
    pub(crate) fn restore(&self, fingerprint: u64) {
        let named = self.named();
        let withdrawn = match fingerprint {
            0 if named.0 == [0; WORDS] => return,
            0 => named.fingerprint(),
            fingerprint => fingerprint,
        };
        let _ = self.fingerprint().compare_exchange(0, withdrawn, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The type that words 1 to 7 name.
    fn named(&self) -> PayloadType {
        PayloadType(std::array::from_fn(|i| self.0.word(i + 1).load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn slot() -> PayloadType {
        PayloadType::new("fronthaul.Slot/1", 24, 8, false).unwrap()
    }

    fn samples() -> PayloadType {
        PayloadType::new("f32", 4, 4, true).unwrap()
    }

    #[test]
    fn first_declaration_stays_until_it_is_cleared() {
        let line = Line::zeroed();
        let line = PayloadTypeLine(&line);
        assert_eq!(line.declared(), None);
        assert!(line.declare(&slot()) && line.declare(&slot()) && !line.declare(&samples()));
        let declared = line.declared().unwrap();
        assert_eq!(declared, DeclaredType::Known(slot()));
        assert_eq!(declared.to_string(), "fronthaul.Slot/1 (24 bytes, aligned to 8)");
        line.clear();
        assert!(line.declared().is_none() && line.declare(&samples()));
        assert_eq!(line.declared().unwrap().to_string(), "[f32] (4 bytes each, aligned to 4)");
    }

    #[test]
    #[cfg(feature = "typed")]
    fn type_that_was_cleared_is_not_restored() {
        let line = Line::zeroed();
        let line = PayloadTypeLine(&line);
        assert!(line.declare(&slot()));
        line.withdraw(slot().fingerprint());
        line.restore(0);
        assert_eq!(line.declared(), Some(DeclaredType::Known(slot())));
        line.clear();
        line.restore(0);
        assert_eq!(line.declared(), None);
    }

    #[test]
    fn types_that_differ_in_anything_have_other_fingerprints() {
        let types = [
            ("Slot", 24, 8, false),
            ("Slots", 24, 8, false),
            ("Slot", 32, 8, false),
            ("Slot", 24, 4, false),
            ("Slot", 24, 8, true),
        ]
        .map(|(name, size, align, is_slice)| {
            PayloadType::new(name, size, align, is_slice).unwrap().fingerprint()
        });
        let distinct: std::collections::BTreeSet<u64> = types.into_iter().collect();
        assert_eq!(distinct.len(), types.len());
        // Another version of the library must compute the same.
        assert_eq!(slot().fingerprint(), 12_547_303_735_344_138_755);
    }

    #[test]
    fn names_that_do_not_fit_are_refused() {
        let named = |name: &str| PayloadType::new(name, 1, 1, false);
        assert!(named(&"x".repeat(NAME_MAX)).is_some_and(|named| named.name().len() == NAME_MAX));
        for name in ["", &"x".repeat(NAME_MAX + 1), "tab\t", "Größe", "\u{1b}[2J"] {
            assert_eq!(named(name), None, "{name}");
        }
        assert_eq!(PayloadType::new("large", 1 << 32, 1, false), None);
    }

    #[test]
    fn declaration_that_was_cut_off_is_completed_by_the_same_type() {
        for written in 0..WORDS_PER_LINE - 1 {
            let line = Line::zeroed();
            let line = PayloadTypeLine(&line);
            line.fingerprint().store(slot().fingerprint(), Ordering::Relaxed);
            for (i, word) in slot().0.into_iter().enumerate().take(written) {
                line.0.word(i + 1).store(word, Ordering::Relaxed);
            }
            assert!(!line.declare(&samples()), "{written} words");
            assert!(line.declare(&slot()));
            assert_eq!(line.declared(), Some(DeclaredType::Known(slot())));
        }
    }

    #[test]
    fn any_words_are_read_as_printable_text() {
        for pattern in [u64::MAX, 0x1b1b_1b1b_1b1b_1b1b, 0xc3a9_c3a9_c3a9_c3a9, 1 << 63] {
            let hostile = PayloadType([pattern; WORDS]);
            let line = Line::zeroed();
            let line = PayloadTypeLine(&line);
            for (fingerprint, is_known) in [(hostile.fingerprint(), true), (7, false)] {
                line.fingerprint().store(fingerprint, Ordering::Relaxed);
                (1..WORDS_PER_LINE).for_each(|i| line.0.word(i).store(pattern, Ordering::Relaxed));
                let declared = line.declared().unwrap();
                assert_eq!(matches!(declared, DeclaredType::Known(_)), is_known);
                assert!(declared.to_string().bytes().all(is_printable), "{declared}");
            }
        }
    }

    #[test]
    fn of_types_that_are_declared_at_once_one_wins() {
        for _ in 0..if cfg!(miri) { 3 } else { 100 } {
            let line = Line::zeroed();
            let types: [_; 4] =
                std::array::from_fn(|i| PayloadType::new(&format!("Type{}", i / 2), 8, 8, false).unwrap());
            let won: Vec<bool> = std::thread::scope(|scope| {
                let threads =
                    types.each_ref().map(|payload| scope.spawn(|| PayloadTypeLine(&line).declare(payload)));
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(won[0] == won[1] && won[2] == won[3] && won[0] != won[2], "{won:?}");
            let winner = types[usize::from(won[2]) * 2];
            assert_eq!(PayloadTypeLine(&line).declared(), Some(DeclaredType::Known(winner)));
        }
    }
}
