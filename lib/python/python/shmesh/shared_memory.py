"""The classes of `multiprocessing.shared_memory`, with memory that is reserved, and freed with its last user.

They have the standard library's names, arguments and behaviour; ``python -m shmesh.run`` puts them under programs that are not
changed. What differs:

- Blocks are files of the IPC directory: ``SHMESH_DIR``, else ``/dev/shm``. Where a pool gives files its group, the group may
  use them (mode 0660), so pods of different users meet.
- The memory is reserved when a block is created: too much is an `OSError` (``ENOSPC``) there, and no bus error later.
- There is no resource tracker. Blocks that were not unlinked are removed when the program and its `multiprocessing` children have
  ended, or, if all were killed, by the next program of that user, or by ``shmesh rm --stale``. A process that only attaches does
  not remove blocks of others.
"""

import errno
import importlib.machinery
import importlib.util
import mmap
import multiprocessing
import multiprocessing.util
import os
import secrets
import stat
import sys
import weakref
from typing import TYPE_CHECKING, Any

from . import _family
from ._array import ipc_directory
from ._shmesh import create_leased, open_leased

if TYPE_CHECKING:
    from ._shared_memory_manager import SharedMemoryManager

__all__ = ["ShareableList", "SharedMemory", "SharedMemoryManager"]

_USE_POSIX = True
_SHM_NAME_PREFIX = "/psm_"


def _make_filename() -> str:
    return _SHM_NAME_PREFIX + secrets.token_hex(4)


def _file_name(name: str) -> str:
    """The name of the file, as `shm_open` makes it."""
    if "\0" in name:
        raise ValueError("embedded null character")
    file = name.lstrip("/")
    if "/" in file or file in ("", ".", ".."):
        raise OSError(errno.EINVAL, "the name of a block must not contain a slash or name a directory; choose another", name)
    return file


def _no_room(error: OSError, size: int, directory: str) -> OSError:
    room = os.statvfs(directory)
    return OSError(
        error.errno,
        f"no room for a block of {size} bytes: {directory} has {room.f_bavail * room.f_frsize} free, and the container may have a "
        "memory limit; unlink blocks that are not used, or enlarge it",
    )


class SharedMemory:
    """A block of shared memory with a name, as `multiprocessing.shared_memory.SharedMemory`.

    ``track=False``: the block stays until it is unlinked, even when no process uses it.
    """

    _name: str = ""
    _path: str = ""
    _fd: int = -1
    _mmap: mmap.mmap | None = None
    _buf: memoryview | None = None
    _flags: int = os.O_RDWR
    _mode: int | None = None
    _size: int = 0
    _is_own: bool = False

    def __init__(
        self, name: str | None = None, create: bool = False, size: int = 0, *, track: bool = True
    ) -> None:
        if not size >= 0:
            raise ValueError("'size' must be a positive integer")
        if create:
            self._flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
            if size == 0:
                raise ValueError("'size' must be a positive number different from zero")
        if name is None and not self._flags & os.O_EXCL:
            raise ValueError("'name' can only be None if create=True")
        directory = ipc_directory()
        while True:
            self._name = _make_filename() if name is None else "/" + name
            self._path = os.path.join(directory, _file_name(self._name))
            try:
                self._fd = self._opened(directory, size, track)
                break
            except FileExistsError:
                if name is not None:
                    raise
        try:
            self._size = os.fstat(self._fd).st_size
            self._mmap = mmap.mmap(self._fd, self._size)
        except BaseException:
            if self._is_own:
                os.unlink(self._path)
            self.close()
            raise
        self._buf = memoryview(self._mmap)
        _opened.add(self)

    def _opened(self, directory: str, size: int, track: bool) -> int:
        if not self._flags & os.O_EXCL:
            try:
                return open_leased(self._path)
            except FileNotFoundError:
                if not self._flags & os.O_CREAT or size == 0:
                    raise
        mode = self._mode
        if mode is None:
            # A pool's directory gives files its group. Elsewhere that is the user's, of which many may be members.
            mode = 0o660 if os.stat(directory).st_mode & stat.S_ISGID else 0o600
        try:
            if track:
                _family.join(directory)
            descriptor = create_leased(self._path, mode, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_room(error, size, directory) from None
            raise
        try:
            if track:
                _family.record(directory, os.path.basename(self._path), os.fstat(descriptor).st_ino)
            else:
                # Without the mark it may be unused and stay.
                os.fchmod(descriptor, mode)
        except BaseException:
            os.unlink(self._path)
            os.close(descriptor)
            raise
        self._is_own = True
        return descriptor

    def __del__(self) -> None:
        try:
            self.close()
        except OSError:
            pass
        except BufferError:
            # Arrays over it live on, and with them the mapping.
            _viewed.append(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.__class__, (self.name, False, self.size))

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.name!r}, size={self.size})"

    @property
    def buf(self) -> memoryview | None:
        """The contents; None after `close`."""
        return self._buf

    @property
    def name(self) -> str:
        """The name by which other processes attach."""
        return self._name.removeprefix("/")

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._size

    def close(self) -> None:
        """Unmaps the block here. Raises `BufferError` while arrays or other views of it are alive."""
        if self._buf is not None:
            self._buf.release()
            self._buf = None
        if self._mmap is not None:
            self._mmap.close()
            self._mmap = None
        if self._fd >= 0:
            inode = os.fstat(self._fd).st_ino
            os.close(self._fd)
            self._fd = -1
            if not self._is_own and not sys.is_finalizing():
                _collect(self._path, inode)

    def unlink(self) -> None:
        """Removes the name. The memory is freed when the last process has closed the block."""
        if self._name:
            path = os.path.join(os.path.dirname(self._path), _file_name(self._name))
            try:
                os.unlink(path)
            except FileNotFoundError:
                # Late in the program the family has ended, and the block with it.
                if path not in _family.removed:
                    raise
                _family.removed.remove(path)


def _collect(path: str, inode: int) -> None:
    """After a block was closed here: its creator may have ended, and with this last use it goes."""
    try:
        if _family.may_be_left(path, inode):
            _family.collect(os.path.dirname(path))
    except OSError:
        pass  # the directory went away, or there are no descriptors left: the next one collects


# The blocks that are open in this process, and the descriptors of closed blocks that still have views.
_opened: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()
_viewed: list[int] = []


def _leave() -> None:
    _family.leave([*(block._fd for block in _opened if block._fd >= 0), *_viewed])


def _leave_at_exit() -> None:
    # After the children of multiprocessing have ended, which other priorities do not wait for.
    multiprocessing.util.Finalize(None, _leave, exitpriority=-1000)


def _copied() -> Any:
    """The standard library's module once more, so that its list is over blocks of ours."""
    name = "multiprocessing.shared_memory"
    spec = importlib.machinery.PathFinder.find_spec(name, multiprocessing.__path__)
    if spec is None or spec.loader is None:
        raise ImportError(f"this Python has no {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["SharedMemory"] = SharedMemory
    return module


_Original: Any = _copied().ShareableList


class ShareableList(_Original):  # type: ignore[misc]
    """A list of fixed length in shared memory, as `multiprocessing.shared_memory.ShareableList`."""


def __getattr__(name: str) -> Any:
    # `multiprocessing.managers` imports this module when it takes the place of the standard library's.
    if name != "SharedMemoryManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._shared_memory_manager import SharedMemoryManager

    return SharedMemoryManager


_leave_at_exit()
os.register_at_fork(after_in_child=_leave_at_exit)
# A child of multiprocessing forgets what its parent does at exit, and also the line above.
multiprocessing.util.register_after_fork(_opened, lambda _: _leave_at_exit())
try:
    # As soon as this is imported: children may create blocks that this process uses when they have ended.
    _family.join(ipc_directory())
except OSError:
    pass  # said when a block is created
