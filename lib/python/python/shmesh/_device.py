"""Device memory that is shared with admitted processes only. At present it is host memory, brokered by a sidecar."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from . import _shmesh
from ._array import Array, _laid_out, _over, ipc_directory
from ._errors import Invalid
from ._session import Session

__all__ = ["DeviceSession"]


class DeviceSession(Session[_shmesh.DeviceSession]):
    """A session with the broker of a link's sidecar: the five calls of the Ascend runtime.

    Closing the session ends its imports, and by force its exports. A child of a fork makes its own.
    """

    def __init__(self, link: str, *, directory: str | os.PathLike[str] | None = None) -> None:
        super().__init__(_shmesh.DeviceSession.connect(ipc_directory(directory), link))

    def export_key(self, shape: Any, dtype: Any = np.uint8, *, flags: int = Session.DEFAULT) -> tuple[bytes, Array]:
        """Allocates device memory. Returns its key (65 bytes) and an array over it."""
        lengths, kind, nbytes = _laid_out(shape, dtype)
        if nbytes == 0:
            raise Invalid("device memory needs at least 1 byte")
        key, memory = self._open().export_key(nbytes, flags=flags)
        return bytes(key), _over(memory, lengths, kind)

    def import_by_key(self, key: bytes, shape: Any = None, dtype: Any = np.uint8) -> Array:
        """Imports memory by its key, as an array. Without a shape, it has all its bytes."""
        memory, lengths, kind = self._import(key, shape, dtype)
        return _over(memory, lengths, kind)
