"""Device memory shared with exactly the processes it was meant for. Today it is host memory, brokered by a sidecar."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np

from . import _shmesh
from ._array import Array, _laid_out, _over, ipc_directory
from ._errors import Closed, Mismatch

__all__ = ["DeviceSession"]


class DeviceSession:
    """A session with the broker of a link's sidecar: the five calls of the Ascend runtime.

    Closing the session ends its imports, and by force its exports. A child of a fork makes its own.
    """

    DEFAULT = 0
    DISABLE_PID_VALIDATION = 1

    def __init__(self, link: str, *, directory: str | os.PathLike[str] | None = None) -> None:
        self._session: _shmesh.DeviceSession | None = _shmesh.DeviceSession.connect(ipc_directory(directory), link)

    def bare_tgid(self) -> int:
        """This process, as others have to name it to admit it. A number from `os.getpid` is another in each container."""
        return self._open().bare_tgid()

    def export_key(self, shape: Any, dtype: Any = np.uint8, *, flags: int = DEFAULT) -> tuple[bytes, Array]:
        """New device memory: the key that names it (65 bytes), and an array over it."""
        lengths, kind, nbytes = _laid_out(shape, dtype)
        key, memory = self._open().export_key(nbytes, flags=flags)
        return bytes(key), _over(memory, lengths, kind)

    def set_import_pid(self, key: bytes, bare_tgids: Iterable[int]) -> None:
        """Admits processes to a key of this session: all of them, or nobody."""
        self._open().set_import_pid(key, list(bare_tgids))

    def import_by_key(self, key: bytes, shape: Any = None, dtype: Any = np.uint8) -> Array:
        """An array over the memory behind a key; without a shape, all its bytes."""
        memory = self._open().import_by_key(key)
        if shape is None:
            kind = np.dtype(dtype)
            shape = memory.nbytes // max(kind.itemsize, 1)
        lengths, kind, nbytes = _laid_out(shape, dtype)
        if nbytes > memory.nbytes:
            raise Mismatch(f"{lengths} of {kind} needs {nbytes} bytes, behind this key are {memory.nbytes}")
        return _over(memory, lengths, kind)

    def close(self, key: bytes, *, force: bool = False) -> None:
        """Ends an import, when no array over it lives; or an export, when nobody imports it any more, or by ``force``."""
        self._open().close(key, force=force)

    def event(self) -> str | None:
        """What happened, oldest first: call it when `fileno` is readable."""
        return self._open().event()

    def fileno(self) -> int:
        """Readable when an event has come."""
        return self._open().fileno()

    def end(self) -> None:
        """Ends the session."""
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def _open(self) -> _shmesh.DeviceSession:
        if self._session is None:
            raise Closed("this session has ended; make another")
        return self._session

    def __enter__(self) -> DeviceSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
