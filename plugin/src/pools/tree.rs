//! Walks the directory of a pool with hostile contents: links, hard links, millions of files, deep
//! directories, concurrent changes. All access is by descriptor; links are not followed; only directories are
//! opened; the number of descriptors and the stack depth are bounded.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use shmesh_sys::dir::{self, Entry, look_at, names, open_at, remove_dir_at, remove_file_at, rename_at};
use shmesh_sys::errno::Errno;

/// Deeper directories are not counted.
const MAX_DEPTH: u32 = 16;
/// Maximum number of entries that one count or one sweep visits.
const MAX_ENTRIES: u64 = 1 << 20;
/// Name prefix of directories that are moved to the top to be emptied.
const MOVED: &str = ".shmesh-swept";

/// Number of files and directories, and their size.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Sum {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl Sum {
    /// Counts an entry. A file with several names counts its bytes once in total.
    fn add(&mut self, found: &Entry) {
        self.files += 1;
        self.bytes += found.bytes / names_of(found);
    }

    /// Counts a removed entry. Its bytes are freed with its last name.
    fn add_gone(&mut self, found: &Entry) {
        self.files += 1;
        self.bytes += if names_of(found) == 1 { found.bytes } else { 0 };
    }
}

/// A directory always has several links: its name, `.` and `..` of its children.
fn names_of(found: &Entry) -> u64 {
    if found.is_dir { 1 } else { found.names.max(1) }
}

/// Counts the contents of a directory up to the limits.
pub(super) fn count(directory: &Path) -> Sum {
    let mut sum = Sum::default();
    if let Ok(top) = dir::open(directory) {
        count_below(&top, 1, &mut sum);
    }
    sum
}

fn count_below(directory: &OwnedFd, depth: u32, sum: &mut Sum) {
    names(directory, |name| {
        if let Ok(found) = look_at(directory, name) {
            sum.add(&found);
            if found.is_dir
                && depth < MAX_DEPTH
                && let Ok(below) = open_at(directory, name)
            {
                count_below(&below, depth + 1, sum);
            }
        }
        sum.files < MAX_ENTRIES
    });
}

/// Removes old entries from a directory tree.
pub(super) struct Remover<F> {
    top: OwnedFd,
    device: u64,
    goes_on: F,
    seen: u64,
    /// Directories moved to the top, and how many of them are done.
    moved: u64,
    emptied: u64,
    stamp: u128,
    pub(super) gone: Sum,
    pub(super) failures: u64,
}

impl<F: Fn() -> bool> Remover<F> {
    /// Opens the directory. `stamp` makes the names of moved directories unique.
    pub(super) fn new(directory: &Path, stamp: u128, goes_on: F) -> Result<Self, Errno> {
        let top = dir::open(directory)?;
        let device = dir::look(&top)?.device;
        let (gone, failures) = (Sum::default(), 0);
        Ok(Self { top, device, goes_on, seen: 0, moved: 0, emptied: 0, stamp, gone, failures })
    }

    /// Removes every entry for which `is_old` returns true.
    pub(super) fn run(&mut self, is_old: impl Fn(&Entry) -> bool) -> Result<(), Errno> {
        let top = self.top.try_clone().map_err(|_| Errno::EMFILE)?;
        names(&top, |name| {
            if !self.may_go_on() {
                return false;
            }
            match look_at(&top, name) {
                Ok(found) if is_old(&found) => {
                    if found.is_dir && found.device == self.device {
                        self.empty(name);
                        self.empty_moved();
                    } else {
                        self.remove(&top, name);
                    }
                }
                _ => {}
            }
            true
        });
        Ok(())
    }

    fn may_go_on(&mut self) -> bool {
        self.seen += 1;
        self.seen <= MAX_ENTRIES && (self.goes_on)()
    }

    fn name(&self, number: u64) -> std::ffi::CString {
        // The formatted name contains no NUL.
        std::ffi::CString::new(format!("{MOVED}-{:x}-{number}", self.stamp)).unwrap_or_default()
    }

    fn empty_moved(&mut self) {
        while self.emptied < self.moved && self.may_go_on() {
            let name = self.name(self.emptied);
            self.emptied += 1;
            self.empty(&name);
        }
    }

    /// Removes a directory at the top level with its contents.
    fn empty(&mut self, name: &CStr) {
        let Ok(found) = look_at(&self.top, name) else { return };
        match open_at(&self.top, name) {
            Ok(directory) => names(&directory, |below| {
                let goes_on = self.may_go_on();
                if goes_on {
                    self.remove(&directory, below);
                }
                goes_on
            }),
            Err(error) => tracing::debug!(?name, %error, "cannot be opened"),
        }
        match remove_dir_at(&self.top, name) {
            Ok(()) => self.gone.add_gone(&found),
            Err(error) => self.failed(name, error),
        }
    }

    /// Removes a file or an empty directory. A non-empty directory is moved to the top level and emptied
    /// there, so that depth costs no descriptors.
    fn remove(&mut self, directory: &OwnedFd, name: &CStr) {
        let Ok(found) = look_at(directory, name) else { return };
        let outcome = if found.device != self.device {
            Err(Errno::EXDEV)
        } else if !found.is_dir {
            remove_file_at(directory, name).map(|()| self.gone.add_gone(&found))
        } else {
            match remove_dir_at(directory, name) {
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                    let above = self.name(self.moved);
                    rename_at(directory, name, &self.top, &above).map(|()| self.moved += 1)
                }
                outcome => outcome.map(|()| self.gone.add_gone(&found)),
            }
        };
        if let Err(error) = outcome {
            self.failed(name, error);
        }
    }

    fn failed(&mut self, name: &CStr, error: Errno) {
        // ENOENT: another process removed it first.
        if error != Errno::ENOENT {
            tracing::debug!(?name, %error, "cannot be removed");
            self.failures += 1;
        }
    }
}
