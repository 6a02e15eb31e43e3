"""numpy arrays, batches and messages in shared memory: no copy, no pickle, nothing left behind.

==========================  =======================================================================
`empty`, `from_numpy`       an array in shared memory; pickled, a handle travels and not the data
`open`                      an array of another process, by its name
`BatchQueue`                batches of arrays from loaders to trainers, written and read in place
`MessageQueue`              objects from one writer to many readers, each of which gets all
`Link`                      messages in both directions, requests and replies; ``asyncio`` and ``selectors`` work
`DeviceSession`             device memory by keys, for processes that were named
`GpuSession`                the same in memory of GPUs, for torch and cupy
`attach_sysv`               an existing ``shmget`` segment as an array
`shmesh.shared_memory`      ``multiprocessing.shared_memory`` without a resource tracker; `shmesh.run`
==========================  =======================================================================
"""

import atexit as _atexit
import contextlib as _contextlib
import os as _os
import sys as _sys

from . import _shmesh
from ._array import Array, attach_sysv, empty, from_dlpack, from_numpy, ipc_directory, open
from ._batch import Batch, BatchQueue
from ._cuda import GpuArray, GpuSession
from ._device import DeviceSession
from ._errors import (
    AlreadyExists,
    Busy,
    Closed,
    Damaged,
    Denied,
    Error,
    Evicted,
    Exhausted,
    Forked,
    Invalid,
    Mismatch,
    NoSpace,
    NotFound,
    PeerDied,
    ReadOnly,
    RepliesFull,
    StillViewed,
    System,
    Timeout,
    TooLong,
    Unanswered,
    Unsupported,
)
from ._link import Link, Participant, PeerEvent, PeerEvents, RecoveryStats
from ._message_queue import MessageQueue
from ._request import PendingReply, Request, Requests
from ._shmesh import INLINE_MAX_BYTES, REQUEST_INLINE_MAX_BYTES, Loan, Memory, Message, __version__

__all__ = [
    "INLINE_MAX_BYTES",
    "REQUEST_INLINE_MAX_BYTES",
    "AlreadyExists",
    "Array",
    "Batch",
    "BatchQueue",
    "Busy",
    "Closed",
    "Damaged",
    "Denied",
    "DeviceSession",
    "Error",
    "Evicted",
    "Exhausted",
    "Forked",
    "GpuArray",
    "GpuSession",
    "Invalid",
    "Link",
    "Loan",
    "Memory",
    "Message",
    "MessageQueue",
    "Mismatch",
    "NoSpace",
    "NotFound",
    "Participant",
    "PeerDied",
    "PeerEvent",
    "PeerEvents",
    "PendingReply",
    "ReadOnly",
    "RepliesFull",
    "RecoveryStats",
    "Request",
    "Requests",
    "StillViewed",
    "System",
    "Timeout",
    "TooLong",
    "Unanswered",
    "Unsupported",
    "__version__",
    "attach_sysv",
    "empty",
    "from_dlpack",
    "from_numpy",
    "ipc_directory",
    "open",
]

_os.register_at_fork(after_in_child=_shmesh.after_fork_in_child)


def _at_exit() -> None:
    processes = _sys.modules.get("multiprocessing")
    try:
        # They may still come by the names that end here. multiprocessing waits for them as well, but perhaps after this.
        for child in processes.active_children() if processes is not None else ():
            # Those of before an `os.fork` are not this process's.
            with _contextlib.suppress(AssertionError):
                if not child.daemon:
                    child.join()
    finally:
        _shmesh.at_exit()


_atexit.register(_at_exit)
