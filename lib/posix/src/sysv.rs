//! System V segments as files of the IPC directory, so that processes of several pods share them.
//!
//! | name of the file | the segment |
//! |---|---|
//! | `sysv.KEY` | with a key, in eight hexadecimal digits |
//! | `sysv.private.NUMBER` | made with `IPC_PRIVATE` |
//! | `sysv.removed.INODE`, with `.NUMBER` where that is another file's | removed by `IPC_RMID`, and still attached |
//!
//! The identifier of a segment is the number of its inode, which all containers see alike. The file has the bytes of the segment,
//! rounded up to pages, and a [`SegmentHeader`] in a page of its own behind them, which is read and written and never mapped: another
//! process may truncate the file. Each attachment also locks one of `lease::ATTACHMENTS`: the count of these locks is the count of
//! attachments, and a removed segment goes when all of them can be had.

use std::ffi::{CStr, c_int, c_ulong};
use std::ops::Range;

use shmesh_sys::lease;

use crate::attachments::{ATTACHMENTS, ShmAttachment, Use};
use crate::grow::reserve;
use crate::open::{Creation, Rounds, open, open_existing};
use crate::path::{Text, split};
use crate::settings::PosixSettings;
use crate::sys::{self, CallResult, Fd};

const IPC_CREAT: c_int = 0o1000;
const IPC_EXCL: c_int = 0o2000;
const SHM_RDONLY: c_int = 0o10000;
const SHM_RND: c_int = 0o20000;
const SHM_REMAP: c_int = 0o40000;
const SHM_EXEC: c_int = 0o100_000;
/// In the mode of a segment: it is removed with its last attachment.
const SHM_DEST: u32 = 0o1000;
/// The bytes of which each attachment locks one.
const ATTACHED: Range<u64> = lease::ATTACHMENTS;
/// The first bytes of a header: "shmesh", System V, version 1.
const MAGIC: u64 = u64::from_le_bytes(*b"shmsysv1");
/// Words of a header.
const HEADER_WORDS: usize = 10;
const HEADER_BYTES: usize = HEADER_WORDS * 8;
/// The largest segment: what a file can have, less a page for the header.
const MAX_BYTES: u64 = 1 << 47;
/// Names that are tried for a segment, where other files have them.
const MAX_NAMES: u64 = 16;

/// The properties of a segment that its file stores beside its bytes.
#[derive(Clone, Copy, Default)]
struct SegmentHeader {
    bytes: u64,
    key: c_int,
    mode: u32,
    creator: c_int,
    user: u32,
    group: u32,
    last: c_int,
    attached: i64,
    detached: i64,
    changed: i64,
}

impl SegmentHeader {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let words = [
            MAGIC,
            self.bytes,
            u64::from(self.key.cast_unsigned()),
            u64::from(self.mode),
            u64::from(self.creator.cast_unsigned()),
            u64::from(self.user) | u64::from(self.group) << 32,
            u64::from(self.last.cast_unsigned()),
            self.attached.cast_unsigned(),
            self.detached.cast_unsigned(),
            self.changed.cast_unsigned(),
        ];
        let mut bytes = [0; HEADER_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut words = [0_u64; HEADER_WORDS];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(place.try_into().ok()?);
        }
        let [magic, bytes, key, mode, creator, owner, last, attached, detached, changed] = words;
        let low = |word: u64| u32::try_from(word & 0xFFFF_FFFF).unwrap_or(0);
        let number = |word: u64| low(word).cast_signed();
        (magic == MAGIC).then(|| Self {
            bytes,
            key: number(key),
            mode: low(mode),
            creator: number(creator),
            user: low(owner),
            group: low(owner >> 32),
            last: number(last),
            attached: attached.cast_signed(),
            detached: detached.cast_signed(),
            changed: changed.cast_signed(),
        })
    }

    /// Reads the header of an open segment whose file has this size; what it says is checked against the size.
    fn read(fd: &Fd, found: &libc::stat) -> CallResult<Self> {
        let mut bytes = [0; HEADER_BYTES];
        let page = sys::page_bytes();
        let at = found.st_size.saturating_sub(page.cast_signed());
        if at <= 0 || sys::read_at(fd.raw(), &mut bytes, at)? != HEADER_BYTES {
            return Err(libc::EINVAL);
        }
        let header = Self::decode(&bytes).ok_or(libc::EINVAL)?;
        let is_right = header.bytes > 0 && rounded(header.bytes) == Some(at.cast_unsigned());
        if is_right { Ok(header) } else { Err(libc::EINVAL) }
    }

    /// Writes the header of an open segment, if this process may.
    fn write(&self, fd: &Fd) {
        if let Some(at) = rounded(self.bytes) {
            let _ = sys::write_at(fd.raw(), &self.encode(), at.cast_signed());
        }
    }
}

/// The bytes of whole pages; `None` for more than a segment can have.
fn rounded(bytes: u64) -> Option<u64> {
    let page = sys::page_bytes();
    (bytes <= MAX_BYTES).then(|| bytes.div_ceil(page).saturating_mul(page))
}

fn now() -> i64 {
    sys::clock(libc::CLOCK_REALTIME).0
}

fn id_of(inode: u64) -> c_int {
    c_int::try_from(inode & 0x7FFF_FFFF).unwrap_or(0)
}

fn path_in(settings: &PosixSettings, name: &[u8]) -> Text {
    Text::of(&[settings.dir(), b"/", name])
}

fn numbered(settings: &PosixSettings, kind: &[u8], number: u64, digits: u32) -> Text {
    let mut path = Text::of(&[settings.dir(), b"/sysv.", kind]);
    path.push_hex(number, digits);
    path
}

/// Where a removed segment goes. Any user may have made a file of the first name, so a later one has a number that none can guess.
fn removed_path(settings: &PosixSettings, inode: u64, attempt: u64) -> Text {
    let mut path = numbered(settings, b"removed.", inode, 16);
    if attempt > 0 {
        path.push(b".");
        path.push_hex(sys::clock(libc::CLOCK_MONOTONIC).1.cast_unsigned() ^ attempt, 8);
    }
    path
}

/// Whether the name of a segment belongs to a removed segment with this inode.
fn is_removed_name(settings: &PosixSettings, path: &[u8], inode: u64) -> bool {
    let first = removed_path(settings, inode, 0);
    path.strip_prefix(first.as_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

/// `shmget`.
pub(crate) fn get(settings: &PosixSettings, key: c_int, size: usize, flags: c_int) -> CallResult<c_int> {
    let size = size as u64;
    let (creates, is_exclusive) = (flags & IPC_CREAT != 0, flags & IPC_EXCL != 0);
    if key == libc::IPC_PRIVATE {
        return make_private(settings, size, flags);
    }
    let path = numbered(settings, b"", key.cast_unsigned().into(), 8);
    let mut rounds = Rounds::new();
    loop {
        match open_segment(path.c_str()?, false) {
            Ok((fd, found, header)) => {
                if creates && is_exclusive {
                    return Err(libc::EEXIST);
                }
                if size > header.bytes {
                    return Err(libc::EINVAL);
                }
                take_interest(&fd, &found)?;
                return Ok(id_of(found.st_ino));
            }
            Err(libc::ENOENT) if creates => match make(settings, path.c_str()?, key, size, flags) {
                Err(libc::EEXIST) => {}
                made => return made,
            },
            Err(libc::EAGAIN) => {}
            Err(error) => return Err(error),
        }
        if !rounds.go_on() {
            return Err(libc::EAGAIN);
        }
    }
}

/// Makes a segment without a key.
fn make_private(settings: &PosixSettings, size: u64, flags: c_int) -> CallResult<c_int> {
    let (seconds, nanoseconds) = sys::clock(libc::CLOCK_MONOTONIC);
    let unique = u64::from(sys::pid().unsigned_abs()) << 40
        ^ seconds.cast_unsigned() << 30
        ^ nanoseconds.cast_unsigned();
    for step in 0..MAX_NAMES {
        let first = numbered(settings, b"private.", unique.wrapping_add(step), 16);
        match make(settings, first.c_str()?, libc::IPC_PRIVATE, size, flags) {
            Err(libc::EEXIST) => {}
            made => return made,
        }
    }
    Err(libc::ENOSPC)
}

fn make(settings: &PosixSettings, path: &CStr, key: c_int, size: u64, flags: c_int) -> CallResult<c_int> {
    if size == 0 {
        return Err(libc::EINVAL);
    }
    let data = rounded(size).ok_or(libc::EINVAL)?;
    let mode = (flags & 0o777).unsigned_abs();
    let (user, group) = (sys::user(), sys::group());
    let header = SegmentHeader {
        bytes: size,
        key,
        mode,
        creator: sys::pid(),
        user,
        group,
        changed: now(),
        ..SegmentHeader::default()
    };
    let fill = |fd: &Fd| {
        let whole = data.saturating_add(sys::page_bytes());
        reserve(settings, fd.raw(), &sys::fstat(fd.raw())?, whole.cast_signed())?;
        sys::write_at(fd.raw(), &header.encode(), data.cast_signed())
    };
    let name = split(path.to_bytes()).map_or(&b""[..], |(_, name)| name);
    let creation = Creation { mode, is_marked: !settings.is_kept(name), fill: &fill };
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR | libc::O_CLOEXEC;
    let fd = open(settings, path, flags, &creation).unwrap_or(Err(libc::ENOSPC))?;
    let found = sys::fstat(fd.raw())?;
    take_interest(&fd, &found)?;
    Ok(id_of(found.st_ino))
}

/// Opens a segment with a lease, for writing where this process may.
fn open_segment(path: &CStr, read_only: bool) -> CallResult<(Fd, libc::stat, SegmentHeader)> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let opened = if read_only { Err(libc::EACCES) } else { open_existing(path, libc::O_RDWR | flags) };
    let opened = match opened {
        Err(libc::EACCES) => open_existing(path, libc::O_RDONLY | flags),
        opened => opened,
    };
    // A collector has it: it will be gone, or not.
    let fd = opened?.ok_or(libc::EAGAIN)?;
    let found = sys::fstat(fd.raw())?;
    let header = SegmentHeader::read(&fd, &found)?;
    Ok((fd, found, header))
}

/// Keeps a lease on a segment as long as this process lives, by a page that cannot be read: the process that made a segment or knows its
/// identifier may attach it at any time.
fn take_interest(fd: &Fd, found: &libc::stat) -> CallResult<()> {
    let page = usize::try_from(sys::page_bytes()).unwrap_or(4096);
    ATTACHMENTS.with(|table| {
        let is_it = |known: &ShmAttachment| known.purpose == Use::Interest && known.inode == found.st_ino;
        if table.find(is_it).is_some() {
            return Ok(());
        }
        let room = table.vacant().ok_or(libc::ENOSPC)?;
        let start = sys::map(0, page, libc::PROT_NONE, 0, fd.raw(), 0)?;
        *room = ShmAttachment {
            purpose: Use::Interest,
            device: found.st_dev,
            inode: found.st_ino,
            start,
            len: page,
            process: sys::pid(),
            count: 1,
        };
        Ok(())
    })
}

fn lose_interest(inode: u64) {
    ATTACHMENTS.with(|table| {
        if let Some(known) = table.find(|known| known.purpose == Use::Interest && known.inode == inode) {
            sys::unmap(known.start, known.len);
            *known = ShmAttachment::NONE;
        }
    });
}

/// Calls `each` with index, inode and name of every segment, until it gives `false`.
fn segments(settings: &PosixSettings, mut each: impl FnMut(c_int, u64, &CStr) -> bool) {
    let dir: Text = Text::of(&[settings.dir()]);
    let mut index: c_int = 0;
    let Ok(dir) = dir.c_str() else { return };
    let _ = sys::entries(dir, |inode, name| {
        if !name.to_bytes().starts_with(b"sysv.") {
            return true;
        }
        let goes_on = each(index, inode, name);
        index = index.saturating_add(1);
        goes_on
    });
}

/// The path of the segment with an identifier, or with an index in the directory.
fn find(settings: &PosixSettings, id: c_int, by_index: bool) -> CallResult<Text> {
    let mut path = None;
    segments(settings, |index, inode, name| {
        let is_it = if by_index { index == id } else { id_of(inode) == id };
        if is_it {
            path = Some(path_in(settings, name.to_bytes()));
        }
        !is_it
    });
    path.ok_or(libc::EINVAL)
}

/// Finds and opens a segment. Its name may change between the two.
fn open_found(
    settings: &PosixSettings,
    id: c_int,
    by_index: bool,
    read_only: bool,
) -> CallResult<(Text, Fd, libc::stat, SegmentHeader)> {
    let mut rounds = Rounds::new();
    loop {
        let path = find(settings, id, by_index)?;
        match open_segment(path.c_str()?, read_only) {
            Ok((fd, found, header)) if by_index || id_of(found.st_ino) == id => {
                return Ok((path, fd, found, header));
            }
            Ok(_) | Err(libc::ENOENT | libc::EAGAIN) => {}
            Err(error) => return Err(error),
        }
        if !rounds.go_on() {
            return Err(libc::EAGAIN);
        }
    }
}

/// `shmat`; gives the address.
pub(crate) fn attach(settings: &PosixSettings, id: c_int, at: usize, flags: c_int) -> CallResult<usize> {
    let is_read_only = flags & SHM_RDONLY != 0;
    let page = usize::try_from(sys::page_bytes()).unwrap_or(4096);
    let offset = at.checked_rem(page).unwrap_or(0);
    let at = match offset {
        0 => at,
        _ if flags & SHM_RND != 0 => at.saturating_sub(offset),
        _ => return Err(libc::EINVAL),
    };
    let placing = match at {
        0 if flags & SHM_REMAP != 0 => return Err(libc::EINVAL),
        0 => 0,
        _ if flags & SHM_REMAP != 0 => libc::MAP_FIXED,
        _ => libc::MAP_FIXED_NOREPLACE,
    };
    let (_, fd, found, mut header) = open_found(settings, id, false, is_read_only)?;
    let len = rounded(header.bytes).and_then(|len| usize::try_from(len).ok()).ok_or(libc::EINVAL)?;
    // Refused: the last one has detached from a removed segment.
    if !lock_attachment(&fd) || sys::fstat(fd.raw())?.st_nlink == 0 {
        return Err(libc::EINVAL);
    }
    let protection = libc::PROT_READ
        | if is_read_only { 0 } else { libc::PROT_WRITE }
        | if flags & SHM_EXEC != 0 { libc::PROT_EXEC } else { 0 };
    let start = ATTACHMENTS.with(|table| {
        let room = table.vacant().ok_or(libc::ENOMEM)?;
        let start = match sys::map(at, len, protection, placing, fd.raw(), 0) {
            // The file is read-only for this user, or its file system has no programs.
            Err(libc::EPERM) => Err(libc::EACCES),
            Err(libc::EEXIST) => Err(libc::EINVAL),
            mapped => mapped,
        }?;
        *room = ShmAttachment {
            purpose: Use::Segment,
            device: found.st_dev,
            inode: found.st_ino,
            start,
            len,
            process: sys::pid(),
            count: 1,
        };
        Ok::<_, c_int>(start)
    })?;
    header.attached = now();
    header.last = sys::pid();
    header.write(&fd);
    Ok(start)
}

/// `shmdt`.
pub(crate) fn detach(settings: &PosixSettings, start: usize) -> CallResult<()> {
    let known = ATTACHMENTS.with(|table| {
        let known = table.find(|known| known.purpose == Use::Segment && known.start == start)?;
        let before = *known;
        *known = ShmAttachment::NONE;
        Some(before)
    });
    let known = known.ok_or(libc::EINVAL)?;
    sys::unmap(known.start, known.len);
    if let Ok((_, fd, _, mut header)) = open_found(settings, id_of(known.inode), false, false) {
        header.detached = now();
        header.last = sys::pid();
        header.write(&fd);
    }
    reap(settings, known.inode, 0);
    Ok(())
}

/// Removes a removed segment that no process has attached; `own`: this process's attachments, which end with it.
fn reap(settings: &PosixSettings, inode: u64, own: usize) {
    let mut path = Text::new();
    segments(settings, |_, found, name| {
        let candidate = path_in(settings, name.to_bytes());
        let is_it = found == inode && is_removed_name(settings, candidate.as_bytes(), inode);
        if is_it {
            path = candidate;
        }
        !is_it
    });
    let Ok(path) = path.c_str() else { return };
    // Without a lease: it is to go.
    let flags = libc::O_RDWR | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let Ok(fd) = sys::open(path, flags, 0) else { return };
    let Ok(found) = sys::fstat(fd.raw()) else { return };
    let is_last = if own == 0 {
        sys::lock(fd.raw(), ATTACHED.start, attached_bytes(), libc::F_WRLCK) == Ok(true)
    } else {
        attachments(&fd) <= own as u64
    };
    if found.st_ino == inode && is_last {
        let _ = sys::unlink(path);
    }
}

/// When the process ends: removed segments that only it has attached go with it. Those that it inherited are left to its parent.
pub(crate) fn leave(settings: &PosixSettings) {
    let us = sys::pid();
    for index in 0.. {
        let next = ATTACHMENTS.with(|table| {
            let is_segment = |known: &ShmAttachment| known.purpose == Use::Segment;
            let inode = table.all().filter(|known| is_segment(known)).nth(index)?.inode;
            let of_it = |known: &ShmAttachment| is_segment(known) && known.inode == inode;
            let is_inherited = table.all().any(|known| of_it(known) && known.process != us);
            Some((inode, if is_inherited { 0 } else { table.all().filter(|known| of_it(known)).count() }))
        });
        match next {
            Some((_, 0)) => {}
            Some((inode, own)) => reap(settings, inode, own),
            None => return,
        }
    }
}

/// Locks a byte that no other attachment has, by an opening that lasts as long as its mapping. `false`: a removed segment is going.
fn lock_attachment(fd: &Fd) -> bool {
    let (bytes, (_, nanoseconds)) = (attached_bytes(), sys::clock(libc::CLOCK_MONOTONIC));
    let start = nanoseconds.cast_unsigned() ^ u64::from(sys::pid().unsigned_abs()) << 8;
    (0..64).any(|step: u64| {
        let at = ATTACHED.start.saturating_add(start.wrapping_add(step).checked_rem(bytes).unwrap_or(0));
        // An opening that may not write could share its byte, and would not be counted.
        !sys::is_locked(fd.raw(), at, 1)
            && match sys::lock(fd.raw(), at, 1, libc::F_WRLCK) {
                Err(libc::EBADF) => sys::lock(fd.raw(), at, 1, libc::F_RDLCK) == Ok(true),
                locked => locked == Ok(true),
            }
    })
}

fn attached_bytes() -> u64 {
    ATTACHED.end.saturating_sub(ATTACHED.start)
}

/// How many openings have the lock of an attachment. The kernel says whether a range has one; halves of halves are counted, with a
/// bound on the questions, because another process may lock as many bytes as it likes.
fn attachments(fd: &Fd) -> u64 {
    fn count(fd: &Fd, from: u64, bytes: u64, questions: &mut u32) -> u64 {
        *questions = questions.saturating_sub(1);
        if *questions == 0 || !sys::is_locked(fd.raw(), from, bytes) {
            return 0;
        }
        let half = bytes >> 1;
        if half == 0 {
            return 1;
        }
        count(fd, from, half, questions).saturating_add(count(fd, from.saturating_add(half), half, questions))
    }
    count(fd, ATTACHED.start, attached_bytes(), &mut 200_000)
}

/// An operation of `shmctl` on a segment.
#[derive(Clone, Copy)]
pub(crate) enum ShmctlCommand {
    Remove,
    Set,
    Stat {
        /// The number is an index and not an identifier, which is the answer.
        by_index: bool,
    },
    Limits,
    Sums,
}

impl ShmctlCommand {
    pub(crate) fn of(command: c_int) -> CallResult<Self> {
        // Without the flag by which old programs ask for the 64-bit form.
        Ok(match command & !0x100 {
            libc::IPC_RMID => Self::Remove,
            libc::IPC_SET => Self::Set,
            libc::IPC_STAT => Self::Stat { by_index: false },
            3 => Self::Limits,
            // SHM_STAT and SHM_STAT_ANY.
            13 | 15 => Self::Stat { by_index: true },
            14 => Self::Sums,
            // Locking pages in memory is a privilege that pods do not have.
            11 | 12 => return Err(libc::EPERM),
            _ => return Err(libc::EINVAL),
        })
    }

    pub(crate) fn has_buffer(self) -> bool {
        !matches!(self, Self::Remove)
    }
}

/// Whether this process may change a segment: its owner and root.
fn may_change(found: &libc::stat) -> CallResult<()> {
    let user = sys::user();
    if user == 0 || user == found.st_uid { Ok(()) } else { Err(libc::EPERM) }
}

/// `shmctl(IPC_RMID)`: the key is free at once, and the segment goes with its last attachment.
pub(crate) fn remove(settings: &PosixSettings, id: c_int) -> CallResult<()> {
    for attempt in 0..MAX_NAMES {
        let path = find(settings, id, false)?;
        let found = match sys::lstat(path.c_str()?) {
            Ok(found) if id_of(found.st_ino) == id => found,
            Ok(_) | Err(libc::ENOENT) => continue,
            Err(error) => return Err(error),
        };
        may_change(&found)?;
        if !is_removed_name(settings, path.as_bytes(), found.st_ino) {
            let removed = removed_path(settings, found.st_ino, attempt);
            match sys::rename_new(path.c_str()?, removed.c_str()?) {
                Err(libc::ENOENT | libc::EEXIST) => continue,
                done => done?,
            }
            // Another process may have removed this one and made another with its key.
            if sys::lstat(removed.c_str()?).is_ok_and(|now| now.st_ino != found.st_ino) {
                let _ = sys::rename_new(removed.c_str()?, path.c_str()?);
                continue;
            }
        }
        lose_interest(found.st_ino);
        reap(settings, found.st_ino, 0);
        return Ok(());
    }
    Err(libc::EINVAL)
}

/// `shmctl(IPC_SET)`: owner, group and permission bits.
pub(crate) fn set(settings: &PosixSettings, id: c_int, wanted: &libc::shmid_ds) -> CallResult<()> {
    let (_, fd, found, mut header) = open_found(settings, id, false, false)?;
    may_change(&found)?;
    let (user, group) = (wanted.shm_perm.uid, wanted.shm_perm.gid);
    if (user, group) != (found.st_uid, found.st_gid) {
        sys::fchown(fd.raw(), user, group)?;
    }
    header.mode = u32::from(wanted.shm_perm.mode) & 0o777;
    // No file of a segment is a program.
    let mode = crate::open::changed_mode(settings, &found, header.mode & 0o666, true).ok_or(libc::EINVAL)?;
    sys::fchmod(fd.raw(), mode)?;
    header.changed = now();
    header.write(&fd);
    Ok(())
}

/// The state of a segment that `shmctl(IPC_STAT)` returns.
pub(crate) struct State {
    header: SegmentHeader,
    found: libc::stat,
    attachments: u64,
    is_removed: bool,
}

/// The identifier and state of a segment.
pub(crate) fn state(settings: &PosixSettings, id: c_int, by_index: bool) -> CallResult<(c_int, State)> {
    let (path, fd, found, header) = open_found(settings, id, by_index, true)?;
    let is_removed = is_removed_name(settings, path.as_bytes(), found.st_ino);
    let attachments = attachments(&fd);
    Ok((id_of(found.st_ino), State { header, found, attachments, is_removed }))
}

impl State {
    #[allow(clippy::useless_conversion, reason = "the fields have other types on other machines")]
    pub(crate) fn fill(&self, answer: &mut libc::shmid_ds) {
        let header = &self.header;
        let mode = header.mode | if self.is_removed { SHM_DEST } else { 0 };
        answer.shm_perm.__key = if self.is_removed { libc::IPC_PRIVATE } else { header.key };
        answer.shm_perm.uid = self.found.st_uid;
        answer.shm_perm.gid = self.found.st_gid;
        answer.shm_perm.cuid = header.user;
        answer.shm_perm.cgid = header.group;
        answer.shm_perm.mode = u16::try_from(mode).unwrap_or(0).into();
        answer.shm_segsz = usize::try_from(header.bytes).unwrap_or(usize::MAX);
        answer.shm_atime = header.attached;
        answer.shm_dtime = header.detached;
        answer.shm_ctime = header.changed;
        answer.shm_cpid = header.creator;
        answer.shm_lpid = header.last;
        answer.shm_nattch = self.attachments;
    }
}

/// The C library's `struct shminfo`.
#[repr(C)]
pub(crate) struct SegmentLimits {
    max_bytes: c_ulong,
    min_bytes: c_ulong,
    max_segments: c_ulong,
    max_attached: c_ulong,
    max_pages: c_ulong,
    unused: [c_ulong; 4],
}

impl SegmentLimits {
    pub(crate) fn of(settings: &PosixSettings) -> Self {
        let bytes = settings.limit.unwrap_or(MAX_BYTES);
        Self {
            max_bytes: bytes,
            min_bytes: 1,
            max_segments: 4096,
            max_attached: 4096,
            max_pages: bytes.checked_div(sys::page_bytes()).unwrap_or(0),
            unused: [0; 4],
        }
    }
}

/// The C library's `struct shm_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SegmentSums {
    segments: c_int,
    pages: c_ulong,
    resident_pages: c_ulong,
    swapped_pages: c_ulong,
    swap_attempts: c_ulong,
    swap_successes: c_ulong,
}

impl SegmentSums {
    pub(crate) fn highest_index(&self) -> c_int {
        self.segments.saturating_sub(1).max(0)
    }
}

/// The sums over all segments, for `shmctl(SHM_INFO)`.
pub(crate) fn sums(settings: &PosixSettings) -> SegmentSums {
    let mut sums = SegmentSums {
        segments: 0,
        pages: 0,
        resident_pages: 0,
        swapped_pages: 0,
        swap_attempts: 0,
        swap_successes: 0,
    };
    let page = sys::page_bytes();
    segments(settings, |_, _, name| {
        sums.segments = sums.segments.saturating_add(1);
        let path = path_in(settings, name.to_bytes());
        if let Some(found) = path.c_str().ok().and_then(|path| sys::lstat(path).ok()) {
            let pages = |bytes: i64| bytes.cast_unsigned().checked_div(page).unwrap_or(0);
            sums.pages = sums.pages.saturating_add(pages(found.st_size).saturating_sub(1));
            sums.resident_pages =
                sums.resident_pages.saturating_add(pages(found.st_blocks.saturating_mul(512)));
        }
        true
    });
    sums
}
