"""What can go wrong. Every class also inherits from the built-in one that fits, and every text names the remedy."""


class Error(Exception):
    """Any error of shmesh."""


class NotFound(Error, FileNotFoundError):
    """No link, array or segment of that name; or it is gone."""


class AlreadyExists(Error, FileExistsError):
    """The name is taken."""


class Denied(Error, PermissionError):
    """Another user's, or refused by the broker."""


class NoSpace(Error, MemoryError):
    """A full ``/dev/shm``, or the memory limit of the container."""


class System(Error, OSError):
    """The kernel refused something else."""


class Invalid(Error, ValueError):
    """An argument or a configuration that cannot be."""


class Mismatch(Error, ValueError):
    """What is there has another shape, type or configuration than asked for."""


class Unsupported(Error, TypeError):
    """A type that cannot lie in shared memory."""


class ReadOnly(Error, ValueError):
    """Only the owner may write."""


class TooLong(Error, ValueError):
    """It does not fit into a buffer."""


class Closed(Error, ValueError):
    """Used after it was closed, sent or released."""


class StillViewed(Error, BufferError):
    """Arrays over it live."""


class Forked(Error, RuntimeError):
    """Made by the parent, used in a forked child."""


class Exhausted(Error):
    """All buffers, slots or seats are in use: try again, or make it larger."""


class Timeout(Error, TimeoutError):
    """The time is over."""


class PeerDied(Error, ConnectionError):
    """A process at the other end died, or ended without closing."""

    rank: int | None = None
    """Of a `MessageQueue`: the rank of the reader that died, if it said one; -1 for the writer."""


class Evicted(Error):
    """This participant was declared dead: attach again."""


class Damaged(Error):
    """What is there is not, or no longer, what it should be."""


class Busy(Error):
    """Others still import it."""
