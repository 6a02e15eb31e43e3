"""The process that answers for a name may be hostile."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from interrupts import interrupted

import shmesh

SHRINK, GROW, ADD_SEALS = 2, 4, 1033
META = b"('<f8', (4,))"


@contextmanager
def answering(path: Path, message: bytes, descriptors: list[int]) -> Iterator[None]:
    """Gives the same answer to every request."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        def answer() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                socket.send_fds(connection, [message], descriptors)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    path.unlink()


def memfd(length: int, seals: int) -> int:
    import fcntl

    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, length)
    fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


def refused(ipc: Path, message: bytes, descriptors: list[int]) -> None:
    try:
        with answering(ipc / "x.array", message, descriptors), pytest.raises(shmesh.Error):
            shmesh.open("x")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_memory_that_could_be_truncated_under_us(ipc: Path) -> None:
    """Its owner could make every read raise SIGBUS."""
    for seals in (0, SHRINK, GROW):
        refused(ipc, META, [memfd(4096, seals)])
    file = tempfile.TemporaryFile()
    file.truncate(4096)
    refused(ipc, META, [os.dup(file.fileno())])
    refused(ipc, META, [os.open("/dev/zero", os.O_RDWR)])
    refused(ipc, META, [os.pipe()[0]])
    refused(ipc, META, [])


def test_memory_that_is_smaller_than_it_says(ipc: Path) -> None:
    refused(ipc, META, [memfd(31, SHRINK | GROW)])
    refused(ipc, META, [memfd(0, SHRINK | GROW)])


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"-",
        b"nonsense",
        b"('<f8',)",
        b"('<f8', (-1,))",
        b"('<f8', (1 << 62,))",
        b"('|O', (1,))",
        b"('<f8', 'abc')",
        b"(" * 3000,
        b"\xff\xfe",
        b"__import__('os').abort()",
        b"([('a', '|O')], (1,))",
        b"('<f8', (9223372036854775807, 9223372036854775807))",
        b"((), (1,))",
    ],
)
def test_descriptions_that_make_no_sense(ipc: Path, meta: bytes) -> None:
    refused(ipc, meta, [memfd(4096, SHRINK | GROW)])


def test_process_that_does_not_answer(ipc: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(os.fspath(ipc / "x.array"))
        silent.listen()
        with pytest.raises(shmesh.Timeout, match="stopped"):
            shmesh.Memory.open(ipc, "x", patience=0.2)

        interrupted(lambda: shmesh.Memory.open(ipc, "x", patience=1000))
    (ipc / "x.array").unlink()


def test_process_that_answers_late(ipc: Path) -> None:
    """A machine may be busy."""
    array = shmesh.empty(4, name="other")
    descriptor = os.dup(array.memory.fileno())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        late.bind(os.fspath(ipc / "x.array"))
        late.listen()

        def answer() -> None:
            connection, _ = late.accept()
            with connection:
                # Longer than the slices in which it waits.
                time.sleep(0.5)
                socket.send_fds(connection, [META], [descriptor])

        thread = threading.Thread(target=answer)
        thread.start()
        assert shmesh.open("x").shape == (4,)
        thread.join()
    os.close(descriptor)
    (ipc / "x.array").unlink()


def test_files_of_others_are_left_alone(ipc: Path) -> None:
    (ipc / "file.array").write_text("not ours")
    (ipc / "link.array").symlink_to("/etc/passwd")
    for name in ("file", "link"):
        with pytest.raises(shmesh.Error):
            shmesh.open(name)
        with pytest.raises(shmesh.AlreadyExists):
            shmesh.empty(1, name=name)
    array = shmesh.empty(1, name="other")
    assert sorted(os.listdir(ipc)) == ["file.array", "link.array", "other.array"]
    del array
    for name in ("file", "link"):
        (ipc / f"{name}.array").unlink()


def test_other_users_do_not_get_it(ipc: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("being another user takes root")
    array = shmesh.empty(4, name="mine")
    address, token = array.memory.handle()
    script = f"""
import os, socket
os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect({os.fspath(array.memory.path)!r})
    raise SystemExit("connected by name")
except PermissionError:
    pass
by_handle = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
by_handle.connect(b"\\0" + {address.encode()!r})
try:
    by_handle.send({token!r})
    message, descriptors, _, _ = socket.recv_fds(by_handle, 100, 1)
    assert not descriptors, "given by handle"
except OSError:
    pass
"""
    os.chmod(ipc, 0o755)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert shmesh.Memory.fetch(address, token).nbytes == 32
