//! Payload of the demo's messages, and checking each of its bytes.

use shmesh::config::{LinkConfig, PoolId};
use shmesh::{Link, Loan, Message};

/// `msg_id` of the last message, which has the number of messages sent before it.
pub(super) const FINISHED: i32 = -1;

/// Identifies a message; its form and content follow from this.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Stamp {
    /// The process of its side that sent it: 1 for the first, 2 for its successor.
    pub(super) generation: u16,
    /// The number of the message in that process's stream.
    pub(super) number: u64,
}

const NUMBER_BITS: u32 = 48;

impl Stamp {
    fn word(self) -> u64 {
        u64::from(self.generation) << NUMBER_BITS | self.number
    }

    fn of(word: u64) -> Self {
        let generation = u16::try_from(word >> NUMBER_BITS).unwrap_or(u16::MAX);
        Self { generation, number: word & ((1 << NUMBER_BITS) - 1) }
    }

    /// Mixes the bits, so that neighbours look different.
    fn mixed(self) -> u64 {
        let mut word = self.word().wrapping_add(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word ^ word >> 31
    }
}

/// The form in which a message is sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum MessageForm {
    /// An inline message of this many bytes.
    Inline(usize),
    /// A MSG part of this many bytes.
    Pooled(usize),
    /// A MSG part, and a DATA part in this pool, with their bytes.
    Both(usize, PoolId, usize),
}

impl MessageForm {
    /// Payload bytes of both parts.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Inline(msg) | Self::Pooled(msg) => msg as u64,
            Self::Both(msg, _, data) => (msg + data) as u64,
        }
    }
}

/// The forms that a link allows.
#[derive(Clone, Debug)]
pub(super) struct Forms {
    msg_max: usize,
    data: Vec<(PoolId, usize)>,
}

/// Size of a word; payloads are whole words.
const WORD: usize = 8;
/// Maximum size of MSG parts in the stream.
const MSG_MAX: usize = 512;

impl Forms {
    /// The forms of messages that a link allows; `None` if its MSG buffers are too small for a stamp.
    pub(super) fn of(config: &LinkConfig) -> Option<Self> {
        let whole = |pool: PoolId| config.pool(pool).buf_size_bytes as usize / WORD * WORD;
        let data = [PoolId::CpuData, PoolId::CpuLarge].into_iter();
        let data = data.filter(|&pool| config.pool(pool).is_enabled() && whole(pool) > 0);
        let msg_max = whole(PoolId::CpuMsg).min(MSG_MAX);
        (msg_max > 0).then(|| Self { msg_max, data: data.map(|pool| (pool, whole(pool))).collect() })
    }

    /// The form and sizes of a message of the stream; all sizes occur over time.
    pub(super) fn streamed(&self, stamp: Stamp) -> MessageForm {
        let mixed = stamp.mixed();
        let up_to = |max: usize, bits: u64| WORD + usize::try_from(bits).unwrap_or(0) % (max / WORD) * WORD;
        let msg = up_to(self.msg_max, mixed & 0xffff);
        match stamp.number % 4 {
            1 => MessageForm::Pooled(msg),
            2 => match self.data.get(usize::try_from(mixed >> 60).unwrap_or(0) % self.data.len().max(1)) {
                Some(&(pool, max)) => MessageForm::Both(msg, pool, up_to(max, mixed >> 16 & 0xffff_ffff)),
                None => MessageForm::Pooled(msg),
            },
            _ => MessageForm::Inline(up_to(48, mixed >> 8 & 0xff)),
        }
    }

    /// The forms whose round trips are timed, with their names.
    pub(super) fn timed(&self) -> Vec<(String, MessageForm)> {
        let pooled = self.msg_max.min(64);
        let mut forms = vec![
            ("48 B in the ring".to_owned(), MessageForm::Inline(48)),
            (format!("{pooled} B in a MSG buffer"), MessageForm::Pooled(pooled)),
        ];
        if let Some(&(pool, size)) = self.data.first() {
            let data = size.min(65_536);
            let shown = crate::human::bytes(data as u64);
            forms.push((format!("8 B MSG and {shown} DATA"), MessageForm::Both(8, pool, data)));
        }
        forms
    }
}

fn seed(stamp: Stamp, part: u64) -> u64 {
    stamp.word() ^ part.wrapping_mul(0xa5a5_a5a5_5a5a_5a5b)
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn fill(bytes: &mut [u8], seed: u64) {
    let mut word = seed;
    for place in bytes.as_chunks_mut::<WORD>().0 {
        *place = word.to_le_bytes();
        word = word.wrapping_add(STEP);
    }
}

fn is_filled(bytes: &[u8], seed: u64) -> bool {
    let mut word = seed;
    let mut difference = 0;
    for place in bytes.as_chunks::<WORD>().0 {
        difference |= u64::from_le_bytes(*place) ^ word;
        word = word.wrapping_add(STEP);
    }
    difference == 0
}

/// A message that is written and not sent.
#[derive(Debug)]
pub(super) enum PreparedMessage<'a> {
    Inline([u8; 48], usize),
    Loan(Loan<'a>),
}

/// Writes a message without sending it.
pub(super) fn prepare<'a>(
    link: &'a Link,
    stamp: Stamp,
    form: MessageForm,
) -> shmesh::Result<PreparedMessage<'a>> {
    let mut loan = match form {
        MessageForm::Inline(len) => {
            let mut bytes = [0; 48];
            fill(&mut bytes[..len], seed(stamp, 0));
            return Ok(PreparedMessage::Inline(bytes, len));
        }
        MessageForm::Pooled(_) => link.loan()?,
        MessageForm::Both(_, pool, _) => link.loan_with(pool)?,
    };
    let msg = match form {
        MessageForm::Inline(msg) | MessageForm::Pooled(msg) | MessageForm::Both(msg, ..) => msg,
    };
    fill(loan.resize_msg(msg)?, seed(stamp, 0));
    if let MessageForm::Both(_, _, len) = form {
        fill(loan.resize_data(len)?, seed(stamp, 1));
    }
    Ok(PreparedMessage::Loan(loan.with_msg_id(1)))
}

/// Reads a message's stamp.
pub(super) fn stamp_of(message: &Message<'_>) -> Option<Stamp> {
    let first = message.msg().first_chunk::<WORD>()?;
    Some(Stamp::of(u64::from_le_bytes(*first)))
}

/// Checks every byte of a message. The error describes the difference.
pub(super) fn check(message: &Message<'_>, stamp: Stamp, form: MessageForm) -> Result<(), String> {
    let (inline, msg, data) = match form {
        MessageForm::Inline(msg) => (true, msg, None),
        MessageForm::Pooled(msg) => (false, msg, None),
        MessageForm::Both(msg, pool, data) => (false, msg, Some((pool, data))),
    };
    let fail =
        |what: &str| Err(format!("message {} of generation {}: {what}", stamp.number, stamp.generation));
    if message.is_inline() != inline || message.msg().len() != msg {
        return fail("was received in another form than it was sent in");
    }
    if message.data_pool() != data.map(|(pool, _)| pool)
        || message.data().len() != data.map_or(0, |(_, len)| len)
    {
        return fail("has another DATA part than it was sent with");
    }
    if !is_filled(message.msg(), seed(stamp, 0)) {
        return fail("its MSG part was damaged");
    }
    if !is_filled(message.data(), seed(stamp, 1)) {
        return fail("its DATA part was damaged");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_byte_is_detected() {
        let stamp = Stamp { generation: 2, number: 77 };
        assert_eq!(Stamp::of(stamp.word()), stamp);
        let mut bytes = [0; 64];
        fill(&mut bytes, seed(stamp, 1));
        assert!(is_filled(&bytes, seed(stamp, 1)) && !is_filled(&bytes, seed(stamp, 0)));
        bytes[63] ^= 1;
        assert!(!is_filled(&bytes, seed(stamp, 1)));
    }

    #[test]
    fn every_message_form_occurs_and_fits() {
        let config = LinkConfig::new("x".parse().unwrap());
        let forms = Forms::of(&config).unwrap();
        let (mut inline, mut pooled, mut both) = (0, 0, 0);
        for number in 0..4000 {
            match forms.streamed(Stamp { generation: 1, number }) {
                MessageForm::Inline(len) => inline += usize::from((8..=48).contains(&len)),
                MessageForm::Pooled(len) => pooled += usize::from((8..=512).contains(&len)),
                MessageForm::Both(msg, _, data) => {
                    both += usize::from(msg >= 8 && (8..=65_536).contains(&data))
                }
            }
        }
        assert_eq!((inline, pooled, both), (2000, 1000, 1000));
    }
}
