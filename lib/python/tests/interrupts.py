"""Signals during calls that wait."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def interrupted() -> Iterator[None]:
    """Sends a signal during a call that waits. The handler raises an exception, which must end the call."""

    class Interrupt(Exception):
        pass

    def handler(_number: int, _frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupt):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)
