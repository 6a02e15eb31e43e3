"""The common part of sessions with the broker of a link's sidecar, for all kinds of memory."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from . import _shmesh
from ._array import _laid_out
from ._errors import Closed, Mismatch

_Asked = TypeVar("_Asked", _shmesh.DeviceSession, _shmesh.GpuSession)
_Me = TypeVar("_Me", bound="Session[Any]")


class Session(Generic[_Asked]):
    """The calls that are the same for all kinds of memory.

    Closing the session ends its imports, and by force its exports. A child of a fork makes its own.
    """

    DEFAULT = 0
    DISABLE_PID_VALIDATION = 1

    def __init__(self, session: _Asked) -> None:
        self._session: _Asked | None = session

    def bare_tgid(self) -> int:
        """The number by which others admit this process. `os.getpid` differs in each container."""
        return self._open().bare_tgid()

    def set_import_pid(self, key: bytes, bare_tgids: Iterable[int]) -> None:
        """Admits processes to a key of this session: all of them, or none."""
        self._open().set_import_pid(key, list(bare_tgids))

    def close(self, key: bytes, *, force: bool = False) -> None:
        """Ends an import, if no array over it is alive; or an export, if no process imports it any more, or with
        ``force``.
        """
        self._open().close(key, force=force)

    def event(self) -> str | None:
        """Events, oldest first. Call it when `fileno` is readable."""
        return self._open().event()

    def fileno(self) -> int:
        """A descriptor that is readable when there are events."""
        return self._open().fileno()

    def end(self) -> None:
        """Ends the session."""
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def _import(self, key: bytes, shape: Any, dtype: Any) -> tuple[Any, tuple[int, ...], np.dtype[Any]]:
        """Imports memory by its key, as an array."""
        memory: Any = self._open().import_by_key(key)
        try:
            lengths, kind = _laid_out_within(memory.nbytes, shape, dtype)
        except Exception:
            # The caller has no array by which to close the import, and the exporter would wait for it.
            del memory
            self.close(key)
            raise
        return memory, lengths, kind

    def _open(self) -> _Asked:
        if self._session is None:
            raise Closed("this session has ended; create another")
        return self._session

    def __enter__(self: _Me) -> _Me:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _laid_out_within(nbytes: int, shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array over imported memory. Without a shape, it has all its bytes."""
    if shape is None:
        shape = nbytes // max(np.dtype(dtype).itemsize, 1)
    lengths, kind, needed = _laid_out(shape, dtype)
    if needed > nbytes:
        raise Mismatch(f"{lengths} of {kind} needs {needed} bytes, behind this key are {nbytes}")
    return lengths, kind
