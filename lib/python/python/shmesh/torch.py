"""A drop-in replacement for `torch.utils.data.DataLoader` whose workers pass batches in shared memory.

torch's own workers create a file for each tensor of each batch, and send its descriptor through a socket. These workers reuse one pool
of buffers. Everything else is torch's: samplers, collate functions, order, iterable datasets, ``worker_init_fn``,
``persistent_workers``, ``pin_memory``, and the traceback of a worker's exception.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import secrets
import time
import warnings
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
import torch.utils.data  # type: ignore[import-not-found, unused-ignore]

from . import _array
from ._errors import Exhausted, Forked
from ._link import Link
from ._objects import Parts, read
from ._shmesh import Message

__all__ = ["DataLoader"]

_MSG_BYTES = 16_384
# Batches without a buffer of the pool, and other messages of workers: they only have a MSG part.
_FURTHER_MESSAGES = 64
_LOOK_AGAIN = 0.01
# How long a worker may take to end after a signal.
_TERMINATED_SECONDS = 5.0

with warnings.catch_warnings():
    # torch warns once that a read-only array is used as writable. That is intended here: numpy must not write to a received
    # message, but its buffers belong to the receiver alone while a tensor uses them.
    warnings.simplefilter("ignore")
    _read_only = np.zeros(1, np.uint8)
    _read_only.flags.writeable = False
    torch.from_numpy(_read_only)


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[misc, unused-ignore]
    """`torch.utils.data.DataLoader` with its arguments, whose workers pass batches in shared memory.

    ``nbytes`` is how many bytes a buffer has, and there are as many buffers as batches may be on the way: ``prefetch_factor`` times
    ``num_workers``, and two for the loop. A larger batch, or one that comes while the program holds so many, travels in memory of its own.
    """

    multiprocessing_context: Any

    def __init__(self, *args: Any, nbytes: int = 16 << 20, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nbytes = nbytes
        if self.num_workers > 0:
            base = self.multiprocessing_context or multiprocessing.get_context()
            self.multiprocessing_context = _context_like(base)

    def _get_iterator(self) -> Any:
        if self.num_workers > 0:
            depth = (self.prefetch_factor or 2) * self.num_workers + 2
            # The first queue that torch creates for an iterator is for results; the others are for indices.
            self.multiprocessing_context.results = (self.nbytes, depth)
            self.check_worker_number_rationality()
            return _Iterator(self)
        return super()._get_iterator()


class _Iterator(torch.utils.data.dataloader._MultiProcessingDataLoaderIter):  # type: ignore[misc, unused-ignore]
    """torch's iterator, which waits for the workers that it terminates: one that ends last leaves the lock file of its link."""

    def _shutdown_workers(self) -> None:
        super()._shutdown_workers()
        if getattr(self, "_shutdown", False):
            for worker in getattr(self, "_workers", ()):
                worker.join(_TERMINATED_SECONDS)


def _context_like(base: Any) -> Any:
    """A context like ``base``, whose next queue is one for results if that was requested."""

    class Context(type(base)):  # type: ignore[misc]
        results: tuple[int, int] | None = None

        def Queue(self, maxsize: int = 0) -> Any:
            wanted, self.results = self.results, None
            return super().Queue(maxsize) if wanted is None else _Results(*wanted)

    return Context()


class _Results:
    """The queue from workers to the process with the loader, with the interface of `multiprocessing.Queue` that torch
    uses.
    """

    def __init__(self, nbytes: int, depth: int) -> None:
        self._name = f"loader-{secrets.token_hex(8)}"
        self._directory = _array.ipc_directory()
        self._sender: Link | None = None
        messages = depth + _FURTHER_MESSAGES
        self._receiver: Link | None = Link.create(
            self._name,
            pools={"cpu_msg": (_MSG_BYTES, messages), "cpu_data": (nbytes, depth)},
            ring_len=messages,
            backing="memfd",
            directory=self._directory,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_directory": self._directory, "_sender": None, "_receiver": None}

    def _sending(self) -> Link:
        if self._sender is None:
            self._sender = Link.attach(self._name, directory=self._directory)
        return self._sender

    def put(self, value: Any) -> None:
        parts = Parts.of(value, _MSG_BYTES, _Pickler)
        try:
            self._put(self._sending(), parts)
        except Forked:
            self._sender = None
            self._put(self._sending(), parts)

    def _put(self, link: Link, parts: Parts) -> None:
        pool = link.pool("cpu_data")
        if parts.nbytes and (pool is None or parts.nbytes > pool[0] or not self._put_into_a_buffer(link, parts)):
            # The message has a handle, and the memory is kept until the receiver has fetched it.
            # Writable, like a buffer of the pool: only the receiver has it.
            array = _array.empty(parts.nbytes, np.uint8, readers_write=True)
            parts.write(array)
            parts = Parts.of(_Elsewhere(parts.head, array), _MSG_BYTES)
        elif parts.nbytes:
            return
        parent = os.getppid()
        while True:
            try:
                loan = link.loan(len(parts.head))
                break
            except Exhausted:
                link.recover()
                if os.getppid() != parent:
                    raise
                time.sleep(_LOOK_AGAIN)
        parts.send(loan)

    def _put_into_a_buffer(self, link: Link, parts: Parts) -> bool:
        for _ in range(2):
            try:
                loan = link.loan(len(parts.head), parts.nbytes)
            except Exhausted:
                # This frees the buffers of workers that died.
                link.recover()
                continue
            parts.send(loan)
            return True
        return False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self._receiver is None:
            raise ValueError("this queue is closed, or belongs to another process")
        message = self._receiver.receive(timeout if block else 0.0)
        if message is None:
            raise queue.Empty
        value = read(message, copy=False, what="a worker of the loader")
        return value.open(message) if isinstance(value, _Elsewhere) else value

    def empty(self) -> bool:
        return self._receiver is None or not self._receiver.has_message

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread, so everything that was put has been sent."""

    join_thread = cancel_join_thread

    def close(self) -> None:
        for link in (self._sender, self._receiver):
            if link is not None:
                link.close(strict=False)
        self._sender = self._receiver = None


class _Elsewhere:
    """An object whose DATA part is in memory of its own."""

    def __init__(self, head: bytes, array: _array.Array) -> None:
        self.head = head
        self.array = array

    def open(self, message: Message) -> Any:
        return read(message, copy=False, what="a worker of the loader", head=self.head, data=self.array)


class _Pickler(pickle.Pickler):
    """A pickler that passes the memory of tensors as buffers."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized or value.numel() == 0:
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat), value.dtype, tuple(value.shape))


def _tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Creates a tensor over such a buffer."""
    array = np.frombuffer(buffer, np.uint8)
    if array.__array_interface__["data"][0] % dtype.itemsize:
        # A small buffer, in the middle of a pickle.
        array = array.copy()
    return torch.from_numpy(array).view(dtype).reshape(shape)
