"""Objects from one writer to many readers, each of which gets every object.

It is a broadcast link. Readers send one message the other way when they attach: which rank they are.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
import time
from types import TracebackType
from typing import Any

from . import _array
from ._errors import Denied, Error, Exhausted, Invalid, NotFound, PeerDied, Timeout, TooLong
from ._link import Link, PeerEvent
from ._objects import Parts, read
from ._shmesh import Message

__all__ = ["MessageQueue"]

_HELLO = struct.Struct("<iII")
_MSG_BYTES = 16_384
# Copying a smaller array into the pickle costs less than placing it into a second buffer.
_BUFFER_MIN = 12_288
# The pause between two checks for a writer whose files already exist.
_PAUSE = 1e-3
# How long a task waits before it checks whether the queue was closed.
_LOOK_AGAIN = 1.0


class MessageQueue:
    """Objects from one writer to up to 62 readers. Each reader gets every object that is sent after it has attached, in
    order.

    The process that creates it is the writer. Others get a handle by pickling the queue, or `attach` to its name, as a reader with a rank.
    An object is pickled; the memory of its arrays goes beside the pickle into shared memory.
    """

    def __init__(
        self,
        nbytes: int = 1 << 20,
        depth: int = 10,
        *,
        readers: int = 0,
        overflow: tuple[int, int] | None = None,
        name: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        spin_us: int | None = None,
        mode: int = 0o600,
    ) -> None:
        """A queue of ``depth`` objects, whose arrays, or else whose pickle, have up to ``nbytes`` bytes together.

        ``readers`` is how many the first `enqueue` waits for; others may attach later. ``overflow`` is the size and number of further
        buffers, for objects that are larger; an object that fits nowhere is a `TooLong`. ``spin_us`` is how long a process looks before
        it sleeps: 50, or 0 if there are not more processors than readers, because spinning then takes one from the others.
        """
        if depth < 2:
            raise Invalid(f"depth {depth}: one object is read while another is written, so at least 2")
        if spin_us is None:
            spin_us = 50 if len(os.sched_getaffinity(0)) > max(readers, 1) else 0
        if nbytes < 1:
            raise Invalid(f"nbytes {nbytes}: the bytes of an object, at least 1")
        self._prepare(name or f"objects-{os.urandom(8).hex()}", _array.ipc_directory(directory), None)
        pools = {"cpu_msg": (_MSG_BYTES, depth), "cpu_data": (nbytes, depth)}
        if overflow is not None:
            pools["cpu_large"] = overflow
        self._awaited = readers
        self._pools = [("cpu_data", nbytes)] if overflow is None else [("cpu_data", nbytes), ("cpu_large", overflow[0])]
        self._link = Link.create(
            self.name,
            pools=pools,
            # More slots than buffers, so that only buffers can run out.
            ring_len=2 * depth,
            ring_mode="broadcast",
            slow="wait",
            # Gone with the last process, however it ends.
            backing="memfd",
            spin_us=spin_us,
            file_mode=mode,
            directory=self.directory,
        )

    def _prepare(self, name: str, directory: str, rank: int | None) -> None:
        self.name = name
        self.directory = directory
        self.rank = rank
        """The rank of this reader; None for the writer."""
        self._awaited = 0
        # Of the writer: participants of the secondary side, by seat and process, the ranks of those that are readers, and readers that
        # died. By both, because a seat may have the next reader already.
        self._readers: set[tuple[int, int]] = set()
        self._ranks: dict[tuple[int, int], int] = {}
        self._died: list[tuple[PeerEvent, int | None]] = []
        # A signal handler may close the queue meanwhile.
        self._looking = threading.RLock()
        # Of a reader: the participants of the primary side by seat, and the process of the last one that died.
        self._writers: dict[int, int] = {}
        self._dead_writer: int | None = None
        self._allow_pickle = False
        self._pickler: type[pickle.Pickler] | None = None
        self._loads: Any = pickle.loads

    @classmethod
    def attach(
        cls,
        name: str,
        rank: int = 0,
        *,
        timeout: float = 0.0,
        allow_pickle: bool | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> MessageQueue:
        """A reader of the queue of this name, which another process made, or makes within ``timeout`` seconds.

        Unpickling runs code that the writer chooses: unless ``allow_pickle``, objects of more than plain values and numpy arrays of them
        are accepted only if the files of the queue belong to this user and no other user may write them.
        """
        queue = cls.__new__(cls)
        queue._prepare(name, _array.ipc_directory(directory), rank)
        end = time.monotonic() + timeout
        queue._link = Link.attach(name, timeout=timeout, directory=queue.directory)
        # The files of the queue exist a moment before the writer has attached.
        while not queue._find_writers():
            if time.monotonic() >= end:
                queue._link.close()
                raise NotFound(f"queue {name}: no writer is there after {timeout} s; start it, or pass a longer timeout")
            time.sleep(_PAUSE)
        queue._allow_pickle = queue._is_own() if allow_pickle is None else allow_pickle
        queue._loads = pickle.loads if queue._allow_pickle else _refuse
        queue._link.notify_releases()
        queue._link.send_inline(_HELLO.pack(rank, queue._link.seat, os.getpid()))
        return queue

    def _find_writers(self) -> bool:
        """Learns who is on the primary side; False if none lives there."""
        there = [other for other in self._link.participants() if other.side == "primary"]
        self._writers = {other.seat: other.pid for other in there if other.alive is not False}
        self._dead_writer = next((other.pid for other in there if other.alive is False), None)
        return bool(self._writers)

    def _is_own(self) -> bool:
        """Whether only processes of this user can have written the queue: its lock file, which is open, says who may attach."""
        uid, mode = self._link.lock_file_owner()
        return uid == os.geteuid() and not mode & 0o022

    def __reduce__(self) -> Any:
        raise TypeError(f"queue {self.name}: pass its name, and let each reader `attach` with its rank")

    def enqueue(self, value: Any, timeout: float | None = None) -> None:
        """Sends an object to all readers. Sleeps while a reader has not read the oldest of ``depth``, and at first until all readers are there.

        `PeerDied` says once of each reader that it died; its ``rank`` is which. The object was not sent then: call it again to go on
        with the others.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._is_of_the_writer()
        if self._awaited:
            self.wait_until_ready(timeout)
        parts = Parts.of(value, _MSG_BYTES, self._pickler, _BUFFER_MIN)
        pool = self._pool_of(parts)
        while not self._sent(parts, pool):
            self._link.wait_room(pool, self._left(deadline, timeout))

    async def enqueue_async(self, value: Any, timeout: float | None = None) -> None:
        """As `enqueue`, in a task of ``asyncio``. A task that is cancelled while it waits has sent nothing."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._is_of_the_writer()
        link = self._link
        while self._lacks_readers():
            left = self._left_for_readers(deadline, timeout)
            await link._readable(lambda: link.has_message or link.has_event, _shorter(left))
        parts = Parts.of(value, _MSG_BYTES, self._pickler, _BUFFER_MIN)
        pool = self._pool_of(parts)
        while not self._sent(parts, pool):
            left = self._left(deadline, timeout)
            await link._readable(lambda: link.has_message or link.has_event or link.has_room(pool), _shorter(left))

    def _is_of_the_writer(self) -> None:
        if self.rank is not None:
            raise Invalid(f"queue {self.name}: readers cannot enqueue; its writer is the process that made it")

    def _sent(self, parts: Parts, pool: str | None) -> bool:
        """Whether there were buffers for an object. It is sent then."""
        self._look_at_peers()
        self._raise_if_died()
        if pool is None:
            return self._link.try_send(parts.head)
        try:
            loan = self._link.loan(len(parts.head), parts.nbytes, pool=pool)
        except Exhausted:
            return False
        parts.send(loan)
        return True

    def _left(self, deadline: float | None, timeout: float | None) -> float | None:
        """How long to wait for room."""
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0.0:
            raise Timeout(
                f"queue {self.name}: a reader has not read the oldest object after {timeout} s; read faster, or raise depth"
            )
        return left

    def _pool_of(self, parts: Parts) -> str | None:
        """The pool whose buffers an object fits into; None if it needs no DATA part."""
        if not parts.nbytes:
            return None
        for pool, size in self._pools:
            if parts.nbytes <= size:
                return pool
        raise TooLong(
            f"queue {self.name}: this object has {parts.nbytes} bytes, its buffers {self._pools[-1][1]}; make the queue with a larger "
            "nbytes, or with overflow"
        )

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits for the number of readers that the queue was created for. A reader is ready as soon as it has attached."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._lacks_readers():
            self._link.wait_any(self._left_for_readers(deadline, timeout))

    def _lacks_readers(self) -> bool:
        if self.rank is None and self._awaited:
            self._look_at_peers()
            self._raise_if_died()
            if len(self._ranks) < self._awaited:
                return True
        self._awaited = 0
        return False

    def _left_for_readers(self, deadline: float | None, timeout: float | None) -> float | None:
        """How long to wait for readers."""
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0.0:
            raise Timeout(f"queue {self.name}: {len(self._ranks)} of {self._awaited} readers have attached after {timeout} s")
        return left

    def _look_at_peers(self) -> None:
        """Processes what readers sent when they attached, and events of readers."""
        if self._link.has_message or self._link.has_event:
            with self._looking:
                self._process_peers()

    def _process_peers(self) -> None:
        link = self._link
        ranks = self._ranks
        while (message := link.try_receive()) is not None:
            hello = bytes(message)
            if len(hello) == _HELLO.size:
                rank, seat, pid = _HELLO.unpack(hello)
                ranks[seat, pid] = rank
        # After the messages: these events include that their senders attached, and the ends of the previous readers in the seats.
        missed = False
        while link.has_event:
            event = link.next_event()
            if event is None:
                continue
            reader = (event.seat, event.pid)
            if event.kind == "missed":
                missed = True
            elif event.side == "secondary" and event.kind == "attached":
                self._readers.add(reader)
            elif event.side == "secondary":
                self._readers.discard(reader)
                if event.kind != "detached":
                    self._died.append((event, ranks.get(reader)))
        if missed:
            self._readers = {(other.seat, other.pid) for other in link.participants() if other.side == "secondary"}
        self._ranks = {reader: rank for reader, rank in ranks.items() if reader in self._readers}

    def _raise_if_died(self) -> None:
        if not self._died:
            return
        event, rank = self._died.pop(0)
        raise _peer_died(
            f"queue {self.name}: reader {'of unknown rank' if rank is None else rank} (process {event.pid}) died; call enqueue again to "
            "go on with the others",
            rank,
        )

    def dequeue(self, timeout: float | None = None, *, copy: bool = True) -> Any:
        """Returns the oldest object that this reader has not read. Raises `EOFError` if the writer closed the queue, and
        `PeerDied` if it died.

        Without ``copy`` the arrays of the object are read-only memory of the queue: its writer waits for this reader until they are gone.
        """
        link = self._reading()
        message = link.try_receive()
        if message is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            while message is None:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._is_over(left, timeout):
                    link.wait_any(left)
                message = link.try_receive()
        return self._object(message, copy)

    async def dequeue_async(self, timeout: float | None = None, *, copy: bool = True) -> Any:
        """As `dequeue`, in a task of ``asyncio``. A task that is cancelled has taken no object."""
        link = self._reading()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = link.try_receive()
            if message is not None:
                return self._object(message, copy)
            left = None if deadline is None else deadline - time.monotonic()
            if not self._is_over(left, timeout):
                await link._readable(lambda: link.has_message or link.has_event, _shorter(left))

    def fileno(self) -> int:
        """A descriptor for ``selectors`` and ``epoll``, readable when an object, room or an event of another process may have come.

        Register it, and call `dequeue` or `enqueue` with ``timeout=0`` until it is a `Timeout`; then again each time that it is readable,
        after `take_signal`.
        """
        return self._link.fileno()

    def take_signal(self) -> None:
        """Takes the signals of `fileno`, which is readable as long as there are any."""
        while self._link.take_signal():
            pass

    def _reading(self) -> Link:
        if self.rank is None:
            raise Invalid(f"queue {self.name}: its writer cannot dequeue; readers `attach` to its name")
        return self._link

    def _object(self, message: Message, copy: bool) -> Any:
        try:
            return read(message, copy=copy, what=f"queue {self.name}", loads=self._loads)
        finally:
            # Arrays over the message keep its buffers.
            message.release()

    def _is_over(self, left: float | None, timeout: float | None) -> bool:
        """Raises on a timeout, or if the writer has died or closed and everything that it sent was read. True: there is a message."""
        link = self._link
        while link.has_event:
            event = link.next_event()
            if event is not None:
                self._learn_of_the_writer(event)
        if link.has_message:
            # Also a message that was sent before the event.
            return True
        if not self._writers:
            if self._dead_writer is not None:
                raise _peer_died(f"queue {self.name}: its writer (process {self._dead_writer}) died", -1)
            raise EOFError(f"queue {self.name}: its writer has closed it")
        if left is not None and left <= 0.0:
            raise Timeout(f"queue {self.name}: no object came within {timeout} s")
        return False

    def _learn_of_the_writer(self, event: PeerEvent) -> None:
        if event.kind == "missed":
            self._find_writers()
        elif event.side == "primary":
            if event.kind == "attached":
                self._writers[event.seat] = event.pid
                self._dead_writer = None
            else:
                self._writers.pop(event.seat, None)
                self._dead_writer = None if event.kind == "detached" else event.pid
                # That process may have been the one that hands the memory to newcomers, which get it from here then; unless this
                # one may not, in another user's directory.
                with contextlib.suppress(Error):
                    self._link.become_host()

    def close(self) -> None:
        """Detaches from the queue. Arrays of objects that were not copied keep their memory."""
        if self.rank is None and not self._link.closed:
            # A link with queued messages is not removed.
            self._look_at_peers()
        self._link.close(strict=False)

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<shmesh.MessageQueue {self.name} {'writer' if self.rank is None else f'reader {self.rank}'}>"


def _shorter(left: float | None) -> float:
    return _LOOK_AGAIN if left is None else min(left, _LOOK_AGAIN)


def _peer_died(text: str, rank: int | None) -> PeerDied:
    error = PeerDied(text)
    error.rank = rank
    return error


def _refuse(_pickled: Any, *, buffers: Any) -> Any:
    raise Denied(
        "the object is of more than dicts, lists, tuples, sets, text, bytes, numbers, and numpy numbers and arrays of numbers, text or times, "
        "or has other keys than text, bytes and up to 4,096 numbers, and the writer of this queue is not trusted: attach with allow_pickle=True if it may "
        "run any code in this process"
    )
