"""Batches of arrays from loaders to trainers.

A batch is one message: where its arrays lie is in the MSG part, and the arrays are in the DATA part. Beside the link lies
an array of counters, in which each producer writes only the column of its seat: who has come, and who has finished. Who
came, did not finish and is not on the link any more, has died.
"""

from __future__ import annotations

import ast
import json
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np

from . import _array
from ._errors import Closed, Damaged, Error, Exhausted, Invalid, PeerDied, Timeout, TooLong
from ._link import Link
from ._shmesh import Loan, Message

__all__ = ["Batch", "BatchQueue"]

_SEATS = 64
_STARTED, _FINISHED, _PID, _EXPECTED = range(4)
_ALIGN = 64
_HEADER = struct.Struct("<I")
# Who waits for a buffer may miss that one came free, if another took its signal; and looks again after so long.
_LOOK_AGAIN = 0.01
_LOOK_FOR_THE_DEAD = 0.2
# How long nobody may answer for the name of a queue whose maker has ended.
_LOOK_AFTER_THE_NAME = 0.5

_Layout = dict[str, tuple[tuple[int, ...], np.dtype, int]]


@lru_cache(maxsize=256)
def _encode(spec: tuple[tuple[str, tuple[int, ...], np.dtype], ...]) -> tuple[bytes, int]:
    """Where the arrays of a batch lie, as text, and how many bytes they need."""
    offset, entries = 0, []
    for key, shape, dtype in spec:
        entries.append((key, _array._described(dtype), shape, offset))
        offset += -(-dtype.itemsize * math.prod(shape) // _ALIGN) * _ALIGN
    return repr(entries).encode(), offset


@lru_cache(maxsize=256)
def _decode(text: bytes) -> _Layout:
    layout: _Layout = {}
    try:
        for key, descr, found, offset in ast.literal_eval(text.decode()):
            shape, dtype, _ = _array._laid_out(found, np.lib.format.descr_to_dtype(descr))
            # numpy does not check it.
            if not isinstance(offset, int) or offset < 0:
                raise ValueError(f"offset {offset!r}")
            layout[str(key)] = (shape, dtype, offset)
    except _array._NONSENSE as wrong:
        raise Damaged(f"a batch describes its arrays in a way that this version does not know: {wrong}") from None
    return layout


class Batch(Mapping[str, np.ndarray]):
    """Arrays by name: one that is being written, from `BatchQueue.batch`, or one that was received.

    The arrays are in shared memory. Of a received batch they are read-only, and its memory is used again when they and
    the batch are gone. A batch that is written is sent when no array of it lives: write to ``batch["x"][...]``, or ``del``
    what was taken out.
    """

    def __init__(self, held: Loan | Message, layout: _Layout, meta: Any, queue: BatchQueue | None = None) -> None:
        self._held = held
        self._queue = queue
        self._layout = layout
        self.meta = meta
        """What the producer sent with it."""

    def __getitem__(self, key: str, /) -> np.ndarray:
        shape, dtype, offset = self._layout[key]
        data = self._held.data
        try:
            return np.ndarray(shape, dtype, data, offset)
        except _array._NONSENSE as wrong:
            raise Damaged(f"array {key} of this batch does not lie in its memory: {wrong}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def send(self) -> None:
        """Sends a batch that was written."""
        if not isinstance(self._held, Loan):
            raise Invalid("this batch was received; only one from `BatchQueue.batch` can be sent")
        if self._queue is not None and self._queue._closed:
            # Consumers may have seen the end.
            self._held.drop()
            raise Closed(f"queue {self._queue.name}: closed before this batch was sent, so it was not; send it, then close")
        self._held.send()

    def release(self) -> None:
        """Gives the batch up: received, its memory is free when its arrays are gone; being written, it is not sent."""
        if isinstance(self._held, Loan):
            self._held.drop()
        else:
            self._held.release()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(self._held, Loan) and kind is None and not self._held.closed:
            self.send()
        else:
            self.release()

    def __repr__(self) -> str:
        arrays = ", ".join(f"{key}: {shape} {dtype}" for key, (shape, dtype, _) in self._layout.items())
        return f"<shmesh.Batch {arrays}>"


class BatchQueue:
    """Batches from producers to consumers, over a pool of ``depth`` buffers of ``nbytes`` bytes.

    The process that makes it is the first consumer. It is passed to others by pickling, or by inheritance in a fork, or
    they `attach` to its name. Each batch goes to one consumer. A producer waits while all buffers are in use. The queue ends
    when ``producers`` of them have finished (``with queue:``, or `close`).
    """

    _consumer: Link | None
    _producer: Link | None

    def __init__(
        self,
        nbytes: int,
        depth: int = 4,
        *,
        producers: int = 1,
        name: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        spin_us: int = 50,
        mode: int = 0o600,
    ) -> None:
        if depth < 2:
            raise Invalid(f"depth {depth}: one buffer is read while another is written, so at least 2")
        if nbytes < 1:
            raise Invalid(f"nbytes {nbytes}: the bytes of the largest batch, at least 1")
        if producers < 1:
            raise _no_producers(producers)
        self._prepare(name or f"batches-{secrets.token_hex(8)}", _array.ipc_directory(directory))
        size = -(-nbytes // _ALIGN) * _ALIGN
        link = Link.create(
            self.name,
            pools={"cpu_msg": (16_384, depth), "cpu_data": (size, depth)},
            ring_len=depth,
            backing="memfd",
            spin_us=spin_us,
            file_mode=mode,
            directory=self.directory,
        )
        link.post_releases(max(1, depth // 2))
        self._consumer = link
        self._counters = _array.empty((4, _SEATS), np.int64, readers_write=True)
        self._counters[_EXPECTED, :2] = producers, mode
        # Others attach through the counters, so their name comes last.
        self._counters.memory.publish(self.directory, self.name, self._meta(), mode=mode)

    def _prepare(self, name: str, directory: str) -> None:
        self.name = name
        self.directory = directory
        self._consumer = None
        self._producer = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reported = 0
        self._closed = False
        self._look = 0.0

    @classmethod
    def attach(cls, name: str, *, directory: str | os.PathLike[str] | None = None) -> BatchQueue:
        """The queue of this name, which another process made."""
        queue = cls.__new__(cls)
        queue._prepare(name, _array.ipc_directory(directory))
        queue._counters = _array.open(name, (4, _SEATS), np.int64, writable=True, directory=queue.directory)
        return queue

    def __reduce__(self) -> Any:
        return _attach, (type(self), self.name, self.directory)

    @property
    def producers(self) -> int:
        """How many producers finish until the queue ends. Raise it before another one comes."""
        return int(self._counters[_EXPECTED, 0])

    @producers.setter
    def producers(self, count: int) -> None:
        if count < 1:
            raise _no_producers(count)
        self._counters[_EXPECTED, 0] = count

    @property
    def died(self) -> int:
        """How many producers have ended without finishing."""
        return self._ended()[1]

    def as_producer(self) -> BatchQueue:
        """The queue, with this process a producer of it from now on, and not only from its first batch.

        In ``with queue.as_producer():``, a failure before the first batch is noticed as one after it.
        """
        self._producing()
        return self

    def put(self, arrays: Mapping[str, Any], *, meta: Any = None, timeout: float | None = None) -> None:
        """Sends a copy of these arrays. Waits for a buffer; `batch` is the way without the copy."""
        sources = {key: np.asarray(array) for key, array in arrays.items()}
        batch = self.batch(
            {key: (source.shape, source.dtype) for key, source in sources.items()}, meta=meta, timeout=timeout
        )
        for key, source in sources.items():
            batch[key][...] = source
        batch.send()

    def batch(self, spec: Mapping[str, tuple[Any, Any]], *, meta: Any = None, timeout: float | None = None) -> Batch:
        """A batch to be written in place: ``{"x": ((256, 3, 32, 32), "f4")}``. It is sent at the end of its ``with``."""
        for key in spec:
            if not isinstance(key, str):
                raise Invalid(f"key {key!r}: arrays of a batch are called by a str; use `str({key!r})`")
        laid_out = [(str(key), *_array._laid_out(shape, dtype)[:2]) for key, (shape, dtype) in spec.items()]
        text, nbytes = _encode(tuple(laid_out))
        extra = b"" if meta is None else json.dumps(meta).encode()
        link = self._producing()
        self._look_after_the_name()
        room, header = link.pool("cpu_data"), link.pool("cpu_msg")
        if room is not None and nbytes > room[0]:
            raise TooLong(
                f"queue {self.name}: this batch needs {nbytes} bytes, its buffers have {room[0]}; make the queue with a "
                "larger nbytes"
            )
        length = _HEADER.size + len(text) + len(extra)
        if header is not None and length > header[0]:
            raise TooLong(
                f"queue {self.name}: {length} bytes describe this batch, at most {header[0]}; use fewer keys, or less meta"
            )
        loan = self._loan(link, length, nbytes, timeout)
        loan.msg[:] = np.frombuffer(_HEADER.pack(len(text)) + text + extra, np.uint8)
        return Batch(loan, _decode(text), meta, self)

    def _loan(self, link: Link, length: int, nbytes: int, timeout: float | None) -> Loan:
        deadline = None if timeout is None else time.monotonic() + timeout
        look = time.monotonic() + _LOOK_FOR_THE_DEAD
        while True:
            try:
                return link.loan(length, nbytes)
            except Exhausted:
                pass
            # Old ones say nothing; one that comes after the next look is waited for.
            link.take_posts()
            try:
                return link.loan(length, nbytes)
            except Exhausted:
                pass
            now = time.monotonic()
            over = deadline is not None and now >= deadline
            if over or now >= look:
                look = now + _LOOK_FOR_THE_DEAD
                link.recover()
                if not any(other.side == "primary" and other.alive is not False for other in link.participants()):
                    raise PeerDied(f"queue {self.name}: no consumer is left; end this producer, or start a consumer")
                self._look_after_the_name()
            if over:
                # Once more, with what the dead had.
                try:
                    return link.loan(length, nbytes)
                except Exhausted:
                    raise Timeout(
                        f"queue {self.name}: all buffers are in use after {timeout} s; consume faster, or raise depth"
                    ) from None
            link.wait_tti(_LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, max(deadline - now, 0.0)))

    def get(self, timeout: float | None = None) -> Batch:
        """The oldest batch. `EOFError` when all producers have finished; `PeerDied` once for each that died."""
        link = self._consuming()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._look_after_the_name()
            message = link.try_receive()
            if message is not None:
                return self._open(message)
            # Nobody is woken for a single buffer; but nobody waits for what this one has while it waits itself.
            link.post_now()
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if link.wait(_LOOK_FOR_THE_DEAD if left is None else min(left, _LOOK_FOR_THE_DEAD / 4)):
                continue
            ended, died = self._ended()
            # After the counters were read, and before the ring is: `notify` is a fence for both.
            link.notify()
            if link.has_message:
                continue
            if died > self._reported:
                link.recover()
                new, self._reported = died - self._reported, died
                raise PeerDied(
                    f"queue {self.name}: {new} producer(s) died, or ended without `close`; what they sent was delivered, "
                    "and their buffers are back; call get again to go on"
                )
            if ended >= self.producers:
                raise EOFError(f"queue {self.name}: all producers have finished")
            if left == 0.0:
                raise Timeout(f"queue {self.name}: no batch came within {timeout} s")

    def _open(self, message: Message) -> Batch:
        header = bytes(message)
        if len(header) < _HEADER.size:
            raise Damaged(f"queue {self.name}: somebody sent what is no batch")
        (length,) = _HEADER.unpack_from(header)
        text, extra = header[_HEADER.size : _HEADER.size + length], header[_HEADER.size + length :]
        try:
            meta = json.loads(extra) if extra else None
        except (ValueError, RecursionError) as wrong:
            raise Damaged(f"queue {self.name}: somebody sent what is no batch: {wrong}") from None
        return Batch(message, _decode(text), meta)

    def __iter__(self) -> Iterator[Batch]:
        """Batches until all producers have finished."""
        while True:
            try:
                batch = self.get()
            except EOFError:
                return
            yield batch
            del batch

    def _ended(self) -> tuple[int, int]:
        """How many producers are not there any more, and how many of them did not finish."""
        link = self._consumer or self._producer
        if link is None or self._pid != os.getpid():
            link = self._consuming()
        there = {other.seat: other.pid for other in link.participants() if other.alive is not False}
        started, finished, pids = (self._counters[row].tolist() for row in (_STARTED, _FINISHED, _PID))
        working = sum(
            1 for seat in range(_SEATS) if started[seat] > finished[seat] and there.get(seat, 0) == pids[seat] != 0
        )
        ended = sum(started) - working
        return ended, ended - sum(finished)

    def _meta(self) -> bytes:
        return _array._meta(self._counters.dtype, self._counters.shape)

    def _look_after_the_name(self) -> None:
        """Whoever uses the queue answers for its name when the process that did so has ended: others may come."""
        now = time.monotonic()
        if now < self._look:
            return
        self._look = now + _LOOK_AFTER_THE_NAME
        mode = int(self._counters[_EXPECTED, 1]) & 0o777
        try:
            self._counters.memory.adopt(self.directory, self.name, self._meta(), mode=mode or 0o600)
        except Error:
            # Another was faster, or has made another queue of this name.
            pass
        for link in (self._consumer, self._producer):
            if link is not None:
                link.become_host()

    def _here(self) -> None:
        """In a forked child the links are the parent's: it takes its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.Lock()
            self._consumer = None
            self._producer = None
            self._reported = 0
        if self._closed:
            raise Closed(f"queue {self.name}: closed here; attach again")

    def _consuming(self) -> Link:
        self._here()
        with self._lock:
            if self._consumer is None:
                link = Link.attach(self.name, "primary", allow_second_primary=True, directory=self.directory)
                buffers = link.pool("cpu_data")
                link.post_releases(max(1, (buffers[1] if buffers else 1) // 2))
                self._consumer = link
            return self._consumer

    def _producing(self) -> Link:
        self._here()
        with self._lock:
            if self._producer is None:
                link = Link.attach(self.name, directory=self.directory)
                seat = link.seat
                self._counters[_PID, seat] = os.getpid()
                self._counters[_STARTED, seat] += 1
                self._producer = link
            return self._producer

    def close(self) -> None:
        """Leaves the queue: as a producer, having finished."""
        self._leave(finished=True)

    def _leave(self, finished: bool) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with self._lock:
            if self._producer is not None:
                if finished:
                    # After the last batch: waking the consumers is a fence.
                    self._producer.notify()
                    self._counters[_FINISHED, self._producer.seat] += 1
                    self._producer.notify()
                self._producer.close(strict=False)
            if self._consumer is not None:
                self._consumer.close(strict=False)
        if self._counters.memory.path is not None:
            self._counters.unlink()
        else:
            try:
                # If who made the queue was killed, this removes what is left of it: names without memory.
                _array.open(self.name, directory=self.directory)
            except Error:
                pass

    def __enter__(self) -> BatchQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves; a producer that failed has not finished."""
        self._leave(finished=kind is None)

    def __repr__(self) -> str:
        return f"<shmesh.BatchQueue {self.name}>"


def _no_producers(count: int) -> Invalid:
    return Invalid(f"producers {count}: how many will finish, at least 1")


def _attach(kind: type[BatchQueue], name: str, directory: str) -> BatchQueue:
    """What a pickled queue becomes."""
    return kind.attach(name, directory=directory)
