//! The environment variables, read once when the library is loaded.

use std::ffi::CStr;
use std::sync::OnceLock;

use crate::path::Text;
use crate::sys;

/// What the environment says, and what the IPC directory is.
pub(crate) struct Settings {
    dir: Text,
    /// The file system of the IPC directory. Other pods have the same one.
    pub(crate) device: u64,
    /// The group of the IPC directory, whose members share its files.
    pub(crate) group: u32,
    /// Bytes that all files of the IPC directory may have together.
    pub(crate) limit: Option<u64>,
    prefix: Text<256>,
    /// Patterns of names that get the prefix.
    private_names: Text<1024>,
    /// Patterns of names that are never marked.
    kept_names: Text<1024>,
}

static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();

/// Reads the environment; called when the library is loaded.
pub(crate) fn load() {
    SETTINGS.get_or_init(read);
}

/// `None`: the library is not loaded yet, or has no IPC directory to work on, so that all calls pass.
pub(crate) fn settings() -> Option<&'static Settings> {
    SETTINGS.get()?.as_ref()
}

impl Settings {
    /// The IPC directory, without a slash at its end.
    pub(crate) fn dir(&self) -> &[u8] {
        self.dir.as_bytes()
    }

    /// The name of a path below the IPC directory: what follows the directory. `None`: the path leads elsewhere, or may do so.
    pub(crate) fn below<'p>(&self, path: &'p [u8]) -> Option<&'p [u8]> {
        let rest = path.strip_prefix(self.dir())?.strip_prefix(b"/")?;
        let is_plain = !rest.is_empty()
            && !rest.ends_with(b"/")
            && rest.split(|byte| *byte == b'/').all(|part| part != b"..");
        is_plain.then_some(rest)
    }

    /// What stands before a name of shared memory: the prefix of this pod, or nothing.
    pub(crate) fn prefix_of(&self, name: &[u8]) -> &[u8] {
        if matches_any(self.private_names.as_bytes(), name) { self.prefix.as_bytes() } else { b"" }
    }

    /// Whether a file must stay when no process uses it.
    pub(crate) fn is_kept(&self, name: &[u8]) -> bool {
        matches_any(self.kept_names.as_bytes(), name)
    }
}

fn read() -> Option<Settings> {
    let mut dir = Text::new();
    match sys::variable(c"SHMESH_DIR").filter(|dir| dir.to_bytes().starts_with(b"/")) {
        Some(path) => dir.push(trimmed(path.to_bytes())),
        None => dir.push(b"/dev/shm"),
    }
    let found = sys::stat(dir.c_str().ok()?).ok()?;
    let mut settings = Settings {
        dir,
        device: found.st_dev,
        group: found.st_gid,
        limit: None,
        prefix: Text::new(),
        private_names: Text::new(),
        kept_names: Text::new(),
    };
    if let Some(text) = sys::variable(c"SHMESH_POSIX_LIMIT") {
        settings.limit = bytes(text.to_bytes());
        if settings.limit.is_none() {
            complain(
                c"SHMESH_POSIX_LIMIT",
                text,
                b"is not a number of bytes such as 512Mi, so there is no limit",
            );
        }
    }
    if let Some(text) = sys::variable(c"SHMESH_POSIX_KEEP") {
        settings.kept_names.push(text.to_bytes());
    }
    if let Some(text) = sys::variable(c"SHMESH_POSIX_PRIVATE") {
        settings.private_names.push(text.to_bytes());
        match sys::variable(c"SHMESH_POSIX_PREFIX").map(CStr::to_bytes) {
            Some(prefix) if !prefix.is_empty() && !prefix.contains(&b'/') && prefix.len() < 128 => {
                settings.prefix.push(prefix);
            }
            _ => complain(
                c"SHMESH_POSIX_PRIVATE",
                text,
                b"needs SHMESH_POSIX_PREFIX, 1 to 127 bytes without a slash, so names stay as they are",
            ),
        }
    }
    Some(settings)
}

fn trimmed(path: &[u8]) -> &[u8] {
    let mut path = path;
    while let Some(rest) = path.strip_suffix(b"/") {
        path = rest;
    }
    path
}

/// One line, because the program has its own use for its standard error.
fn complain(name: &CStr, value: &CStr, what: &[u8]) {
    let line: Text<1024> =
        Text::of(&[b"libshmesh_posix: ", name.to_bytes(), b"=", value.to_bytes(), b" ", what, b"\n"]);
    sys::write_error(line.as_bytes());
}

/// A number of bytes with an optional `Ki`, `Mi`, `Gi` or `Ti`.
fn bytes(text: &[u8]) -> Option<u64> {
    let units: [(&[u8], u32); 4] = [(b"Ki", 10), (b"Mi", 20), (b"Gi", 30), (b"Ti", 40)];
    let unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(*unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    std::str::from_utf8(digits).ok()?.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Whether a name matches one of the patterns, which commas separate.
fn matches_any(patterns: &[u8], name: &[u8]) -> bool {
    patterns.split(|byte| *byte == b',').any(|pattern| !pattern.is_empty() && matches(pattern, name))
}

/// Whether a name matches a pattern in which `*` is any text. Without recursion: after a mismatch, the last `*` takes one more byte.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0_usize, 0_usize);
    let mut last: Option<(usize, usize)> = None;
    while let Some(byte) = name.get(n) {
        match pattern.get(p) {
            Some(b'*') => {
                last = Some((p, n));
                p = p.saturating_add(1);
            }
            Some(expected) if expected == byte => {
                p = p.saturating_add(1);
                n = n.saturating_add(1);
            }
            _ => match last {
                Some((star, from)) => {
                    p = star.saturating_add(1);
                    n = from.saturating_add(1);
                    last = Some((star, n));
                }
                None => return false,
            },
        }
    }
    pattern.get(p..).is_some_and(|rest| rest.iter().all(|byte| *byte == b'*'))
}
