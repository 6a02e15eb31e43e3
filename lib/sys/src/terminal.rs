//! The width of a terminal.

use std::os::fd::{AsFd, AsRawFd};

/// Returns the number of columns, or `None` if the descriptor is not a terminal or its size is unknown.
#[must_use]
pub fn columns(terminal: impl AsFd) -> Option<u16> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    #[expect(unsafe_code, reason = "nix has no function for it")]
    // SAFETY: The descriptor is open, and the request writes one `winsize`, to which `size` is an exclusive reference.
    let result = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0).then_some(size.ws_col)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_has_no_columns() {
        assert_eq!(columns(std::fs::File::open("/dev/null").unwrap()), None);
    }
}
