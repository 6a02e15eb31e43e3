"""System V segments of other programs as arrays."""

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmesh

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.shmat.restype = ctypes.c_void_p
IPC_CREAT, IPC_EXCL, IPC_RMID = 0o1000, 0o2000, 0


def attached(shmid: int) -> int:
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1]) == shmid:
            return int(fields[6])
    raise AssertionError(f"no segment {shmid}")


@pytest.fixture
def segment() -> Iterator[tuple[int, int]]:
    """A segment of 4096 bytes, as created by another program: its key and its id."""
    key = 0x5EED_0000 | os.getpid() & 0xFFFF
    shmid = LIBC.shmget(key, 4096, 0o600 | IPC_CREAT | IPC_EXCL)
    assert shmid >= 0
    try:
        yield key, shmid
    finally:
        gc.collect()
        still = attached(shmid)
        LIBC.shmctl(shmid, IPC_RMID, None)
    assert still == 0, "an array's end detaches"


def test_by_key_and_by_id(segment: tuple[int, int]) -> None:
    key, shmid = segment
    writer = shmesh.attach_sysv((16, 64), np.float32, key=key, writable=True)
    writer[1, 2] = 5
    reader = shmesh.attach_sysv((16, 64), np.float32, shmid=shmid)
    assert reader[1, 2] == 5 and not reader.flags.writeable and attached(shmid) == 2
    with pytest.raises(ValueError):
        reader[0, 0] = 1
    with pytest.raises(ValueError):
        reader.flags.writeable = True
    part = shmesh.attach_sysv(4, np.float32, shmid=shmid, offset=4 * 64)
    assert part.tolist() == [0, 0, 5, 0]


def test_segment_stays_attached_as_long_as_a_view_lives(segment: tuple[int, int]) -> None:
    _, shmid = segment
    view = shmesh.attach_sysv(4096, np.uint8, shmid=shmid)[10:20][::2]
    gc.collect()
    assert attached(shmid) == 1 and view.sum() == 0
    # Removed by its owner, it exists until the last process detaches; but this fixture removes it itself.
    del view
    gc.collect()
    assert attached(shmid) == 0


def test_way_to_ours(segment: tuple[int, int]) -> None:
    key, _ = segment
    ours = shmesh.from_numpy(shmesh.attach_sysv(1024, np.float32, key=key), "moved")
    assert shmesh.open("moved").shape == ours.shape == (1024,)


def test_wrong_segments(segment: tuple[int, int]) -> None:
    key, shmid = segment
    with pytest.raises(shmesh.NotFound, match="ipcs"):
        shmesh.attach_sysv(1, key=key ^ 0x1234_0000)
    with pytest.raises(shmesh.NotFound):
        shmesh.attach_sysv(1, shmid=0x7FFF_FFFF)
    with pytest.raises(shmesh.Mismatch, match="4096"):
        shmesh.attach_sysv(4097, np.uint8, shmid=shmid)
    with pytest.raises(shmesh.Mismatch):
        shmesh.attach_sysv(4096, np.uint8, shmid=shmid, offset=1)
    for wrong in ({}, {"key": key, "shmid": shmid}, {"key": 0}, {"shmid": shmid, "offset": -1}):
        with pytest.raises(shmesh.Invalid):
            shmesh.attach_sysv(1, np.uint8, **wrong)
    with pytest.raises(shmesh.Unsupported):
        shmesh.attach_sysv(1, object, shmid=shmid)


def test_segment_cannot_be_pickled(segment: tuple[int, int]) -> None:
    import pickle

    array = shmesh.attach_sysv(1, np.uint8, shmid=segment[1])
    with pytest.raises(shmesh.Invalid, match="from_numpy"):
        pickle.dumps(array)


def test_keys_as_ipcs_shows_them() -> None:
    """Without a sign, though `key_t` has one: `ftok` makes such keys."""
    key = 0x8EED_0000 | os.getpid() & 0xFFFF
    shmid = LIBC.shmget(key - (1 << 32), 4096, 0o600 | IPC_CREAT | IPC_EXCL)
    assert shmid >= 0
    try:
        assert shmesh.attach_sysv(4096, np.uint8, key=key).sum() == 0
        assert shmesh.attach_sysv(4096, np.uint8, key=key - (1 << 32)).sum() == 0
    finally:
        LIBC.shmctl(shmid, IPC_RMID, None)
