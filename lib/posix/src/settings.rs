//! The environment variables, read once when the library is loaded.

use std::ffi::CStr;
use std::sync::OnceLock;

use shmesh_sys::quantity::{Bytes, QuantityError};

use crate::path::Text;
use crate::sys;

/// The settings from the environment, and facts about the IPC directory.
pub(crate) struct PosixSettings {
    dir: Text,
    /// The file system of the IPC directory. Other pods have the same one.
    pub(crate) device: u64,
    /// The group of the IPC directory, whose members share its files.
    pub(crate) group: u32,
    /// Bytes that all files of the IPC directory may have together.
    pub(crate) limit: Option<u64>,
    /// Whether files of the IPC directory are memory.
    pub(crate) is_tmpfs: bool,
    /// The IPC directory as the kernel names it, without links.
    resolved: Text,
    prefix: Text<256>,
    /// Patterns of names that get the prefix. Copied: programs that set their title overwrite the environment.
    private_names: Box<[u8]>,
    /// Patterns of names that are never marked.
    kept_names: Box<[u8]>,
}

static SETTINGS: OnceLock<Option<PosixSettings>> = OnceLock::new();

/// Reads the environment; called when the library is loaded.
pub(crate) fn load() {
    SETTINGS.get_or_init(read);
}

/// `None`: the library is not loaded yet, or has no IPC directory to work on, so that all calls pass.
pub(crate) fn settings() -> Option<&'static PosixSettings> {
    SETTINGS.get()?.as_ref()
}

impl PosixSettings {
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

    /// Whether a path that the kernel has given is below the IPC directory.
    pub(crate) fn has_below(&self, path: &[u8]) -> bool {
        path.strip_prefix(self.resolved.as_bytes()).is_some_and(|rest| rest.starts_with(b"/"))
    }

    /// The prefix of a name of shared memory: this pod's, or nothing.
    pub(crate) fn prefix_of(&self, name: &[u8]) -> &[u8] {
        if matches_any(&self.private_names, name) { self.prefix.as_bytes() } else { b"" }
    }

    /// Whether a file must stay when no process uses it.
    pub(crate) fn is_kept(&self, name: &[u8]) -> bool {
        matches_any(&self.kept_names, name)
    }
}

fn read() -> Option<PosixSettings> {
    let asked = sys::variable(c"SHMESH_DIR").filter(|path| !path.is_empty());
    let path = asked.unwrap_or(c"/dev/shm").to_bytes();
    let dir = Text::of(&[trimmed(path)]);
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let opened = dir.c_str().and_then(|path| sys::open(path, flags, 0));
    let (Ok(opened), b"/") = (opened, path.get(..1).unwrap_or(b"")) else {
        if let Some(asked) = asked {
            let why = b"is not the absolute path of a directory, so this library does nothing";
            complain(c"SHMESH_DIR", asked, why);
        }
        return None;
    };
    let found = sys::fstat(opened.raw()).ok()?;
    let mut settings = PosixSettings {
        is_tmpfs: sys::is_in_tmpfs(&opened),
        resolved: sys::path_of(opened.raw()).unwrap_or_else(|_| dir.clone()),
        dir,
        device: found.st_dev,
        group: found.st_gid,
        limit: None,
        prefix: Text::new(),
        private_names: Box::default(),
        kept_names: Box::default(),
    };
    if let Some(text) = sys::variable(c"SHMESH_POSIX_LIMIT") {
        match text.to_str().map_or(Err(QuantityError::Malformed), str::parse) {
            Ok(Bytes(limit)) => settings.limit = Some(limit),
            Err(error) => {
                let why: Text<256> =
                    Text::of(&[b"is ", error.as_str().as_bytes(), b"; until then there is no limit"]);
                complain(c"SHMESH_POSIX_LIMIT", text, why.as_bytes());
            }
        }
    }
    if let Some(text) = sys::variable(c"SHMESH_POSIX_KEEP") {
        settings.kept_names = text.to_bytes().into();
    }
    if let Some(text) = sys::variable(c"SHMESH_POSIX_PRIVATE") {
        settings.private_names = text.to_bytes().into();
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

/// Bytes of a value that a complaint repeats.
const MAX_SHOWN_BYTES: usize = 200;

/// One line, because the program has its own use for its standard error.
fn complain(name: &CStr, value: &CStr, what: &[u8]) {
    let value = value.to_bytes();
    let (value, more) = value.get(..MAX_SHOWN_BYTES).map_or((value, &b""[..]), |start| (start, &b"..."[..]));
    let line: Text<1024> =
        Text::of(&[b"libshmesh_posix: ", name.to_bytes(), b"=", value, more, b" ", what, b"\n"]);
    sys::write_error(line.as_bytes());
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
