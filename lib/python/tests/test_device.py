"""Device keys with the broker of a sidecar. Device memory is host memory at present."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import workers

import shmesh


def is_ready() -> bool:
    """Whether a sidecar serves the link, and knows this process."""
    try:
        with shmesh.DeviceSession("fronthaul") as session:
            return session.bare_tgid() == os.getpid()
    except (shmesh.NotFound, shmesh.Denied, shmesh.System):
        return False


@pytest.fixture
def sidecar(ipc: Path) -> Iterator[str]:
    program = os.environ.get("SHMESH_SIDECAR") or str(Path(__file__).parents[3] / "target/debug/shmesh-sidecar")
    if not os.access(program, os.X_OK):
        pytest.skip("no sidecar is built: cargo build -p shmesh-sidecar")
    process = subprocess.Popen([program, "--link", "fronthaul", "--memfds-for-devices"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    try:
        while not is_ready():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        yield "fronthaul"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
        # A sidecar's link stays for later participants.
        for file in ipc.glob("fronthaul*"):
            file.unlink()


def test_five_calls(sidecar: str) -> None:
    with shmesh.DeviceSession(sidecar) as session:
        key, array = session.export_key(4, np.int32)
        array[:] = [1, 2, 3, 4]
        assert len(key) == 65 and session.bare_tgid() == os.getpid()
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        importer = context.Process(target=workers.import_key, args=(sidecar, there))
        importer.start()
        session.set_import_pid(key, [here.recv()])
        here.send(key)
        assert here.recv() == [1, 2, 3, 4]
        assert here.recv() == "still viewed"
        with pytest.raises(shmesh.Busy, match=str(importer.pid)):
            session.close(key)
        here.send("go on")
        assert here.recv() == "closed"
        importer.join()
        assert array[0] == 99, "it wrote the same memory"
        session.close(key)
        assert array[0] == 99, "an array keeps the memory, also when the key is closed"


def test_process_that_is_not_admitted_is_denied(sidecar: str) -> None:
    script = f"""
import sys, shmesh
with shmesh.DeviceSession({sidecar!r}) as session:
    key = bytes.fromhex(sys.argv[1])
    try:
        session.import_by_key(key)
    except shmesh.Denied as error:
        assert isinstance(error, PermissionError)
        raise SystemExit(3)
"""
    with shmesh.DeviceSession(sidecar) as session:
        key, _ = session.export_key(16)
        done = subprocess.run([sys.executable, "-c", script, key.hex()], timeout=200, check=False)
        assert done.returncode == 3
        with pytest.raises(shmesh.Denied):
            session.set_import_pid(key, [0x7FFF_FFF0])


def test_wrong_use(sidecar: str) -> None:
    session = shmesh.DeviceSession(sidecar)
    for key in (b"", b"x" * 64, b"x" * 65):
        with pytest.raises(shmesh.Invalid, match="65 bytes"):
            session.import_by_key(key)
    with pytest.raises(shmesh.Denied):
        session.close(b"A" * 64 + b"\0")
    with pytest.raises(shmesh.Invalid):
        session.export_key(0)
    with pytest.raises(shmesh.NoSpace):
        session.export_key(1 << 50)
    assert session.event() is None and session.fileno() >= 0
    child = os.fork()
    if child == 0:
        try:
            session.bare_tgid()
        except shmesh.Forked:
            os._exit(3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert session.bare_tgid() == os.getpid(), "the parent's session goes on"
    session.end()
    with pytest.raises(shmesh.Closed):
        session.bare_tgid()
    with pytest.raises(shmesh.NotFound):
        shmesh.DeviceSession("absent")
