//! Going through a pool's directory. A pod can put anything there: links, names of one file, a million files, directories
//! deeper than a stack, and all of it changes while we look. So everything goes by descriptor, no link is followed, nothing is
//! opened but directories, and what is needed has a bound: a few descriptors, a flat stack.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

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
    fn add(&mut self, found: &FileStat) {
        self.files += 1;
        self.bytes += bytes(found) / names(found);
    }

    /// It is gone, and its bytes with its last name.
    fn add_gone(&mut self, found: &FileStat) {
        self.files += 1;
        self.bytes += if names(found) == 1 { bytes(found) } else { 0 };
    }
}

fn bytes(found: &FileStat) -> u64 {
    u64::try_from(found.st_blocks).unwrap_or(0) * 512
}

#[allow(clippy::unnecessary_cast, reason = "on other machines it has 32 bits")]
fn names(found: &FileStat) -> u64 {
    if is_dir(found) { 1 } else { found.st_nlink.max(1) as u64 }
}

/// Opens a directory, and not what a link there leads to.
pub(super) fn open(at: impl AsFd, name: &(impl nix::NixPath + ?Sized)) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

fn look(at: impl AsFd, name: &CStr) -> nix::Result<FileStat> {
    fstatat(at, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

fn is_dir(found: &FileStat) -> bool {
    SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

/// What is in a directory, until `each` has enough.
fn entries(directory: &OwnedFd, mut each: impl FnMut(&CStr) -> bool) {
    let Ok(mut listing) =
        openat(directory, c".", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
            .and_then(Dir::from_fd)
    else {
        return;
    };
    for entry in listing.iter() {
        let Ok(entry) = entry else { return };
        let name = entry.file_name();
        if name != c"." && name != c".." && !each(name) {
            return;
        }
    }
}

/// What is in it, but for what is very deep or very much.
pub(super) fn count(directory: &Path) -> Sum {
    let mut sum = Sum::default();
    if let Ok(top) = open(AT_FDCWD, directory) {
        count_below(&top, 1, &mut sum);
    }
    sum
}

fn count_below(directory: &OwnedFd, depth: u32, sum: &mut Sum) {
    entries(directory, |name| {
        if let Ok(found) = look(directory, name) {
            sum.add(&found);
            if is_dir(&found)
                && depth < MAX_DEPTH
                && let Ok(below) = open(directory, name)
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
    pub(super) fn new(directory: &Path, stamp: u128, goes_on: F) -> nix::Result<Self> {
        let top = open(AT_FDCWD, directory)?;
        let device = fstat(&top)?.st_dev;
        let (gone, failures) = (Sum::default(), 0);
        Ok(Self { top, device, goes_on, seen: 0, moved: 0, emptied: 0, stamp, gone, failures })
    }

    /// Takes away everything of which `is_old` holds.
    pub(super) fn run(&mut self, is_old: impl Fn(&FileStat) -> bool) -> nix::Result<()> {
        let top = self.top.try_clone().map_err(|_| Errno::EMFILE)?;
        entries(&top, |name| {
            if !self.may_go_on() {
                return false;
            }
            match look(&top, name) {
                Ok(found) if is_old(&found) => {
                    if is_dir(&found) && found.st_dev == self.device {
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
        let Ok(found) = look(&self.top, name) else { return };
        match open(&self.top, name) {
            Ok(directory) => entries(&directory, |below| {
                let goes_on = self.may_go_on();
                if goes_on {
                    self.take(&directory, below);
                }
                goes_on
            }),
            Err(error) => tracing::debug!(?name, %error, "cannot be opened"),
        }
        match unlinkat(&self.top, name, UnlinkatFlags::RemoveDir) {
            Ok(()) => self.gone.add_gone(&found),
            Err(error) => self.stays(name, error),
        }
    }

    /// Takes away a file or an empty directory. One that is not empty is moved to the top: emptied there, it takes no
    /// descriptor for each directory that it was in.
    fn take(&mut self, directory: &OwnedFd, name: &CStr) {
        let Ok(found) = look(directory, name) else { return };
        let outcome = if found.st_dev != self.device {
            Err(Errno::EXDEV)
        } else if !is_dir(&found) {
            unlinkat(directory, name, UnlinkatFlags::NoRemoveDir).map(|()| self.gone.add_gone(&found))
        } else {
            match unlinkat(directory, name, UnlinkatFlags::RemoveDir) {
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                    let above = self.name(self.moved);
                    renameat(directory, name, &self.top, above.as_c_str()).map(|()| self.moved += 1)
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
