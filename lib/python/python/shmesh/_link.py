"""Links: messages between processes, in both directions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from . import _request, _shmesh
from ._array import ipc_directory
from ._errors import Closed, Invalid
from ._request import PendingReply, Request, Requests
from ._shmesh import INLINE_MAX_BYTES, Loan, Message

__all__ = ["Link", "Participant", "PeerEvent", "PeerEvents", "RecoveryStats"]

# How long a task waits before it checks whether the link was closed, for which there is no signal.
_LOOK_AGAIN = 0.1

_Taken = TypeVar("_Taken")

Side: TypeAlias = Literal["primary", "secondary"]


class Participant(NamedTuple):
    """A participant of a link."""

    seat: int
    side: str
    pid: int
    alive: bool | None
    """None: it is in another pid namespace, and cannot be checked from here."""


class PeerEvent(NamedTuple):
    """An event of another participant of a link. Each `Link` is a participant; one that waits may be two."""

    kind: Literal["attached", "detached", "died", "evicted", "missed", "lost"]
    """For ``missed`` and ``lost``, the member ``missed`` is the number of participants that came and went unseen (see
    `Link.participants`), or of messages that were lost between nodes (see `Link.lost`)."""
    seat: int
    side: str
    pid: int
    """Its process id in its own pid namespace."""
    missed: int = 0


class RecoveryStats(NamedTuple):
    """The result of a recovery."""

    participants: int
    messages: int
    data_buffers: int


class Link(_shmesh.Link):
    """A participant of a link. Any thread may use it. A forked child attaches its own."""

    @classmethod
    def create(
        cls,
        name: str,
        *,
        pools: Mapping[str, tuple[int, int]] | None = None,
        ring_len: int = 1024,
        ring_mode: Literal["mpmc", "spsc", "broadcast"] = "mpmc",
        slow: Literal["wait", "skip", "evict"] = "wait",
        history: int = 0,
        requests: int = 0,
        latency_sample: int = 0,
        receivers: Literal["many", "one"] = "many",
        backing: Literal["memfd", "named"] = "named",
        spin_us: int = 50,
        file_mode: int = 0o600,
        fresh: bool = False,
        config: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Link:
        """Creates a link as its primary, or adopts an existing one with the same configuration.

        ``was_created`` says which of the two it was. A link that is there keeps its messages; with ``fresh`` they are
        dropped, which is refused while any other participant is attached. Receivers of one side share a queue: each message
        goes to one of them. With ``receivers="one"`` a second process is refused on a side.

        With ``ring_mode="broadcast"`` each participant of the secondary side gets all that the primary side sends after it attached,
        and the last ``history`` messages of before. ``slow`` says what a slow reader does: the writer waits for it, or it skips
        messages and counts them in ``lost``, or it is evicted after a second.

        With ``requests`` each participant of the secondary side can have so many requests pending, which the primary side answers.

        With ``latency_sample``, a power of two, one message of so many is timed, and ``shmesh top`` and the sidecar's metrics show how long
        messages are on their way and held.

        ``pools`` says how many bytes a buffer has, and how many there are: ``{"cpu_msg": (8192, 1024)}``. Or all of it
        comes from ``config``, a YAML file, which may have other links, too.
        """
        path = None
        if config is not None:
            path = os.fsdecode(config)
            with open(path, encoding="utf-8") as file:
                text = file.read()
        else:
            sizes = {"cpu_msg": (8192, 1024), "cpu_data": (65_536, 256), **(pools or {})}
            broadcast = {"slow": slow, "history": history} if ring_mode == "broadcast" else {}
            link = {
                "name": name,
                "ring": {"len": ring_len, "mode": ring_mode, **broadcast},
                "pools": {
                    pool: {"buf_size_bytes": int(size), "pool_len": int(count)} for pool, (size, count) in sizes.items()
                },
                **({"requests": {"window": requests}} if requests else {}),
                **({"latency": {"sample": latency_sample}} if latency_sample else {}),
                "receivers": receivers,
                "backing": backing,
                "memory": {"file_mode": f"{file_mode:04o}"},
                "notify": {"enabled": True, "spin_us": spin_us},
            }
            text = json.dumps({"version": 1, "links": [link]})
        return cls(name, ipc_directory(directory), side="primary", config=text, config_path=path, fresh=fresh)

    @classmethod
    def attach(
        cls,
        name: str,
        side: Side = "secondary",
        *,
        timeout: float = 0.0,
        allow_second_primary: bool = False,
        directory: str | os.PathLike[str] | None = None,
    ) -> Link:
        """Attaches to a link that exists, or is created within ``timeout`` seconds.

        One process is a link's primary; ``allow_second_primary`` lets further ones onto that side, in ring mode mpmc.
        """
        return cls(name, ipc_directory(directory), side=side, timeout=timeout, allow_second_primary=allow_second_primary)

    def clone(self) -> Link:
        """Another participant on the same side, for example for the other role in ring mode `spsc`."""
        return type(self).attach(self.name, self.side, directory=self.directory)

    def send(
        self,
        msg: bytes | bytearray | memoryview = b"",
        data: Any = None,
        *,
        msg_id: int = 0,
        cell_id: int = 0,
        pool: str = "cpu_data",
    ) -> None:
        """Sends a copy of ``msg``, and of ``data`` (an array, or bytes). To write in place, `loan`."""
        if not isinstance(msg, bytes):
            msg = bytes(memoryview(msg))
        if data is None and len(msg) <= INLINE_MAX_BYTES:
            self.send_inline(msg, msg_id=msg_id, cell_id=cell_id)
            return
        loan = self._filled(msg, data, pool)
        try:
            loan.send(msg_id=msg_id, cell_id=cell_id)
        except BaseException:
            # A caller that keeps the exception would keep this frame.
            loan.drop()
            raise

    def _filled(self, msg: bytes, data: Any, pool: str) -> Loan:
        """Loans buffers with a copy of ``msg`` and ``data``."""
        source = None if data is None else _bytes_of(data)
        loan = self.loan(len(msg), None if source is None else source.size, pool=pool)
        try:
            loan.msg[:] = np.frombuffer(msg, np.uint8)
            if source is not None:
                loan.data[:] = source
        except BaseException:
            loan.drop()
            raise
        return loan

    def send_batch(self, loans: Sequence[Loan]) -> int:
        """Sends loans in order, and wakes the other side once. Stops at the first that cannot be sent. Returns the number sent."""
        sent = 0
        try:
            for loan in loans:
                loan.send(notify=False)
                sent += 1
        except Exception:
            if sent == 0:
                raise
        self.notify()
        return sent

    def receive(self, timeout: float | None = 0.0) -> Message | None:
        """Receives the oldest message; None if there is none within ``timeout`` seconds. A timeout of None waits without
        limit.
        """
        message = self.try_receive()
        if message is not None or timeout == 0.0:
            return message
        deadline = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while self.wait(left):
            message = self.try_receive()
            if message is not None:
                return message
            # Another participant of this side was faster, and may be again until the timeout.
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    break
        return None

    def request(
        self,
        msg: bytes | bytearray | memoryview | Loan = b"",
        data: Any = None,
        *,
        msg_id: int = 0,
        cell_id: int = 0,
        pool: str = "cpu_data",
    ) -> PendingReply:
        """Asks the servers of the primary side, one of which answers. Only on the secondary side of a link with ``requests``.

        Sends a copy of ``msg`` and ``data``, or what is in a loan of this link. `Exhausted` with as many requests pending as the link
        allows. A request waits for a server until it is dropped, also while none is attached.
        """
        return _request.make(self, msg, data, msg_id, cell_id, pool)

    def receive_request(self, timeout: float | None = 0.0) -> Request | None:
        """The oldest request; None if none comes within ``timeout`` seconds. None waits for ever. Only on the primary side."""
        request = self._wait_for(self.try_receive_request, self.wait_request, timeout)
        return None if request is None else Request(self, request)

    async def receive_request_async(self) -> Request:
        """Waits for the oldest request."""
        return Request(self, await self._wait_for_async(self.try_receive_request, lambda: self.has_request))

    def requests(self) -> Requests:
        """An iterator of requests, for ``for`` and ``async for``."""
        return Requests(self)

    def recover(self) -> RecoveryStats:
        """Recovers dead participants."""
        return RecoveryStats(*super().recover())

    def participants(self) -> list[Participant]:
        """All participants of the link."""
        return [Participant(*participant) for participant in super().participants()]

    def next_event(self, timeout: float | None = 0.0) -> PeerEvent | None:
        """The next event of another participant; None if there is none within ``timeout`` seconds. None waits for ever.

        Participants that are attached already come first, as ``attached``. Each is reported once as that, and once as gone.
        """
        event = self._wait_for(self.try_next_event, self.wait_event, timeout)
        return None if event is None else PeerEvent(*event)

    async def next_event_async(self) -> PeerEvent:
        """Waits for the next event of another participant."""
        return PeerEvent(*await self._wait_for_async(self.try_next_event, lambda: self.has_event))

    def events(self) -> PeerEvents:
        """An iterator of events of other participants, for ``for`` and ``async for``."""
        return PeerEvents(self)

    def __iter__(self) -> Iterator[Message]:
        """Yields messages until the link is closed."""
        while True:
            try:
                message = self.receive(None)
            except Closed:
                return
            if message is not None:
                yield message
            del message

    async def receive_async(self) -> Message:
        """Waits for the oldest message."""
        return await self._wait_for_async(self.try_receive, lambda: self.has_message)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yields messages until the link is closed."""
        while True:
            try:
                message = await self.receive_async()
            except Closed:
                return
            yield message
            del message

    def _wait_for(
        self, take: Callable[[], _Taken | None], wait: Callable[[float | None], Any], timeout: float | None
    ) -> _Taken | None:
        """What ``take`` returns first, or None after ``timeout`` seconds. Another thread or process may take what was waited for."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            taken = take()
            if taken is not None or (left is not None and left <= 0.0):
                return taken
            wait(left)
            if deadline is not None:
                left = max(deadline - time.monotonic(), 0.0)

    async def _wait_for_async(self, take: Callable[[], _Taken | None], is_ready: Callable[[], bool]) -> _Taken:
        """As `_wait_for`, without a limit. A task that is cancelled meanwhile loses nothing."""
        while True:
            taken = take()
            if taken is not None:
                return taken
            await self._readable(is_ready)

    async def _readable(self, is_ready: Callable[[], bool], limit: float = _LOOK_AGAIN) -> None:
        """Waits for a signal of the link, for at most ``limit`` seconds, unless something is ready."""
        import asyncio  # here: it takes a third of the time to import this package

        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        # An event loop has one reader per descriptor, and other tasks may wait as well.
        descriptor = os.dup(self.fileno())

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(descriptor, wake)
        again = loop.call_later(limit, wake)
        try:
            # What arrived before the descriptor existed did not signal.
            if not is_ready():
                await readable
        finally:
            again.cancel()
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self.take_signal()

    def __reduce__(self) -> Any:
        return _attach, (type(self), self.name, self.side, os.fspath(self.directory))

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Detaches from the link. Messages that are still alive keep its memory mapped."""
        self.close(strict=False)

    def __repr__(self) -> str:
        return f"<shmesh.Link {self.name} {self.side}{' closed' if self.closed else ''}>"


class PeerEvents:
    """Events of the other participants of a link, until it is closed."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __iter__(self) -> Iterator[PeerEvent]:
        while True:
            try:
                event = self._link.next_event(None)
            except Closed:
                return
            if event is not None:
                yield event

    async def __aiter__(self) -> AsyncIterator[PeerEvent]:
        while True:
            try:
                yield await self._link.next_event_async()
            except Closed:
                return


def _attach(kind: type[Link], name: str, side: Side, directory: str) -> Link:
    """Unpickles a link, as a participant of its own."""
    return kind.attach(name, side, directory=directory)


def _bytes_of(data: Any) -> np.ndarray:
    array = np.asarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if array.dtype.hasobject:
        raise Invalid(f"data of dtype {array.dtype} holds Python objects; pickle them, or use a fixed-size type")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
