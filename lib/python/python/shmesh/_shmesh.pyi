import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, final, overload

import numpy as np
from typing_extensions import Self, disjoint_base

__all__ = [
    "DEFAULT_DIR",
    "INLINE_MAX_BYTES",
    "REQUEST_INLINE_MAX_BYTES",
    "Batch",
    "BatchLayout",
    "DeviceSession",
    "GpuMemory",
    "GpuSession",
    "Link",
    "Loan",
    "Memory",
    "Message",
    "PendingReply",
    "Request",
    "__version__",
    "after_fork_in_child",
    "at_exit",
]

DEFAULT_DIR: Final[str]
INLINE_MAX_BYTES: Final[int]
REQUEST_INLINE_MAX_BYTES: Final[int]
__version__: Final[str]

def after_fork_in_child() -> None: ...
def at_exit() -> None: ...

@final
class Memory:
    """A piece of shared memory. Arrays over it keep it mapped."""

    @staticmethod
    def create(nbytes: int, *, readers_write: bool = False) -> Memory: ...
    @staticmethod
    def open(
        directory: str | os.PathLike[str], name: str, *, writable: bool = False, patience: float = 60.0
    ) -> tuple[Memory, bytes]: ...
    @staticmethod
    def fetch(address: str, token: bytes, *, writable: bool = False) -> Memory: ...
    @staticmethod
    def attach_sysv(*, shmid: int | None = None, key: int | None = None, writable: bool = False) -> Memory: ...
    def handle(self) -> tuple[str, bytes]:
        """What another process needs to fetch this memory, which is kept until one has."""
    def publish(
        self, directory: str | os.PathLike[str], name: str, meta: bytes, *, mode: int = 0o600
    ) -> None:
        """Gives it a name in the IPC directory."""
    def adopt(self, directory: str | os.PathLike[str], name: str, meta: bytes, *, mode: int = 0o600) -> bool:
        """Answers for a name as the process did that gave it, if nobody does any more. Whether it does so from now on."""
    def unlink(self) -> None:
        """Takes the name away. Who has the memory keeps it."""
    def view(self, offset: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """An array of bytes, which keeps the memory mapped."""
    def close(self) -> None:
        """Unmaps it now. `StillViewed` while an array over it lives."""
    def fileno(self) -> int:
        """Its descriptor, which stays its own."""
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def readers_write(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def identity(self) -> tuple[int, int]: ...
    @property
    def path(self) -> Path | None: ...

@final
class Loan:
    """A message being written. It cannot be sent while arrays over it live."""

    @property
    def msg(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def closed(self) -> bool: ...
    def send(self, *, msg_id: int = 0, cell_id: int = 0, notify: bool = True) -> None: ...
    def request(self, *, msg_id: int = 0, cell_id: int = 0) -> PendingReply:
        """Makes a request of it."""
    def drop(self) -> None:
        """Gives the buffers back unsent, when the last array over them is gone."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Message:
    """A received message, read-only. Its buffers are free when it and its arrays are gone."""

    @property
    def msg(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def msg_id(self) -> int: ...
    @property
    def cell_id(self) -> int: ...
    @property
    def inline(self) -> bool: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None: ...
    def __bytes__(self) -> bytes: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class PendingReply:
    """A request that was made: its replies come here. Dropped, it is given up."""

    def try_take(self) -> Message | None:
        """The next reply. Never waits."""
    def wait(self, timeout: float | None = None) -> Message | None:
        """Waits for the next reply, without the GIL. None: timed out."""
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    def drop(self) -> None:
        """Gives the request up."""

@final
class Request:
    """A request that was received. Dropped before its last reply, it is unanswered."""

    @property
    def msg(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def msg_id(self) -> int: ...
    @property
    def cell_id(self) -> int: ...
    @property
    def inline(self) -> bool: ...
    @property
    def client(self) -> int: ...
    @property
    def is_wanted(self) -> bool: ...
    @property
    def has_room(self) -> bool: ...
    def reply_inline(self, msg: bytes, *, msg_id: int = 0, cell_id: int = 0, more: bool = False) -> bool:
        """Replies with up to 112 bytes, without a buffer. False: the client does not wait any more."""
    def reply_loan(self, loan: Loan, *, msg_id: int = 0, cell_id: int = 0, more: bool = False) -> bool:
        """Replies with a loan of the same link. False: the client does not wait any more."""
    def wait_room(self, timeout: float | None = None) -> bool:
        """Waits until there is room for one more reply, without the GIL. False: timed out."""
    def drop(self) -> None:
        """Ends the request; without a last reply it is unanswered."""

@final
class BatchLayout:
    """Where the arrays of a batch lie, encoded once."""

    def __new__(
        cls, text: bytes, nbytes: int, places: Sequence[tuple[str, Sequence[int], np.dtype[Any], int]]
    ) -> Self: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...

@final
class Batch:
    """Arrays by name: one that is being written, from `BatchQueue.batch`, or one that was received."""

    @property
    def meta(self) -> Any:
        """What the producer sent with it."""
    def __getitem__(self, key: str, /) -> np.ndarray: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def keys(self) -> list[str]: ...
    def values(self) -> list[np.ndarray]: ...
    def items(self) -> list[tuple[str, np.ndarray]]: ...
    @overload
    def get(self, key: str) -> np.ndarray | None: ...
    @overload
    def get(self, key: str, default: Any) -> Any: ...
    def send(self) -> None: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@disjoint_base
class Link:
    """A participant of a link."""

    def __new__(
        cls,
        name: str,
        directory: str | os.PathLike[str],
        *,
        side: str = "secondary",
        config: str | None = None,
        timeout: float = 0.0,
        allow_second_primary: bool = False,
        fresh: bool = False,
    ) -> Self: ...
    @property
    def was_created(self) -> bool:
        """Whether this process made the link, rather than found one."""

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path: ...
    @property
    def side(self) -> Literal["primary", "secondary"]: ...
    @property
    def seat(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def has_message(self) -> bool: ...
    @property
    def queued(self) -> int: ...
    @property
    def ring_len(self) -> int: ...
    @property
    def readers(self) -> int:
        """Readers of a broadcast link; 0 on others."""
    @property
    def lost(self) -> int:
        """Messages that this reader of a broadcast link did not get, because the writer overtook it."""
    def pool(self, name: str) -> tuple[int, int] | None:
        """Bytes of a buffer of a pool, and how many there are; None if the link does not have it."""
    def loan(self, msg: int = 0, data: int | None = None, *, pool: str = "cpu_data") -> Loan:
        """Buffers that nobody else has, of so many bytes."""
    def send_inline(self, msg: bytes, *, msg_id: int = 0, cell_id: int = 0, notify: bool = True) -> None:
        """Sends up to 112 bytes inside of the ring."""
    def try_receive(self) -> Message | None:
        """The oldest message. Never waits."""
    def receive_batch(self, max: int = 64) -> list[Message]:
        """The oldest messages. Never waits."""
    def request_inline(self, msg: bytes, *, msg_id: int = 0, cell_id: int = 0) -> PendingReply:
        """Makes a request of up to 104 bytes, without a buffer."""
    def try_receive_request(self) -> Request | None:
        """The oldest request. Never waits."""
    def wait_request(self, timeout: float | None = None) -> bool:
        """Waits until a request can be taken, without the GIL. False: timed out."""
    @property
    def has_request(self) -> bool: ...
    def begin_batch(self, layout: BatchLayout, meta: Any, extra: bytes) -> Batch | None:
        """A batch to be written in place; None while all buffers are in use."""
    def put_batch(self, layout: BatchLayout, extra: bytes, sources: list[np.ndarray]) -> bool:
        """Sends a copy of arrays that have the types and shapes of the layout; False while all buffers are in use."""
    def try_receive_batch(
        self, decode: Callable[[str, bytes], BatchLayout], load: Callable[[str, bytes], Any]
    ) -> Batch | None:
        """The oldest message as a batch. Never waits."""
    def finish(self) -> None:
        """Batches that are being written are not sent any more."""
    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a message, without the GIL. False: the time is over."""
    def notify(self) -> None:
        """Wakes who waits at the other side."""
    def post(self) -> None:
        """TTI style: counts up, and wakes."""
    def wait_tti(self, timeout: float | None = None) -> bool:
        """TTI style: waits for a post, and takes it."""
    def try_send(self, msg: bytes) -> bool:
        """Sends a copy of what fits into a MSG buffer. False while all are in use."""
    def wait_any(self, timeout: float | None = None) -> bool:
        """Waits for a message or an event, without the GIL and without a seat of its own. False: the time is over."""
    def wait_room(self, pool: str | None = None, timeout: float | None = None) -> bool:
        """As `wait_any`, or for buffers of this pool, if the other side calls `notify_releases`. False: the time is over."""
    def has_room(self, pool: str | None = None) -> bool:
        """Whether there are buffers for a message, with a DATA part of this pool."""
    def notify_releases(self) -> None:
        """From now on the other side is notified of each message that is released."""
    def try_next_event(
        self,
    ) -> tuple[Literal["attached", "detached", "died", "evicted", "missed"], int, str, int, int] | None:
        """The next event of another participant. Never waits."""
    def wait_event(self, timeout: float | None = None) -> bool:
        """Waits until there may be an event of another participant, without the GIL. False: the time is over."""
    @property
    def has_event(self) -> bool: ...
    def fileno(self) -> int:
        """A descriptor that is readable when a message has come, or an event."""
    def take_signal(self) -> bool:
        """Takes one signal from the descriptor. Look for messages after it, not before."""
    def take_posts(self) -> None: ...
    def post_releases(self, after: int) -> None: ...
    def post_now(self) -> None: ...
    def become_host(self) -> bool: ...
    def recover(self) -> tuple[int, int, int]: ...
    def participants(self) -> Sequence[tuple[int, str, int, bool | None]]: ...
    def close(self, *, strict: bool = True) -> None:
        """Leaves the link. `StillViewed` while loans or messages live, unless not strict."""

@final
class DeviceSession:
    @staticmethod
    def connect(directory: str | os.PathLike[str], link: str) -> DeviceSession: ...
    def bare_tgid(self) -> int: ...
    def export_key(self, nbytes: int, *, flags: int = 0) -> tuple[bytes, Memory]: ...
    def set_import_pid(self, key: bytes, bare_tgids: list[int]) -> None: ...
    def import_by_key(self, key: bytes) -> Memory: ...
    def close(self, key: bytes, *, force: bool = False) -> None: ...
    def event(self) -> str | None: ...
    def fileno(self) -> int: ...
    def end(self) -> None: ...

@final
class GpuMemory:
    """Memory of a GPU. Arrays over it keep it."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def uuid(self) -> str: ...
    def read_into(self, offset: int, bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None: ...
    def write_from(self, offset: int, bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None: ...
    def capsule(self, shape: Sequence[int], code: int, bits: int, versioned: bool) -> object: ...

@final
class GpuSession:
    @staticmethod
    def connect(directory: str | os.PathLike[str], link: str) -> GpuSession: ...
    def bare_tgid(self) -> int: ...
    def export_key(
        self, nbytes: int, *, uuid: str | None = None, flags: int = 0
    ) -> tuple[bytes, GpuMemory]: ...
    def set_import_pid(self, key: bytes, bare_tgids: list[int]) -> None: ...
    def import_by_key(self, key: bytes) -> GpuMemory: ...
    def close(self, key: bytes, *, force: bool = False) -> None: ...
    def event(self) -> str | None: ...
    def fileno(self) -> int: ...
    def end(self) -> None: ...
