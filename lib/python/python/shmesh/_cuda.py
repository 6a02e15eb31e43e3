"""GPU memory that is shared with admitted processes only, as arrays that torch and cupy use in place."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from . import _shmesh
from ._array import _laid_out, ipc_directory
from ._errors import Invalid, Mismatch
from ._session import Session

__all__ = ["GpuArray", "GpuSession"]

_CUDA = 2
"""``kDLCUDA``"""
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
"""Kinds of numpy, as codes of DLPack"""


class GpuArray:
    """An array in memory of a GPU: ``torch.from_dlpack(array)``, ``cupy.asarray(array)``.

    It is contiguous, and every process with it can write it. No work is waited for: order it by a word in the memory, or by a message
    that is sent when the work is done.
    """

    def __init__(self, memory: _shmesh.GpuMemory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._memory = memory
        self.shape = shape
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def device(self) -> int:
        """The device's number in this process."""
        return self._memory.device

    @property
    def uuid(self) -> str:
        """The UUID of the device, which is the same in all processes."""
        return self._memory.uuid

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._memory.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        # Work that this library submits to streams is complete when its call returns, so no stream has to wait for it.
        if isinstance(stream, bool) or not isinstance(stream, int | None):
            raise TypeError(f"stream is {stream!r}, and must be a number or None")
        if stream is not None and (stream == 0 or stream < -1):
            raise ValueError(
                f"stream is {stream}; on CUDA give 1 for the legacy default stream, 2 for that of the thread, -1 for none, or an "
                "address; 0 is ambiguous"
            )
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("this array is on a GPU and cannot be exported to another device: copy it with `copy_to_host`")
        if copy:
            raise BufferError("this array is shared and cannot be copied by DLPack: copy the array that was imported from it")
        code = _CODES.get(self.dtype.kind)
        # Longer types have no code in DLPack.
        longest = {"f": 8, "c": 16}.get(self.dtype.kind, 8)
        if code is None or not self.dtype.isnative or self.dtype.itemsize > longest:
            raise BufferError(f"DLPack has no {self.dtype}")
        versioned = max_version is not None and max_version[0] >= 1
        return self._memory.capsule(list(self.shape), code, 8 * self.dtype.itemsize, versioned)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._memory.device

    def copy_to_host(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Copies the array to host memory."""
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self._memory.read_into(0, host.reshape(-1).view(np.uint8))
        return host

    def copy_from_host(self, array: Any) -> None:
        """Copies an array of the same shape from host memory."""
        host = np.ascontiguousarray(array, dtype=self.dtype)
        if host.shape != self.shape:
            raise Mismatch(f"the host array has shape {host.shape}, and this one {self.shape}; use the same shape")
        if host.nbytes:
            self._memory.write_from(0, host.reshape(-1).view(np.uint8))


class GpuSession(Session[_shmesh.GpuSession]):
    """A session with the broker of a link's sidecar, for memory of GPUs: as `DeviceSession`, by the mechanism ``cuda-vmm``.

    It only needs the CUDA driver.
    """

    def __init__(self, link: str, *, directory: str | os.PathLike[str] | None = None) -> None:
        super().__init__(_shmesh.GpuSession.connect(ipc_directory(directory), link))

    def export_key(
        self, shape: Any, dtype: Any = np.uint8, *, uuid: str | None = None, flags: int = Session.DEFAULT
    ) -> tuple[bytes, GpuArray]:
        """Allocates memory on a GPU, given by UUID, or on the first one. Returns the key of the memory (65 bytes) and an
        array over it.
        """
        lengths, kind, nbytes = _laid_out(shape, dtype)
        if nbytes == 0:
            raise Invalid("GPU memory needs at least 1 byte")
        key, memory = self._open().export_key(nbytes, uuid=uuid, flags=flags)
        return bytes(key), GpuArray(memory, lengths, kind)

    def import_by_key(self, key: bytes, shape: Any = None, dtype: Any = np.uint8) -> GpuArray:
        """Imports memory by its key, as an array. Without a shape, it has all its bytes, a multiple of the device's
        granularity.
        """
        memory, lengths, kind = self._import(key, shape, dtype)
        return GpuArray(memory, lengths, kind)
