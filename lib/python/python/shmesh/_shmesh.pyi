import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, final, overload

import numpy as np
from typing_extensions import Self, disjoint_base

__all__ = [
    "BUFFERS_MAX",
    "DEFAULT_DIR",
    "INLINE_MAX_BYTES",
    "PLAIN_TYPES",
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
    "create_leased",
    "decode",
    "encode",
    "object_parts",
    "object_places",
    "open_leased",
    "remove_unused",
]

BUFFERS_MAX: Final[int]
DEFAULT_DIR: Final[str]
INLINE_MAX_BYTES: Final[int]
PLAIN_TYPES: Final[str]
REQUEST_INLINE_MAX_BYTES: Final[int]
__version__: Final[str]

def after_fork_in_child() -> None: ...
def at_exit() -> None: ...

@final
class Memory:
    """A mapped piece of shared memory. Arrays over it keep it mapped."""

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
        """The address and token by which another process can fetch this memory, which is kept until then."""
    def publish(
        self, directory: str | os.PathLike[str], name: str, meta: bytes, *, mode: int = 0o600
    ) -> None:
        """Gives the memory a name in the IPC directory."""
    def adopt(self, directory: str | os.PathLike[str], name: str, meta: bytes, *, mode: int = 0o600) -> bool:
        """Answers for a name if the process that published it has ended. Returns whether this process answers from now
        on.
        """
    def unlink(self) -> None:
        """Removes the name. Processes that have the memory keep it."""
    def view(self, offset: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """An array of bytes, which keeps the memory mapped."""
    def close(self) -> None:
        """Unmaps the memory immediately. Raises `StillViewed` while an array over it is alive."""
    def fileno(self) -> int:
        """The descriptor of the memory, which remains its owner."""
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
    """A message being written. It cannot be sent while arrays over it are alive."""

    @property
    def msg(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]: ...
    @property
    def closed(self) -> bool: ...
    def send(self, *, msg_id: int = 0, cell_id: int = 0, notify: bool = True) -> None: ...
    def request(self, *, msg_id: int = 0, cell_id: int = 0) -> PendingReply:
        """Sends the loan as a request."""
    def drop(self) -> None:
        """Releases the buffers without sending, when the last array over them is gone."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class Message:
    """A received, read-only message. Its buffers are released when it and its arrays are gone."""

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
    """A request that was sent, which receives the replies. Dropping it gives the request up."""

    def try_take(self) -> Message | None:
        """Takes the next reply, or None. Never waits."""
    def wait(self, timeout: float | None = None) -> Message | None:
        """Waits for the next reply, without the GIL. Returns None if it timed out."""
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    def drop(self) -> None:
        """Gives the request up."""

@final
class Request:
    """A received request. If it is dropped before its last reply, it is unanswered."""

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
        """Replies with up to 112 bytes, without a buffer. Returns False if the client does not wait any more."""
    def reply_loan(self, loan: Loan, *, msg_id: int = 0, cell_id: int = 0, more: bool = False) -> bool:
        """Replies with a loan of the same link. Returns False if the client does not wait any more."""
    def wait_room(self, timeout: float | None = None) -> bool:
        """Waits until there is room for one more reply, without the GIL. Returns False if it timed out."""
    def drop(self) -> None:
        """Ends the request; without a last reply it is unanswered."""

@final
class BatchLayout:
    """The layout of a batch, encoded once."""

    def __new__(
        cls, text: bytes, nbytes: int, places: Sequence[tuple[str, Sequence[int], np.dtype[Any], int]]
    ) -> Self: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...

@final
class Batch:
    """Arrays by name: a batch being written, from `BatchQueue.batch`, or a received one."""

    @property
    def meta(self) -> Any:
        """The metadata that the producer sent with it."""
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
        config_path: str | None = None,
        timeout: float = 0.0,
        allow_second_primary: bool = False,
        fresh: bool = False,
    ) -> Self: ...
    @property
    def was_created(self) -> bool:
        """Whether this process created the link."""

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
        """Number of readers of a broadcast link; 0 on other links."""
    def wait_for_readers(self, count: int, timeout: float | None = None) -> bool:
        """Waits until a broadcast link has this many readers, without the GIL. Returns False if it timed out."""
    def report_lost(self, messages: int) -> None:
        """Reports to the other side's receivers that so many messages for them were lost before they reached the link.

        For programs that forward messages of others. Receivers have them in `lost` and get a ``lost`` event."""
    @property
    def lost(self) -> int:
        """Number of messages that this handle did not get: the writer of a broadcast link overtook it, or they were lost between nodes."""
    def pool(self, name: str) -> tuple[int, int] | None:
        """Size and number of the buffers of a pool; None if the link does not have it."""
    def loan(self, msg: int = 0, data: int | None = None, *, pool: str = "cpu_data") -> Loan:
        """Loans buffers for a message of these sizes."""
    def send_inline(self, msg: bytes, *, msg_id: int = 0, cell_id: int = 0, notify: bool = True) -> None:
        """Sends up to 112 bytes in the ring."""
    def try_receive(self) -> Message | None:
        """Receives the oldest message, or None. Never waits."""
    def receive_batch(self, max: int = 64) -> list[Message]:
        """Receives the oldest messages. Never waits."""
    def request_inline(self, msg: bytes, *, msg_id: int = 0, cell_id: int = 0) -> PendingReply:
        """Sends a request of up to 104 bytes, without a buffer."""
    def try_receive_request(self) -> Request | None:
        """Receives the oldest request, or None. Never waits."""
    def wait_request(self, timeout: float | None = None) -> bool:
        """Waits until a request can be received, without the GIL. Returns False if it timed out."""
    @property
    def has_request(self) -> bool: ...
    def begin_batch(self, layout: BatchLayout, meta: Any, extra: bytes) -> Batch | None:
        """Starts a batch to be written in place. Returns None while all buffers are in use."""
    def put_batch(self, layout: BatchLayout, extra: bytes, sources: list[np.ndarray]) -> bool:
        """Sends a copy of arrays with the types and shapes of the layout. Returns False while all buffers are in use."""
    def try_receive_batch(
        self, decode: Callable[[str, bytes], BatchLayout], load: Callable[[str, bytes], Any]
    ) -> Batch | None:
        """Receives the oldest message as a batch, or None. Never waits."""
    def finish(self) -> None:
        """From now on, batches can no longer be sent."""
    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a message, without the GIL. Returns False if it timed out."""
    def notify(self) -> None:
        """Wakes the participants that wait on the other side."""
    def post(self) -> None:
        """Posts to the other side, and wakes it (TTI style)."""
    def wait_tti(self, timeout: float | None = None) -> bool:
        """Waits for a post and consumes it (TTI style)."""
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
    ) -> tuple[Literal["attached", "detached", "died", "evicted", "missed", "lost"], int, str, int, int] | None:
        """Returns the next event of another participant, or None. Never waits."""
    def wait_event(self, timeout: float | None = None) -> bool:
        """Waits until there may be an event of another participant, without the GIL. Returns False if it timed out."""
    @property
    def has_event(self) -> bool: ...
    def fileno(self) -> int:
        """A descriptor that is readable after a message or event has arrived."""
    def take_signal(self) -> bool:
        """Consumes one signal of the descriptor. Receive after this, not before."""
    def take_posts(self) -> None: ...
    def post_releases(self, after: int) -> None: ...
    def post_now(self) -> None: ...
    def become_host(self) -> bool: ...
    def lock_file_owner(self) -> tuple[int, int]: ...
    def recover(self) -> tuple[int, int, int]: ...
    def participants(self) -> Sequence[tuple[int, str, int, bool | None]]: ...
    def close(self, *, strict: bool = True) -> None:
        """Detaches from the link. Raises `StillViewed` while loans or messages are alive, unless ``strict`` is false."""

def create_leased(path: str | os.PathLike[str], mode: int, nbytes: int) -> int: ...
def open_leased(path: str | os.PathLike[str]) -> int: ...
def remove_unused(path: str | os.PathLike[str]) -> bool: ...

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
    """Memory of a GPU. Arrays over it keep it alive."""

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
def encode(value: Any, msg_bytes: int, buffer_min: int) -> tuple[bytes, list[tuple[int, Any]], int] | None: ...
def decode(message: Message, copy: bool) -> tuple[Any] | None: ...
def object_parts(
    pickle: bytes, buffers: list[tuple[Any, int]], msg_bytes: int
) -> tuple[bytes, list[tuple[int, Any]], int]: ...
def object_places(msg: bytes) -> tuple[bool, tuple[int, int], list[tuple[int, int]]] | None: ...
