"""Errors. Every class also inherits from the built-in exception that fits, and every text names the remedy."""


class Error(Exception):
    """Base class of all errors of shmesh."""


class NotFound(Error, FileNotFoundError):
    """There is no link, array or segment with that name, or it no longer exists."""


class AlreadyExists(Error, FileExistsError):
    """The name is in use."""


class Denied(Error, PermissionError):
    """It belongs to another user, or the broker refused it."""


class NoSpace(Error, MemoryError):
    """``/dev/shm`` is full, or the container's memory limit is reached."""


class System(Error, OSError):
    """A system call failed for another reason."""


class Invalid(Error, ValueError):
    """An argument or a configuration is invalid."""


class Mismatch(Error, ValueError):
    """The existing object has another shape, type or configuration than requested."""


class Unsupported(Error, TypeError):
    """The type cannot be stored in shared memory."""


class ReadOnly(Error, ValueError):
    """Only the owner may write."""


class TooLong(Error, ValueError):
    """It does not fit into a buffer."""


class Closed(Error, ValueError):
    """It was used after it was closed, sent or released."""


class StillViewed(Error, BufferError):
    """Arrays over it are still alive."""


class Forked(Error, RuntimeError):
    """It belongs to the parent process, and was used in a forked child."""


class Exhausted(Error):
    """All buffers, slots or seats are in use: try again, or make it larger."""


class RepliesFull(Exhausted):
    """The client has not taken earlier replies: wait for it, or serve others."""


class Timeout(Error, TimeoutError):
    """The call timed out."""


class PeerDied(Error, ConnectionError):
    """A peer process died, or ended without closing."""

    rank: int | None = None
    """For a `MessageQueue`: the rank of the reader that died, if it had one; -1 for the writer."""


class Unanswered(Error):
    """The server dropped the request without a last reply."""


class Evicted(Error):
    """This participant was declared dead: attach again."""


class Damaged(Error):
    """The data is not what it should be, or was damaged."""


class Busy(Error):
    """Other processes still import it."""
