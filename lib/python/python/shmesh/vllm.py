"""vLLM's `MessageQueue` over shmesh: a plugin of vLLM (``vllm.general_plugins``), inactive unless ``SHMESH_VLLM=1``.

The queue of vLLM polls flags of all readers and waits for ever for one that has died. This one has the same methods, sleeps while idle, and
raises `shmesh.PeerDied` with the rank. Queues with readers on other nodes stay vLLM's own. SGLang has a copy of the class: call
``register("sglang")`` in each of its processes.
"""

from __future__ import annotations

import copyreg
import dataclasses
import importlib
import inspect
import os
import pickle
import sys
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ._array import empty
from ._errors import Closed, Invalid, Timeout, TooLong
from ._message_queue import MessageQueue

__all__ = ["adapter_of", "register"]

_MARK = "shmesh"
_MODULES = {
    "vllm": "vllm.distributed.device_communicators.shm_broadcast",
    "sglang": "sglang.srt.distributed.device_communicators.shm_broadcast",
}
_PLACES = ("buffer_handle", "buffer")
# Interval at which a reader checks whether it was cancelled.
_LOOK_AGAIN = 0.1


class _Large(NamedTuple):
    """Stands for an object that fits into no buffer: its pickle, in memory of its own."""

    pickled: np.ndarray


def register(package: str | None = None) -> None:
    """Replaces the class by the adapter in all modules of ``package`` that have imported it: ``"vllm"`` or ``"sglang"``.

    Without an argument, as vLLM calls its plugins: vLLM's, if ``SHMESH_VLLM=1``.
    """
    if package is None:
        if os.environ.get("SHMESH_VLLM") != "1":
            return
        package = "vllm"
    if package not in _MODULES:
        raise Invalid(f"{package}: the packages with such a class are {', '.join(_MODULES)}")
    module = importlib.import_module(_MODULES[package])
    original = module.MessageQueue
    if getattr(original, "_is_of_shmesh", False):
        return
    adapter = adapter_of(original, module.Handle, getattr(module, "_reduce_tensor", None))
    for name, user in list(sys.modules.items()):
        if name.partition(".")[0] == package and getattr(user, "MessageQueue", None) is original:
            user.MessageQueue = adapter  # type: ignore[attr-defined]


def _handle_of(handle_type: Any, ranks: list[int], place: Any) -> Any:
    """A handle of the original's type. Its place is in the field of the buffer, which has another name in SGLang."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(handle_type):
        if field.name == "local_reader_ranks":
            values[field.name] = ranks
        elif field.name in _PLACES:
            values[field.name] = place
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            # An address, which no reader of this node needs.
            values[field.name] = ""
    return handle_type(**values)


def _place_of(handle: Any) -> Any:
    return next((getattr(handle, name) for name in _PLACES if hasattr(handle, name)), None)


def adapter_of(original: Any, handle_type: Any, reduce_tensor: Any = None) -> Any:
    """A subclass of vLLM's class. Queues with only local readers use shmesh; other queues are inherited unchanged.

    ``reduce_tensor`` is vLLM's function that places the memory of tensors beside the pickle.
    """
    default_bytes = 24 << 20
    for name, parameter in inspect.signature(original).parameters.items():
        if name == "max_chunk_bytes" and parameter.default is not parameter.empty:
            default_bytes = parameter.default

    class Pickler(pickle.Pickler):
        dispatch_table = dict(copyreg.dispatch_table)

    if reduce_tensor is not None:
        Pickler.dispatch_table[sys.modules["torch"].Tensor] = reduce_tensor

    class Adapter(original):  # type: ignore[misc]
        _is_of_shmesh = True
        _queue: MessageQueue | None = None

        def __init__(
            self,
            n_reader: int,
            n_local_reader: int,
            local_reader_ranks: list[int] | None = None,
            max_chunk_bytes: int = default_bytes,
            max_chunks: int = 10,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if n_reader != n_local_reader or n_local_reader == 0:
                super().__init__(n_reader, n_local_reader, local_reader_ranks, max_chunk_bytes, max_chunks, *args, **kwargs)
                return
            ranks = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
            if len(ranks) != n_local_reader:
                raise Invalid(f"{len(ranks)} ranks for {n_local_reader} local readers: name each once")
            depth = max(2, max_chunks)
            self._queue = MessageQueue(max_chunk_bytes, depth, readers=n_local_reader)
            self._queue._pickler = None if reduce_tensor is None else Pickler
            # Each until so many more were sent: by then all readers have read it.
            self._large: deque[_Large] = deque(maxlen=depth)
            self.shutting_down = False
            self.n_local_reader, self.n_remote_reader = n_local_reader, 0
            self.local_reader_rank = -1
            self._is_writer, self._is_local_reader, self._is_remote_reader = True, False, False
            place = (_MARK, self._queue.name, self._queue.directory)
            self.handle = _handle_of(handle_type, ranks, place)

        @staticmethod
        def create_from_handle(handle: Any, rank: int) -> Any:
            place = _place_of(handle)
            if not isinstance(place, tuple) or place[:1] != (_MARK,):
                return original.create_from_handle(handle, rank)
            if rank not in handle.local_reader_ranks:
                raise Invalid(f"queue {place[1]}: rank {rank} is not among its readers {handle.local_reader_ranks}")
            self = Adapter.__new__(Adapter)
            self.shutting_down = False
            self._queue = MessageQueue.attach(place[1], rank, directory=place[2])
            self.handle = handle
            self.local_reader_rank = handle.local_reader_ranks.index(rank)
            self._is_writer, self._is_local_reader, self._is_remote_reader = False, True, False
            return self

        def wait_until_ready(self) -> None:
            if self._queue is None:
                super().wait_until_ready()
            else:
                self._queue.wait_until_ready()

        def enqueue(self, obj: Any, timeout: float | None = None) -> None:
            if self._queue is None:
                super().enqueue(obj, *([] if timeout is None else [timeout]))
            else:
                try:
                    self._queue.enqueue(obj, timeout)
                except TooLong:
                    pickled = np.frombuffer(pickle.dumps(obj, 5), np.uint8)
                    large = _Large(empty(pickled.size, np.uint8))
                    large.pickled[:] = pickled
                    self._queue.enqueue(large, timeout)
                    self._large.append(large)

        def dequeue(self, timeout: float | None = None, *args: Any, cancel: Any = None, **kwargs: Any) -> Any:
            """As vLLM's: some releases have a ``cancel`` event before ``indefinite``, which here changes nothing: a wait logs nothing."""
            if self._queue is None:
                more = kwargs if cancel is None else {**kwargs, "cancel": cancel}
                return super().dequeue(*([] if timeout is None and not args else [timeout, *args]), **more)
            if cancel is None:
                cancel = next((argument for argument in args if hasattr(argument, "is_set")), None)
            try:
                found = self._dequeue(timeout, cancel)
            except Closed:
                # By `shutdown`, in another thread.
                raise RuntimeError("cancelled") from None
            return pickle.loads(found.pickled.data) if type(found) is _Large else found

        def _dequeue(self, timeout: float | None, cancel: Any) -> Any:
            queue = self._queue
            assert queue is not None
            if cancel is None:
                return queue.dequeue(timeout)
            deadline = None if timeout is None else time.monotonic() + timeout
            while not cancel.is_set():
                left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, max(deadline - time.monotonic(), 0.0))
                try:
                    return queue.dequeue(left)
                except Timeout:
                    if deadline is not None and time.monotonic() >= deadline:
                        raise
            raise RuntimeError("cancelled")

        def broadcast_object(self, obj: Any = None) -> Any:
            if self._queue is None:
                return super().broadcast_object(obj)
            if self._is_writer:
                self.enqueue(obj)
                return obj
            return self.dequeue()

        def shutdown(self) -> None:
            """Ends a `dequeue` of another thread, too: it raises ``RuntimeError``, as vLLM's does."""
            self.shutting_down = True
            if self._queue is not None:
                self._queue.close()
            elif hasattr(original, "shutdown"):
                super().shutdown()

        def __del__(self) -> None:
            if self._queue is not None:
                self._queue.close()
            elif hasattr(original, "__del__"):
                super().__del__()

    Adapter.__name__ = Adapter.__qualname__ = "MessageQueue"
    return Adapter
