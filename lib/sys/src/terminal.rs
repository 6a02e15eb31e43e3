//! Text on a terminal: its width, characters that would control it, pipes in its place.

use std::error::Error;
use std::io;
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

/// A line of text that others chose, such as a file name, without control characters: U+FFFD stands for each.
#[must_use]
pub fn printable(line: &str) -> String {
    line.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Wraps at blanks; a word longer than `width` gets a line of its own.
#[must_use]
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Whether output failed because its reader closed the pipe, as `head` does. Looks at the causes of the error, too.
#[must_use]
pub fn is_closed_pipe(error: &(dyn Error + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let mut kinds = causes.filter_map(|error| error.downcast_ref()).map(io::Error::kind);
    kinds.any(|kind| kind == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_wrap_at_blanks() {
        assert_eq!(wrap("ab cd\nef", 5), ["ab cd", "ef"]);
        assert_eq!(wrap("abcdefgh ij", 5), ["abcdefgh", "ij"]);
        assert!(wrap("", 5).is_empty());
    }

    #[test]
    fn file_has_no_columns() {
        assert_eq!(columns(std::fs::File::open("/dev/null").unwrap()), None);
    }
}
