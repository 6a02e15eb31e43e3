"""Signals, and calls of other threads, while a call waits."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WATCHDOG = 200


def is_asleep(thread: threading.Thread) -> bool:
    """Whether a thread sleeps: in a call that waits, or for a moment because it needs the interpreter."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


@contextmanager
def signalled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Sends a signal while the main thread sleeps in the block."""
    main, is_over = threading.main_thread(), threading.Event()

    def send() -> None:
        while not is_over.wait(0.01):
            if is_asleep(main):
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    sender = threading.Thread(target=send)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        sender.start()
        yield
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def interrupted(call: Callable[[], object]) -> None:
    """Sends a signal during a call that waits. The handler raises an exception, which must end the call."""

    class Interrupt(Exception):
        pass

    def handler(_number: int, _frame: object) -> None:
        raise Interrupt

    with pytest.raises(Interrupt), signalled(handler):
        call()


@contextmanager
def later(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Another thread calls it during the block, which ends after the call."""
    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def until_quiet(poll: Callable[[], list[Any]], drain: Callable[[], object]) -> None:
    """Waits until a descriptor has no signals. Threads of the link may signal events late, for example of participants that attached."""
    end = time.monotonic() + WATCHDOG
    drain()
    while poll():
        assert time.monotonic() < end, "it is always readable"
        drain()
