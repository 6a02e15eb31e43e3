"""Which processes belong together, and what is removed when the last of them has ended.

A family is a program and its children by `multiprocessing` and loky. Each member has a lease of the family's file, which lists the blocks
that members created. The last member to end removes them; if all are killed, the next family of that user in the directory does.
A block that a process of another family still uses stays until that process closes it. So no process has to outlive the others.
"""

import contextlib
import errno
import fcntl
import math
import os
import secrets
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Sequence

from ._shmesh import create_leased, open_leased, remove_unused

_PREFIX = ".shmesh-family-"
# By it the children of `spawn`, `forkserver` and loky know which family is theirs.
_VARIABLE = "SHMESH_FAMILY"
# How the commands begin that `multiprocessing` starts its children with.
_CHILDREN = ("from multiprocessing.spawn import spawn_main", "from multiprocessing.forkserver import main")
# The bytes of leases: `struct flock` for an exclusive lock on all of them.
_ALL_LEASES, _NO_LEASE = (
    struct.pack("hhqqi", kind, os.SEEK_SET, 1 << 62, 1 << 31, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
)

# Of the files of families, which others may have made.
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
# Bytes of a list that are read at once; more than an entry has.
_CHUNK = 1 << 16
# Bytes of memory from which on a list is shortened.
_LONG = 1 << 14

_lock = threading.Lock()
# The descriptors of the family's files by directory. Forked children have them too.
_joined: dict[str, int] = {}
# How many bytes of memory a directory's list takes before it is shortened again.
_limits: dict[str, float] = {}
# The paths of the blocks that went when this process, the last member, left.
removed: set[str] = set()


def _is_child(command: Sequence[str]) -> bool:
    """Whether `multiprocessing` or loky has started this process; other programs are families of their own."""
    for option, value in zip(command, command[1:]):
        if option == "-c" and value.startswith(_CHILDREN):
            return True
        if option == "-m" and f".{value}".endswith(".loky.backend.popen_loky_posix"):
            return True
    return False


def _token() -> str:
    inherited = os.environ.get(_VARIABLE)
    is_child = _is_child(sys.orig_argv)
    if inherited is None or not is_child:
        inherited = os.environ[_VARIABLE] = secrets.token_hex(8)
    return inherited


_family = _token()


def claim(descriptor: int) -> bool:
    """Whether no other opening of the file has a lease. Then none can take one before this opening is closed."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _ALL_LEASES)
    except (BlockingIOError, PermissionError):
        return False
    return True


def join(directory: str) -> int:
    """The descriptor of this family's file in the directory; at first, what other families left is collected."""
    with _lock:
        descriptor = _joined.get(directory)
        if descriptor is None:
            collect(directory)
            path = os.path.join(directory, f"{_PREFIX}{os.geteuid()}-{_family}")
            while descriptor is None:
                try:
                    descriptor = create_leased(path, 0o600, 0)
                except FileExistsError:
                    # Made by another member, which may just have ended as the last one.
                    with contextlib.suppress(FileNotFoundError):
                        descriptor = open_leased(path)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
            _joined[directory] = descriptor
        return descriptor


def record(directory: str, name: str, inode: int) -> None:
    """Lists a block that this family has created."""
    # One write, so that entries of several members do not mix. The first NUL ends an entry that was cut.
    entry = b"\0%d %s\0" % (inode, os.fsencode(name))
    family = join(directory)
    if os.write(family, entry) < len(entry):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)
    removed.discard(os.path.join(directory, name))
    if os.fstat(family).st_blocks * 512 > _limits.get(directory, _LONG):
        is_shorter = _shorten(directory, family)
        _limits[directory] = max(_LONG, 2 * os.fstat(family).st_blocks * 512) if is_shorter else math.inf


def _shorten(directory: str, family: int) -> bool:
    """Takes the entries out of the list whose blocks are gone.

    What is left is written once more at the end, where other members append too, and then the memory before it is freed. Killed
    in between, or done by two members at once, entries are there twice, which does no harm.
    """
    size = os.fstat(family).st_size
    start = max(0, size - _CHUNK)
    # After the last of them an entry may be only half written.
    end = start + os.pread(family, size - start, start).rfind(b"\0") + 1
    left = dict.fromkeys(entry for entry in _entries(family, end) if _is_there(directory, entry))
    data = b"".join(b"\0%b\0" % entry for entry in left)
    return os.write(family, data) == len(data) and _free(family, end)


def _is_there(directory: str, entry: bytes) -> bool:
    try:
        inode, name = _parsed(entry)
        return os.lstat(os.path.join(directory, name)).st_ino == inode
    except (FileNotFoundError, ValueError):
        return False
    except OSError:
        return True


def _free(descriptor: int, end: int) -> bool:
    """Frees the memory of the file before `end`, which then reads as NULs. `False`: this file system or Python cannot."""
    try:
        import ctypes

        call = ctypes.CDLL(None).fallocate
    except (ImportError, AttributeError, OSError):
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    punch_hole_and_keep_size = 3
    return bool(call(descriptor, punch_hole_and_keep_size, 0, end) == 0)


def may_be_left(path: str, inode: int) -> bool:
    """Whether no process uses this block any more, while the family that made it may have ended."""
    try:
        descriptor = os.open(path, _OPENING)
    except OSError:
        return False
    try:
        lock = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _ALL_LEASES)
        if os.fstat(descriptor).st_ino != inode or lock[:2] != _NO_LEASE[:2]:
            return False
    finally:
        os.close(descriptor)
    directory, name = os.path.split(path)
    return not _lists(_joined.get(directory), b"\0%d %s\0" % (inode, os.fsencode(name)))


def _lists(family: int | None, entry: bytes) -> bool:
    """Whether the list has this entry, as far as the list is short."""
    if family is None:
        return False
    try:
        start = os.lseek(family, 0, os.SEEK_DATA)
    except OSError:
        return False  # empty
    return entry in os.pread(family, _CHUNK, start)


def leave(openings: Sequence[int] = ()) -> None:
    """Ends this process's membership. `openings`: descriptors of the blocks that it has still open."""
    with _lock:
        joined = dict(_joined)
        _joined.clear()
    for directory, descriptor in joined.items():
        os.close(descriptor)
        with contextlib.suppress(OSError):
            collect(directory, openings)


def collect(directory: str, openings: Sequence[int] = ()) -> None:
    """Removes what families of this user that have ended left in a directory, except what others use.

    `openings`: descriptors of this process, which ends. They do not count as others if no other member is left: forked ones
    have the same leases.
    """
    mine: dict[int, int] = {}
    prefix = f"{_PREFIX}{os.geteuid()}-"
    with os.scandir(directory) as entries:
        families = [entry.path for entry in entries if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False)]
    families.sort(key=lambda path: not path.endswith(_family))
    for path in families:
        # Whatever one file is, it must not stop a program of this user.
        with contextlib.suppress(OSError):
            _collect_family(directory, path, openings, mine)


def _collect_family(directory: str, path: str, openings: Sequence[int], mine: dict[int, int]) -> None:
    descriptor = os.open(path, _OPENING)
    try:
        found = os.fstat(descriptor)
        # Any user may make a file of this name. Only this user's own list says what this user removes.
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not claim(descriptor):
            return
        is_own = path.endswith(_family)
        if is_own:
            for opening in openings:
                fcntl.fcntl(opening, fcntl.F_OFD_SETLK, _NO_LEASE)
                mine[os.fstat(opening).st_ino] = opening
        if os.fstat(descriptor).st_nlink > 0 and _remove_blocks(directory, descriptor, mine, removed if is_own else set()):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _entries(family: int, end: int = sys.maxsize) -> Iterator[bytes]:
    """What the list has before `end`: `INODE NAME`, between NULs. Blocks of the file without data are skipped."""
    at, rest = 0, b""
    while at < end:
        try:
            start = os.lseek(family, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # What follows the last NUL is empty, or an entry that a full file system has cut.
            raise
        data = os.pread(family, max(0, min(_CHUNK, end - start)), start)
        if start > at:
            rest = b""
        at = start + len(data)
        *entries, rest = (rest + data).split(b"\0")
        yield from filter(None, entries)
        if not data or len(rest) > _CHUNK:
            return


def _parsed(entry: bytes) -> tuple[int, str]:
    """The inode and the name, which names a file in the directory itself; else `ValueError`."""
    inode, _, name = entry.partition(b" ")
    if b"/" in name or name in (b"", b".", b".."):
        raise ValueError(name)
    return int(inode), os.fsdecode(name)


def _remove_blocks(directory: str, family: int, mine: dict[int, int], gone: set[str]) -> bool:
    """Whether none of the blocks that the family lists is left. `gone`: takes the paths of those that were there."""
    is_empty = True
    for entry in _entries(family):
        try:
            inode, name = _parsed(entry)
            path = os.path.join(directory, name)
            # The name may have become another block's.
            if os.lstat(path).st_ino != inode:
                continue
            gone.add(path)
            opening = mine.get(inode)
            if opening is None:
                is_empty &= remove_unused(path)
            elif claim(opening):
                os.unlink(path)
            else:
                is_empty = False
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            is_empty = False
    return is_empty


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
