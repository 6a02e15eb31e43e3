"""Requests and replies: a client sends a request, and one of the servers replies to that client only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _shmesh
from ._errors import Closed, Exhausted, RepliesFull, Timeout
from ._shmesh import INLINE_MAX_BYTES, REQUEST_INLINE_MAX_BYTES, Loan, Message

if TYPE_CHECKING:
    from ._link import Link

__all__ = ["PendingReply", "Request", "Requests"]

_LOOK_AGAIN = 0.1
"""How often, in seconds, a task looks again that a signal should wake."""
_SHARE_CHECK = 0.01
"""How often a task looks whether the client has taken its share of replies, which may come without a signal."""


class PendingReply:
    """A request that was sent by `Link.request`, and receives the replies. Dropping it gives the request up."""

    def __init__(self, link: Link, pending: _shmesh.PendingReply) -> None:
        self._link = link
        self._pending = pending

    def try_take(self) -> Message | None:
        """The next reply; None when there is none yet. Never waits.

        `PeerDied` when the server died, and `Unanswered` when it dropped the request; replies that it sent before come first.
        """
        return self._pending.try_take()

    def wait(self, timeout: float | None = None) -> Message | None:
        """The next reply; None if there is none within ``timeout`` seconds. None waits for ever, also for a server to attach."""
        return self._pending.wait(timeout)

    async def wait_async(self) -> Message:
        """Waits for the next reply. A task that is cancelled meanwhile loses no reply."""
        return await self._link._wait_for_async(self._pending.try_take, lambda: self._pending.is_ready)

    @property
    def is_ready(self) -> bool:
        """Whether `try_take` has a reply or an exception."""
        return self._pending.is_ready

    @property
    def is_over(self) -> bool:
        """Whether the last reply was taken, or the request has failed. Nothing more arrives then."""
        return self._pending.is_over

    def drop(self) -> None:
        """Gives the request up: replies that wait are freed, and later ones are refused."""
        self._pending.drop()

    def __await__(self) -> Generator[Any, None, Message]:
        return self.wait_async().__await__()

    def __iter__(self) -> Iterator[Message]:
        """Yields the replies, until the last one."""
        while not self.is_over:
            reply = self.wait()
            if reply is not None:
                yield reply
            del reply

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yields the replies, until the last one."""
        while not self.is_over:
            reply = await self.wait_async()
            yield reply
            del reply

    def __enter__(self) -> PendingReply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<shmesh.PendingReply {self._link.name}{' over' if self.is_over else ''}>"


class Request:
    """A request from `Link.receive_request`. If it is dropped before its last reply, it is unanswered."""

    def __init__(self, link: Link, request: _shmesh.Request) -> None:
        self._link = link
        self._request = request

    @property
    def msg(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The MSG part, as a read-only array."""
        return self._request.msg

    @property
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The DATA part, as a read-only array; empty without one."""
        return self._request.data

    @property
    def msg_id(self) -> int:
        return self._request.msg_id

    @property
    def cell_id(self) -> int:
        return self._request.cell_id

    @property
    def client(self) -> int:
        """The seat of the client, as in `Link.participants`."""
        return self._request.client

    @property
    def is_wanted(self) -> bool:
        """Whether the client still waits. Once false, it stays so: the client gave the request up, or ended."""
        return self._request.is_wanted

    def reply(
        self,
        msg: bytes | bytearray | memoryview | Loan = b"",
        data: Any = None,
        *,
        more: bool = False,
        msg_id: int = 0,
        cell_id: int = 0,
        pool: str = "cpu_data",
        timeout: float | None = None,
    ) -> bool:
        """Sends the last, or only, reply; with ``more``, one that others follow. False: the client does not wait any more.

        Sends a copy of ``msg`` and ``data``, or what is in a loan of the link. At most seven replies wait for a client, and those
        to all of its requests take no more than its share of a pool; then this waits until it has taken some, and raises
        `Timeout` after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with _Unsent(self._link, msg, data, pool) as unsent:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._request.wait_room(left):
                    break
                try:
                    return unsent.send(self._request, msg_id, cell_id, more)
                except RepliesFull:
                    if left == 0:
                        break
        raise Timeout(f"link {self._link.name}: the client has not taken a reply for {timeout} s")

    async def reply_async(
        self,
        msg: bytes | bytearray | memoryview | Loan = b"",
        data: Any = None,
        *,
        more: bool = False,
        msg_id: int = 0,
        cell_id: int = 0,
        pool: str = "cpu_data",
    ) -> bool:
        """As `reply`, for ``asyncio``."""
        limit = _LOOK_AGAIN
        with _Unsent(self._link, msg, data, pool) as unsent:
            while True:
                while not self._request.has_room:
                    await self._link._readable(lambda: self._request.has_room, limit)
                try:
                    return unsent.send(self._request, msg_id, cell_id, more)
                except RepliesFull:
                    # A client that takes the last reply to another request does not signal.
                    limit = _SHARE_CHECK

    def drop(self) -> None:
        """Ends the request; without a last reply it is unanswered. Its buffers are released when its arrays are gone."""
        self._request.drop()

    def __bytes__(self) -> bytes:
        """A copy of the MSG part."""
        return self._request.msg.tobytes()

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        return f"<shmesh.Request {self._link.name} client {self.client}>"


class _Unsent:
    """A reply, with the loan that it is in once one was needed."""

    def __init__(self, link: Link, msg: bytes | bytearray | memoryview | Loan, data: Any, pool: str) -> None:
        self._link, self._data, self._pool = link, data, pool
        self._is_loan = isinstance(msg, Loan)
        self._loan = msg if isinstance(msg, Loan) else None
        self._msg = b"" if isinstance(msg, Loan) else bytes(memoryview(msg))

    def send(self, request: _shmesh.Request, msg_id: int, cell_id: int, more: bool) -> bool:
        if self._loan is None and self._data is None and len(self._msg) <= INLINE_MAX_BYTES:
            try:
                return request.reply_inline(self._msg, msg_id=msg_id, cell_id=cell_id, more=more)
            except RepliesFull:
                raise
            except Exhausted:
                # No inline cell is free; a buffer may be.
                pass
        if self._loan is None:
            self._loan = self._link._filled(self._msg, self._data, self._pool)
        return request.reply_loan(self._loan, msg_id=msg_id, cell_id=cell_id, more=more)

    def __enter__(self) -> _Unsent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A loan that was not sent. A caller that keeps the exception would keep this object.
        if self._loan is not None and not self._is_loan:
            self._loan.drop()


class Requests:
    """The iterator of `Link.requests`: requests of a link, until it is closed."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __iter__(self) -> Iterator[Request]:
        while True:
            try:
                request = self._link.receive_request(None)
            except Closed:
                return
            if request is not None:
                yield request
            del request

    async def __aiter__(self) -> AsyncIterator[Request]:
        while True:
            try:
                request = await self._link.receive_request_async()
            except Closed:
                return
            yield request
            del request


def make(
    link: Link, msg: bytes | bytearray | memoryview | Loan, data: Any, msg_id: int, cell_id: int, pool: str
) -> PendingReply:
    """Sends a request."""
    if isinstance(msg, Loan):
        return PendingReply(link, msg.request(msg_id=msg_id, cell_id=cell_id))
    msg = bytes(memoryview(msg))
    if data is None and len(msg) <= REQUEST_INLINE_MAX_BYTES:
        return PendingReply(link, link.request_inline(msg, msg_id=msg_id, cell_id=cell_id))
    loan = link._filled(msg, data, pool)
    try:
        return PendingReply(link, loan.request(msg_id=msg_id, cell_id=cell_id))
    finally:
        # A loan that was not sent as a request.
        loan.drop()
