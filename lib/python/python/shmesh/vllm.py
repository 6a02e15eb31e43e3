"""vLLM's `MessageQueue` over shmesh: a plugin of vLLM (``vllm.general_plugins``), inactive unless ``SHMESH_VLLM=1``.

The queue of vLLM polls flags of all readers and waits for ever for one that has died. This one has the same methods, sleeps while idle, and
raises `shmesh.PeerDied` with the rank. Queues with readers on other nodes stay vLLM's own.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ._errors import Timeout
from ._message_queue import MessageQueue

__all__ = ["adapter_of", "register"]

_MARK = "shmesh"
# Interval at which a reader checks whether it was cancelled.
_LOOK_AGAIN = 0.1


def register() -> None:
    """Replaces vLLM's class by the adapter in all modules that have imported it."""
    if os.environ.get("SHMESH_VLLM") != "1":
        return
    from vllm.distributed.device_communicators import shm_broadcast  # type: ignore[import-not-found, unused-ignore]

    original = shm_broadcast.MessageQueue
    if getattr(original, "_is_of_shmesh", False):
        return
    adapter = adapter_of(original, shm_broadcast.Handle)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and getattr(module, "MessageQueue", None) is original:
            module.MessageQueue = adapter  # type: ignore[attr-defined]


def adapter_of(original: Any, handle_type: Any) -> Any:
    """A subclass of vLLM's class. Queues with only local readers use shmesh; other queues are inherited unchanged."""

    class Adapter(original):  # type: ignore[misc]
        _is_of_shmesh = True
        _queue: MessageQueue | None = None

        def __init__(
            self,
            n_reader: int,
            n_local_reader: int,
            local_reader_ranks: list[int] | None = None,
            max_chunk_bytes: int = 10 << 20,
            max_chunks: int = 10,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if n_reader != n_local_reader or n_local_reader == 0:
                super().__init__(n_reader, n_local_reader, local_reader_ranks, max_chunk_bytes, max_chunks, *args, **kwargs)
                return
            ranks = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
            self._queue = MessageQueue(max_chunk_bytes, max(2, max_chunks), readers=n_local_reader)
            self.n_local_reader, self.n_remote_reader = n_local_reader, 0
            self.local_reader_rank = -1
            self._is_writer, self._is_local_reader, self._is_remote_reader = True, False, False
            place = (_MARK, self._queue.name, self._queue.directory)
            self.handle = handle_type(local_reader_ranks=ranks, buffer_handle=place)

        @staticmethod
        def create_from_handle(handle: Any, rank: int) -> Any:
            place = handle.buffer_handle
            if not place or place[0] != _MARK:
                return original.create_from_handle(handle, rank)
            self = Adapter.__new__(Adapter)
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
                super().enqueue(obj, timeout)
            else:
                self._queue.enqueue(obj, timeout)

        def dequeue(self, timeout: float | None = None, cancel: Any = None, *args: Any, **kwargs: Any) -> Any:
            queue = self._queue
            if queue is None:
                return super().dequeue(timeout, *(() if cancel is None else (cancel,)), *args, **kwargs)
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
