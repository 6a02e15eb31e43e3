"""The pitfalls of the recipe "shmat over a numpy buffer", and of others, each with the reason why it is none here.

Those that can be shown are first shown in a child process, so that the test fails if the pitfall is none any more.
"""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shmesh

SHM_RND, SHM_REMAP, IPC_CREAT, IPC_RMID = 0o20000, 0o40000, 0o1000, 0

RECIPE = f"""
import ctypes, ctypes.util, os, sys
import numpy as np
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
page = os.sysconf("SC_PAGESIZE")
def recipe(array, nbytes):
    shmid = libc.shmget(0, nbytes, 0o600 | {IPC_CREAT})
    assert shmid >= 0
    start = libc.shmat(shmid, array.ctypes.data + page, {SHM_RND | SHM_REMAP})
    libc.shmctl(shmid, {IPC_RMID}, None)
    return start
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RECIPE + script], capture_output=True, text=True, timeout=200, check=False
    )


def segments() -> list[int]:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return [int(line.split()[1]) for line in lines]


def test_contents_do_not_vanish() -> None:
    shown = run("""
array = np.full(1 << 20, 7, np.uint8)
start = recipe(array, 1 << 19)
print(array[start - array.ctypes.data], array.ctypes.data % page, (start - array.ctypes.data))
""")
    value, alignment, moved = map(int, shown.stdout.split())
    assert (value, alignment != 0, moved != 0) == (0, True, True), "the recipe: 7 became 0, and the data moved"

    array = shmesh.from_numpy(np.full(1 << 20, 7, np.uint8))
    assert (array == 7).all()
    # Nothing is ever mapped over memory that is in use: the array is made on top of shared memory.
    assert array.ctypes.data % page_size() == 0 and array.memory.address == array.ctypes.data


def page_size() -> int:
    return os.sysconf("SC_PAGESIZE")


def test_no_spare_page_is_needed() -> None:
    shown = run("""
import mmap
memory = mmap.mmap(-1, 4 * page)             # in the place of a heap: the array, and what lies behind it
array = np.frombuffer(memory, np.uint8, 2 * page)
neighbour = np.frombuffer(memory, np.uint8, page, 2 * page)
neighbour[:] = 7
recipe(array, 2 * page)
print(neighbour[0])
os._exit(0)
""")
    assert shown.stdout == "0\n", "the recipe: what lies behind the array is overwritten; in a heap, malloc aborts"

    for length in (1, 4095, 4096, 4097, 200_000):
        array = shmesh.empty(length, np.uint8)
        array[:] = 1
        assert array.memory.nbytes == length and array.sum() == length
    del array
    others = [np.ones(1000) for _ in range(1000)]
    assert sum(other.sum() for other in others) == 1_000_000


def test_detaching_first_leaves_no_hole() -> None:
    shown = run("""
array = np.ones(1 << 20, np.uint8)
start = recipe(array, 1 << 19)
assert libc.shmdt(start) == 0
print(array[start - array.ctypes.data])
""")
    assert shown.returncode == -11, "the recipe: reading the array after shmdt is a segmentation fault"

    array = shmesh.from_numpy(np.ones(1 << 20, np.uint8))
    with pytest.raises(shmesh.StillViewed):
        array.memory.close()
    assert array.sum() == 1 << 20


def test_freeing_first_frees_no_foreign_memory() -> None:
    """`del` of the recipe's array unmaps the segment silently, and its `shmdt` then unmaps whatever is at that address."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        array = shmesh.empty(1 << 16, np.uint8)
        address, memory = array.ctypes.data, array.memory
        del array
        gc.collect()
        other = mmap.mmap(-1, 1 << 16)
        other[:4] = b"mine"
        memory.close()
        memory.close()
        assert other[:4] == b"mine" and address
        other.close()
    # Fewer if a thread of a link that an earlier test closed has closed its own meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.long
def test_exit_without_cleaning_up_leaves_nothing(ipc: Path) -> None:
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import ctypes; print(ctypes.CDLL(None).shmget(0, 4096, 0o600 | {IPC_CREAT}))",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    shmid = int(shown.stdout)
    assert shmid in segments(), "the recipe: without IPC_RMID the segment stays"
    assert ctypes.CDLL(None).shmctl(shmid, IPC_RMID, None) == 0

    before = segments()
    for end in ("", "os._exit(0)", "os.abort()", "os.kill(os.getpid(), 9)"):
        script = f"import os, shmesh; a = shmesh.empty(1 << 20); b = shmesh.empty(3, name='x'); {end}"
        subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=200, check=False)
        names = os.listdir(ipc)
        # The killed process could not remove its name, which has no memory. A process that opens it finds nothing, and
        # removes it.
        assert names == [] or (end != "" and os.stat(ipc / names[0]).st_blocks == 0)
        with pytest.raises(shmesh.NotFound):
            shmesh.open("x")
        assert os.listdir(ipc) == []
    assert segments() == before, "there are no System V segments, so nothing needs ipcrm"


def test_segments_are_not_attached_by_accident() -> None:
    libc = ctypes.CDLL(None)
    key = 0x5EED_0000 | os.getpid() & 0xFFFF
    first = libc.shmget(key, 4096, 0o600 | IPC_CREAT)
    second = libc.shmget(key, 4096, 0o600 | IPC_CREAT)
    libc.shmctl(first, IPC_RMID, None)
    assert first == second >= 0, "the recipe: a program that uses the same small number gets the other program's memory"

    array = shmesh.from_numpy([42], "answers")
    with pytest.raises(shmesh.AlreadyExists):
        shmesh.empty(1, name="answers")
    with pytest.raises(shmesh.Mismatch):
        shmesh.open("answers", 2)
    assert oct(os.stat(array.memory.path or "").st_mode & 0o777) == "0o600", "and not 0666"


def test_more_than_2_gib_and_no_exit_of_the_process() -> None:
    # The recipe's sizes are C ints. Ours are sizes, and what does not fit is an exception.
    array = shmesh.empty((3, 1), np.uint8)
    assert array.memory.nbytes == 3
    with pytest.raises(shmesh.NoSpace):
        shmesh.empty(1 << 50, np.uint8)
    layout = shmesh._array._laid_out((1 << 31, 3), np.float64)
    assert layout[2] == 3 << 34


def test_memory_is_reserved_and_not_only_promised() -> None:
    """After `ftruncate` on a full tmpfs, the first access raises SIGBUS: in torch and multiprocessing."""
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import ctypes, mmap, os, sys, tempfile
libc = ctypes.CDLL(None)
where = tempfile.mkdtemp()
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x4c000, None):
    raise SystemExit(77)
if libc.mount(b"tmpfs", where.encode(), b"tmpfs", 0, b"size=1m"):
    raise SystemExit(77)
fd = os.open(where + "/x", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 24)                       # succeeds
memory = mmap.mmap(fd, 1 << 24)
memory[:] = bytes(1 << 24)
""",
        ],
        capture_output=True,
        timeout=200,
        check=False,
    )
    if shown.returncode != 77:
        assert shown.returncode == -7, "the pitfall: a bus error"

    array = shmesh.empty(1 << 20, np.uint8)
    stat = os.fstat(array.memory.fileno())
    assert stat.st_blocks * 512 >= 1 << 20, "all pages are there"


def test_non_contiguous_input_is_no_silent_copy() -> None:
    """`ascontiguousarray` copies, and writes to the copy are not shared."""
    source = np.arange(12).reshape(3, 4)[:, ::2]
    array = shmesh.from_numpy(source)
    array[0, 0] = 100
    assert source[0, 0] == 0, "`from_numpy` says that it copies"
    opened = shmesh.Memory.fetch(*array.memory.handle()).view(0, 8)
    assert opened.view(np.int64)[0] == 100, "and what it made is shared"




@pytest.mark.long
def test_reader_that_exits_takes_nothing_along() -> None:
    """cpython#82300: before 3.13 the resource tracker of a reader unlinks the segment when that reader exits."""
    from multiprocessing import shared_memory

    theirs = shared_memory.SharedMemory(create=True, size=64)
    script = f"from multiprocessing import shared_memory as s; s.SharedMemory({theirs.name!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    gone = not Path("/dev/shm", theirs.name).exists()
    theirs.close()
    if gone:
        from multiprocessing import resource_tracker

        assert "leaked shared_memory" in done.stderr, "the pitfall: a warning of a leak, although nothing leaks"
        resource_tracker.unregister(f"/{theirs.name}", "shared_memory")
    else:
        theirs.unlink()

    array = shmesh.from_numpy([1, 2, 3], "ours")
    for _ in range(3):
        script = "import shmesh; assert shmesh.open('ours').sum() == 6"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
        assert done.stderr == ""
    assert shmesh.open("ours").tolist() == array.tolist()
