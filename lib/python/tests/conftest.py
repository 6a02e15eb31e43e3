"""Each test has an IPC directory of its own, has to leave it empty, and has five minutes."""

import faulthandler
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

SECONDS = 300


def pytest_collection_finish() -> None:
    """Each test collects garbage, which takes as long as there are objects: numpy's and pytest's own are left out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ipc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="shmesh-test-", dir="/dev/shm"))
    monkeypatch.setenv("SHMESH_DIR", str(directory))
    faulthandler.dump_traceback_later(SECONDS - 5)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    try:
        yield directory
        gc.collect()
        left = sorted(os.listdir(directory))
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        # It has the environment, and so the directory, of the test that started it.
        getattr(forkserver, "_forkserver")._stop()
        shutil.rmtree(directory, ignore_errors=True)
    assert left == [], "the test left files behind"
