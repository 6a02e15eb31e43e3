//! Paths on the stack.

use std::ffi::CStr;

/// The longest path that the kernel takes, with its final zero.
const MAX_PATH_BYTES: usize = 4096;

/// A text of bounded length without an allocation, always with a final zero.
#[derive(Clone)]
pub(crate) struct Text<const N: usize = MAX_PATH_BYTES> {
    bytes: [u8; N],
    len: usize,
    /// Whether a part did not fit and was left out, so that the text must not be used.
    is_cut: bool,
}

impl<const N: usize> Text<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0, is_cut: false }
    }

    pub(crate) fn of(parts: &[&[u8]]) -> Self {
        let mut text = Self::new();
        for part in parts {
            text.push(part);
        }
        text
    }

    pub(crate) fn push(&mut self, part: &[u8]) {
        let end = self.len.saturating_add(part.len());
        // One byte stays zero.
        match self.bytes.get_mut(self.len..end) {
            Some(room) if end < N => {
                room.copy_from_slice(part);
                self.len = end;
            }
            _ => self.is_cut = true,
        }
    }

    /// A number in hexadecimal digits.
    pub(crate) fn push_hex(&mut self, number: u64, digits: u32) {
        for digit in (0..digits.min(16)).rev() {
            let value = (number >> (digit * 4)) & 0xF;
            self.push(
                b"0123456789abcdef"
                    .get(usize::try_from(value).unwrap_or(0)..)
                    .and_then(|rest| rest.get(..1))
                    .unwrap_or(b"0"),
            );
        }
    }

    /// A number in decimal digits.
    pub(crate) fn push_number(&mut self, number: u32) {
        let mut divisor = 1_000_000_000_u32;
        while divisor > 0 {
            let digit = number.checked_div(divisor).unwrap_or(0);
            if digit > 0 || divisor == 1 {
                self.push_hex(u64::from(digit.checked_rem(10).unwrap_or(0)), 1);
            }
            divisor = divisor.checked_div(10).unwrap_or(0);
        }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }

    /// As a C string.
    ///
    /// # Errors
    /// It was too long (`ENAMETOOLONG`).
    pub(crate) fn c_str(&self) -> Result<&CStr, i32> {
        if self.is_cut {
            return Err(libc::ENAMETOOLONG);
        }
        CStr::from_bytes_until_nul(&self.bytes).map_err(|_| libc::ENAMETOOLONG)
    }
}

/// The directory part of a path that has one, and its last name.
pub(crate) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|byte| *byte == b'/')?;
    Some((path.get(..at)?, path.get(at.checked_add(1)?..)?))
}
