"""What sessions with the broker of a link's sidecar share, whatever the memory is."""

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
    """The calls that are the same for memory of all kinds.

    Closing the session ends its imports, and by force its exports. A child of a fork makes its own.
    """

    DEFAULT = 0
    DISABLE_PID_VALIDATION = 1

    def __init__(self, session: _Asked) -> None:
        self._session: _Asked | None = session

    def bare_tgid(self) -> int:
        """This process, as others have to name it to admit it. A number from `os.getpid` is another in each container."""
        return self._open().bare_tgid()

    def set_import_pid(self, key: bytes, bare_tgids: Iterable[int]) -> None:
        """Admits processes to a key of this session: all of them, or nobody."""
        self._open().set_import_pid(key, list(bare_tgids))

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

    def _import(self, key: bytes, shape: Any, dtype: Any) -> tuple[Any, tuple[int, ...], np.dtype[Any]]:
        """The memory behind a key, and what is to be seen in it."""
        memory: Any = self._open().import_by_key(key)
        try:
            lengths, kind = _laid_out_within(memory.nbytes, shape, dtype)
        except Exception:
            # Nobody has an array of it who could close it, and the exporter would wait for that.
            del memory
            self.close(key)
            raise
        return memory, lengths, kind

    def _open(self) -> _Asked:
        if self._session is None:
            raise Closed("this session has ended; make another")
        return self._session

    def __enter__(self: _Me) -> _Me:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _laid_out_within(nbytes: int, shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Lengths and type of an array over what is behind a key; without a shape, over all of it."""
    if shape is None:
        shape = nbytes // max(np.dtype(dtype).itemsize, 1)
    lengths, kind, needed = _laid_out(shape, dtype)
    if needed > nbytes:
        raise Mismatch(f"{lengths} of {kind} needs {needed} bytes, behind this key are {nbytes}")
    return lengths, kind
