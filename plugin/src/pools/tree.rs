//! Going through a pool's directory. A pod can put anything there: links, names of one file, a million files, directories
//! deeper than a stack, and all of it changes while we look. So everything goes by descriptor, no link is followed, nothing is
//! opened but directories, and what is needed has a bound: a few descriptors, a flat stack.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use shmesh_sys::dir::{self, Entry, look_at, names, open_at, remove_dir_at, remove_file_at, rename_at};
use shmesh_sys::errno::Errno;

/// Deeper directories are not counted: links are made of files.
const MAX_DEPTH: u32 = 16;
/// Entries that one look counts, or one sweep takes away.
const MAX_ENTRIES: u64 = 1 << 20;
/// What a directory that is moved up is called.
const MOVED: &str = ".shmesh-swept";

/// Files and directories, and the bytes that they take.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Sum {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl Sum {
    /// It is there. A file takes its bytes once, however many names it has.
    fn add(&mut self, found: &Entry) {
        self.files += 1;
        self.bytes += found.bytes / names_of(found);
    }

    /// It is gone, and its bytes with its last name.
    fn add_gone(&mut self, found: &Entry) {
        self.files += 1;
        self.bytes += if names_of(found) == 1 { found.bytes } else { 0 };
    }
}

/// A directory has more names than one: its own, and "." and "..".
fn names_of(found: &Entry) -> u64 {
    if found.is_dir { 1 } else { found.names.max(1) }
}

/// What is in it, but for what is very deep or very much.
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

/// Takes things away from a directory.
pub(super) struct Remover<F> {
    top: OwnedFd,
    device: u64,
    goes_on: F,
    seen: u64,
    /// Directories that were moved up, and how many of them were dealt with.
    moved: u64,
    emptied: u64,
    stamp: u128,
    pub(super) gone: Sum,
    pub(super) failures: u64,
}

impl<F: Fn() -> bool> Remover<F> {
    /// `stamp` makes names that nobody else has.
    pub(super) fn new(directory: &Path, stamp: u128, goes_on: F) -> Result<Self, Errno> {
        let top = dir::open(directory)?;
        let device = dir::look(&top)?.device;
        let (gone, failures) = (Sum::default(), 0);
        Ok(Self { top, device, goes_on, seen: 0, moved: 0, emptied: 0, stamp, gone, failures })
    }

    /// Takes away everything of which `is_old` holds.
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
                        self.take(&top, name);
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
        // It has no nul.
        std::ffi::CString::new(format!("{MOVED}-{:x}-{number}", self.stamp)).unwrap_or_default()
    }

    fn empty_moved(&mut self) {
        while self.emptied < self.moved && self.may_go_on() {
            let name = self.name(self.emptied);
            self.emptied += 1;
            self.empty(&name);
        }
    }

    /// Takes away a directory of the top.
    fn empty(&mut self, name: &CStr) {
        let Ok(found) = look_at(&self.top, name) else { return };
        match open_at(&self.top, name) {
            Ok(directory) => names(&directory, |below| {
                let goes_on = self.may_go_on();
                if goes_on {
                    self.take(&directory, below);
                }
                goes_on
            }),
            Err(error) => tracing::debug!(?name, %error, "cannot be opened"),
        }
        match remove_dir_at(&self.top, name) {
            Ok(()) => self.gone.add_gone(&found),
            Err(error) => self.stays(name, error),
        }
    }

    /// Takes away a file or an empty directory. One that is not empty is moved to the top: emptied there, it takes no
    /// descriptor for each directory that it was in.
    fn take(&mut self, directory: &OwnedFd, name: &CStr) {
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
            self.stays(name, error);
        }
    }

    fn stays(&mut self, name: &CStr, error: Errno) {
        // Somebody else was quicker.
        if error != Errno::ENOENT {
            tracing::debug!(?name, %error, "stays");
            self.failures += 1;
        }
    }
}
