"""Batches of arrays from loaders to trainers.

A batch is one message: the layout of its arrays is in the MSG part, and the arrays are in the DATA part. Each queue also has
an array of counters, in which each producer only writes the column of its seat: whether it has started, and whether it has
finished. A producer that has started, has not finished and is no longer on the link, has died.
"""

from __future__ import annotations

import ast
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import lru_cache
from time import monotonic as _monotonic
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from . import _array
from ._errors import Closed, Damaged, Error, Forked, Invalid, PeerDied, Timeout, TooLong
from ._link import Link
from ._shmesh import Batch, BatchLayout

__all__ = ["Batch", "BatchQueue"]

_SEATS = 64
_STARTED, _FINISHED, _PID, _EXPECTED = range(4)
_ALIGN = 64
# A producer that waits for a buffer may miss a free one, if another producer took its signal. It retries after this time.
_LOOK_AGAIN = 0.01
_LOOK_FOR_THE_DEAD = 0.2
# How long the name of a queue may be without a process that answers for it, after its creator has ended.
_LOOK_AFTER_THE_NAME = 0.5

# The result of an attempt: a batch, or whether one was sent.
_Made = TypeVar("_Made")
# Layouts of the specs that this process has used, as each is encoded once.
_LAYOUTS_MAX = 256
_layouts: dict[Any, BatchLayout] = {}


def _encode(spec: Mapping[str, tuple[Any, Any]]) -> BatchLayout:
    """Encodes the layout of a batch."""
    offset, entries, places = 0, [], []
    for key, (shape, dtype) in spec.items():
        if not isinstance(key, str):
            raise Invalid(f"key {key!r}: names of arrays in a batch must be str; use `str({key!r})`")
        lengths, kind, nbytes = _array._laid_out(shape, dtype)
        entries.append((str(key), _array._described(kind), lengths, offset))
        places.append((str(key), lengths, kind, offset))
        offset += -(-nbytes // _ALIGN) * _ALIGN
    return BatchLayout(repr(entries).encode(), offset, places)


@lru_cache(maxsize=256)
def _decode(name: str, text: bytes) -> BatchLayout:
    """Decodes the layout of a batch from a producer of queue ``name``."""
    places = {}
    try:
        for key, descr, found, offset in ast.literal_eval(text.decode()):
            shape, dtype, _ = _array._laid_out(found, _array._dtype_of(descr))
            # A negative number, or one that is too large, is refused here; an offset outside of the batch when its array is
            # accessed.
            places[str(key)] = (str(key), shape, dtype, offset)
        return BatchLayout(text, 0, list(places.values()))
    except _array._NONSENSE as wrong:
        raise Damaged(f"queue {name}: a batch describes its arrays in a way that this version does not know: {wrong}") from None


def _load(name: str, extra: bytes) -> Any:
    """Decodes what a producer of queue ``name`` sent with the arrays of a batch."""
    try:
        return json.loads(extra)
    except (ValueError, RecursionError) as wrong:
        raise Damaged(f"queue {name}: received a message that is not a batch: {wrong}") from None


Mapping.register(Batch)


class BatchQueue:
    """Batches from producers to consumers, over a pool of ``depth`` buffers of ``nbytes`` bytes.

    The process that creates it is the first consumer. Other processes get it by pickling, by inheritance in a fork, or by
    `attach` with its name. Each batch goes to one consumer. A producer waits while all buffers are in use. The queue ends
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
            raise Invalid(f"depth is {depth}, and must be at least 2, because one buffer is read while another is written")
        if nbytes < 1:
            raise Invalid(f"nbytes is {nbytes}, and must be at least 1: the size of the largest batch")
        if producers < 1:
            raise _no_producers(producers)
        self._prepare(name or f"batches-{os.urandom(8).hex()}", _array.ipc_directory(directory))
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
        # Other processes attach through the counters, so their name is published last.
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
        """Attaches to the queue with this name, which another process has created."""
        queue = cls.__new__(cls)
        queue._prepare(name, _array.ipc_directory(directory))
        queue._counters = _array.open(name, (4, _SEATS), np.int64, writable=True, directory=queue.directory)
        return queue

    def __reduce__(self) -> Any:
        return _attach, (type(self), self.name, self.directory)

    @property
    def producers(self) -> int:
        """The number of producers that must finish before the queue ends. Raise it before another producer attaches."""
        return int(self._counters[_EXPECTED, 0])

    @producers.setter
    def producers(self, count: int) -> None:
        if count < 1:
            raise _no_producers(count)
        self._counters[_EXPECTED, 0] = count

    @property
    def died(self) -> int:
        """The number of producers that have ended without finishing."""
        return self._ended()[1]

    def as_producer(self) -> BatchQueue:
        """Registers this process as a producer now, and not only with its first batch. Returns the queue.

        In ``with queue.as_producer():``, a failure before the first batch is detected like a later one.
        """
        self._producing()
        return self

    def put(self, arrays: Mapping[str, Any], *, meta: Any = None, timeout: float | None = None) -> None:
        """Sends a copy of these arrays. Waits for a free buffer. To avoid the copy, use `batch`."""
        sources = {key: np.asarray(array) for key, array in arrays.items()}
        layout = _layout_of({key: (source.shape, source.dtype) for key, source in sources.items()})
        extra = b"" if meta is None else json.dumps(meta).encode()
        copied = list(sources.values())
        self._with_room(layout, extra, timeout, lambda link: link.put_batch(layout, extra, copied) or None)

    def batch(self, spec: Mapping[str, tuple[Any, Any]], *, meta: Any = None, timeout: float | None = None) -> Batch:
        """Returns a batch to write in place: ``{"x": ((256, 3, 32, 32), "f4")}``. It is sent at the end of its ``with``."""
        layout = _layout_of(spec)
        extra = b"" if meta is None else json.dumps(meta).encode()
        return self._with_room(layout, extra, timeout, lambda link: link.begin_batch(layout, meta, extra))

    def _with_room(
        self, layout: BatchLayout, extra: bytes, timeout: float | None, attempt: Callable[[Link], _Made | None]
    ) -> _Made:
        """Calls ``attempt`` until it returns a result. It returns None while all buffers are in use."""
        if _monotonic() >= self._look:
            self._look_after_the_name()
        link = self._producer or self._producing()
        try:
            try:
                made = attempt(link)
            except Forked:
                # The link belongs to the parent process. A child attaches its own.
                link = self._producing()
                made = attempt(link)
            return self._wait_for_room(link, timeout, attempt) if made is None else made
        except TooLong:
            raise self._too_long(link, layout, extra) from None

    def _too_long(self, link: Link, layout: BatchLayout, extra: bytes) -> TooLong:
        room, header = link.pool("cpu_data"), link.pool("cpu_msg")
        if room is not None and layout.nbytes > room[0]:
            return TooLong(
                f"queue {self.name}: this batch needs {layout.nbytes} bytes, its buffers have {room[0]}; make the queue with "
                "a larger nbytes"
            )
        return TooLong(
            f"queue {self.name}: {layout.header_bytes + len(extra)} bytes describe this batch, at most "
            f"{header[0] if header is not None else 0}; use fewer keys, or less meta"
        )

    def _wait_for_room(self, link: Link, timeout: float | None, attempt: Callable[[Link], _Made | None]) -> _Made:
        search = _Search(self, timeout)
        while True:
            made = search.attempt(link, attempt)
            if made is not None:
                return made
            link.wait_tti(search.pause())

    def get(self, timeout: float | None = None) -> Batch:
        """Returns the oldest batch. Raises `EOFError` when all producers have finished, and `PeerDied` once per producer
        that died.
        """
        deadline = None if timeout is None else _monotonic() + timeout
        while True:
            batch = self._take()
            if batch is not None:
                return batch
            link = self._consuming()
            # Producers are not woken for each buffer, but get all of them before this consumer waits itself.
            link.post_now()
            left = None if deadline is None else max(deadline - _monotonic(), 0.0)
            pause = _LOOK_FOR_THE_DEAD if left is None else min(left, _LOOK_FOR_THE_DEAD / 4)
            # If there is a batch, another consumer may take it each time.
            if not link.wait(pause) or left == 0.0:
                self._raise_if_over(link)
                if left == 0.0:
                    batch = self._take()
                    if batch is not None:
                        return batch
                    raise Timeout(f"queue {self.name}: no batch arrived within {timeout} s")

    def _take(self) -> Batch | None:
        """Returns the oldest batch, or None."""
        if _monotonic() >= self._look:
            self._look_after_the_name()
        link = self._consumer or self._consuming()
        try:
            return link.try_receive_batch(_decode, _load)
        except Forked:
            # The link belongs to the parent process. A child attaches its own.
            return self._consuming().try_receive_batch(_decode, _load)

    def _raise_if_over(self, link: Link) -> None:
        """Raises `PeerDied` for producers that died since the last call, and `EOFError` at the end, but not before the last
        batch.
        """
        ended, died = self._ended()
        # Between reading the counters and reading the ring: `notify` has a memory fence.
        link.notify()
        if link.has_message:
            return
        if died > self._reported:
            link.recover()
            new, self._reported = died - self._reported, died
            raise PeerDied(
                f"queue {self.name}: {new} producer(s) died, or ended without `close`; what they sent was delivered, "
                "and their buffers are back; call get again to go on"
            )
        if ended >= self.producers:
            raise EOFError(f"queue {self.name}: all producers have finished")

    def get_nowait(self) -> Batch | None:
        """Returns the oldest batch, or None. Consumes the signals of `fileno`, and raises as `get` does."""
        link = self._consuming()
        # Before the ring is read: a batch that arrives later signals again.
        while link.take_signal():
            pass
        batch = self._take()
        if batch is None:
            link.post_now()
            self._raise_if_over(link)
        return batch

    def fileno(self) -> int:
        """A descriptor for ``selectors`` and ``epoll``, readable when a batch may have come, or a producer has ended.

        Register it, and call `get_nowait` until it returns None; then again each time that it is readable.
        """
        return self._consuming().fileno()

    async def get_async(self, timeout: float | None = None) -> Batch:
        """As `get`, for ``asyncio``. A task that is cancelled has not taken a batch."""
        deadline = None if timeout is None else _monotonic() + timeout
        while True:
            batch = self._take()
            if batch is not None:
                return batch
            link = self._consuming()
            link.post_now()
            left = None if deadline is None else max(deadline - _monotonic(), 0.0)
            if left != 0.0:
                await link._readable(lambda: self._closed or link.has_message, _shorter(_LOOK_FOR_THE_DEAD, left))
            # There is no task switch from here to the return.
            if left == 0.0 or not link.has_message:
                self._raise_if_over(self._consuming())
            if left == 0.0:
                batch = self._take()
                if batch is not None:
                    return batch
                raise Timeout(f"queue {self.name}: no batch arrived within {timeout} s")

    async def put_async(self, arrays: Mapping[str, Any], *, meta: Any = None, timeout: float | None = None) -> None:
        """As `put`, for ``asyncio``. A task that is cancelled while it waits has not sent anything."""
        sources = {key: np.asarray(array) for key, array in arrays.items()}
        layout = _layout_of({key: (source.shape, source.dtype) for key, source in sources.items()})
        extra = b"" if meta is None else json.dumps(meta).encode()
        copied = list(sources.values())
        await self._with_room_async(layout, extra, timeout, lambda link: link.put_batch(layout, extra, copied) or None)

    async def batch_async(
        self, spec: Mapping[str, tuple[Any, Any]], *, meta: Any = None, timeout: float | None = None
    ) -> Batch:
        """As `batch`, for ``asyncio``: ``with await queue.batch_async(spec) as batch:``."""
        layout = _layout_of(spec)
        extra = b"" if meta is None else json.dumps(meta).encode()
        return await self._with_room_async(layout, extra, timeout, lambda link: link.begin_batch(layout, meta, extra))

    async def _with_room_async(
        self, layout: BatchLayout, extra: bytes, timeout: float | None, attempt: Callable[[Link], _Made | None]
    ) -> _Made:
        try:
            link = self._producing()
            made = attempt(link)
            search = _Search(self, timeout)
            while made is None:
                await link._readable(lambda: self._closed, search.pause())
                link = self._producing()
                made = search.attempt(link, attempt)
            return made
        except TooLong:
            raise self._too_long(link, layout, extra) from None

    async def __aiter__(self) -> AsyncIterator[Batch]:
        """Yields batches until all producers have finished."""
        while True:
            try:
                batch = await self.get_async()
            except EOFError:
                return
            yield batch
            del batch

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches until all producers have finished."""
        while True:
            try:
                batch = self.get()
            except EOFError:
                return
            yield batch
            del batch

    def _ended(self) -> tuple[int, int]:
        """The number of producers that are gone, and of those that did not finish."""
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
        """Answers for the name of the queue if its process has ended, so that others can still attach."""
        self._here()
        self._look = _monotonic() + _LOOK_AFTER_THE_NAME
        mode = int(self._counters[_EXPECTED, 1]) & 0o777
        try:
            self._counters.memory.adopt(self.directory, self.name, self._meta(), mode=mode or 0o600)
        except Error:
            # Another process was faster, or has created another queue with this name.
            pass
        for link in (self._consumer, self._producer):
            if link is not None:
                link.become_host()

    def _here(self) -> None:
        """In a forked child, drops the parent's links, so that it attaches its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.Lock()
            self._consumer = None
            self._producer = None
            self._reported = 0
        if self._closed:
            raise Closed(f"queue {self.name}: this handle is closed; attach again")

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
        """Detaches from the queue. A producer counts as finished."""
        self._leave(finished=True)

    def _leave(self, finished: bool) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with self._lock:
            if self._producer is not None:
                self._producer.finish()
                if finished:
                    # After the last batch: `notify` has a memory fence.
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
                # If the creator of the queue was killed, this removes its stale name.
                _array.open(self.name, directory=self.directory)
            except Error:
                pass

    def __enter__(self) -> BatchQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Detaches. A producer with an exception does not count as finished."""
        self._leave(finished=kind is None)

    def __repr__(self) -> str:
        return f"<shmesh.BatchQueue {self.name}>"


class _Search:
    """A producer's wait for a free buffer: its timeout, and its checks for consumers that died."""

    def __init__(self, queue: BatchQueue, timeout: float | None) -> None:
        self._queue = queue
        self._timeout = timeout
        self._now = _monotonic()
        self._deadline = None if timeout is None else self._now + timeout
        self._look = self._now + _LOOK_FOR_THE_DEAD

    def attempt(self, link: Link, attempt: Callable[[Link], _Made | None]) -> _Made | None:
        """Makes one attempt. Returns None while all buffers are in use; raises `Timeout` or `PeerDied` to end the wait."""
        # Old posts have no meaning. A post after the next attempt ends the wait.
        link.take_posts()
        made = attempt(link)
        if made is not None:
            return made
        self._now = _monotonic()
        over = self._deadline is not None and self._now >= self._deadline
        if not over and self._now < self._look:
            return None
        self._look = self._now + _LOOK_FOR_THE_DEAD
        link.recover()
        queue = self._queue
        if not any(other.side == "primary" and other.alive is not False for other in link.participants()):
            raise PeerDied(f"queue {queue.name}: no consumer is left; end this producer, or start a consumer")
        queue._look_after_the_name()
        if not over:
            return None
        # Once more, after the buffers of dead consumers were recovered.
        made = attempt(link)
        if made is not None:
            return made
        raise Timeout(
            f"queue {queue.name}: all buffers are in use after {self._timeout} s; consume faster, or raise depth"
        )

    def pause(self) -> float:
        """How long to wait for a post before the next attempt."""
        return _shorter(_LOOK_AGAIN, None if self._deadline is None else max(self._deadline - self._now, 0.0))


def _shorter(limit: float, left: float | None) -> float:
    return limit if left is None else min(limit, left)


def _layout_of(spec: Mapping[str, tuple[Any, Any]]) -> BatchLayout:
    """Returns the layout of a spec, which is encoded on first use."""
    try:
        key = tuple(spec.items())
        known = _layouts.get(key)
    except TypeError:
        # Shapes or types may be lists, which are not hashable.
        return _encode(spec)
    if known is None:
        known = _encode(spec)
        if len(_layouts) >= _LAYOUTS_MAX:
            _layouts.clear()
        _layouts[key] = known
    return known


def _no_producers(count: int) -> Invalid:
    return Invalid(f"producers {count}: how many will finish, at least 1")


def _attach(kind: type[BatchQueue], name: str, directory: str) -> BatchQueue:
    """Unpickles a queue."""
    return kind.attach(name, directory=directory)
