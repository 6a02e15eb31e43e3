"""Arrays in other processes: a handle is sent, not the data, and a killed process leaves nothing behind."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import workers

import shmesh

METHODS = ["fork", "spawn", "forkserver"]


def shared_bytes() -> int:
    """Shared memory that any process of the machine has."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


def memfds(pid: int) -> int:
    """How many arrays a process has mapped."""
    return sum("shmesh-array" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.parametrize("method", METHODS)
def test_handle_travels(method: str) -> None:
    context = multiprocessing.get_context(method)
    array = shmesh.from_numpy(np.arange(1000, dtype=np.float64))
    queue = context.Queue()
    process = context.Process(target=workers.total, args=(array, queue))
    process.start()
    total, writable, kind = queue.get(timeout=200)
    process.join()
    # A forked child has the parent's own mapping. A process with a handle may read.
    assert (total, writable, kind) == (499500.0, method == "fork", "Array")
    assert len(pickle.dumps(shmesh.empty((1000, 1000)))) < 1000


@pytest.mark.parametrize("method", METHODS)
def test_through_a_queue(method: str) -> None:
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        array = shmesh.empty((100, 100), np.float32, readers_write=True)
        pool.apply(workers.fill, (array, 2.0))
        assert array.sum() == 20000, "the child wrote here"
        back = pool.apply(workers.identity, (array,))
        array[0, 0] = 50
        assert back[0, 0] == 50, "it came back as the same memory"


@pytest.mark.parametrize("method", METHODS)
def test_concurrent_futures(method: str) -> None:
    array = shmesh.from_numpy(np.ones(1000))
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert list(pool.map(workers.total_of, [array, array[:10], array[::2]])) == [1000, 10, 500]


def test_sender_may_drop_it_at_once() -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    queue.put(shmesh.from_numpy([1, 2, 3]))
    assert queue.get(timeout=200).tolist() == [1, 2, 3]


def test_unrelated_processes_by_name_and_by_link(ipc: Path) -> None:
    array = shmesh.from_numpy(np.arange(10), "weights")
    script = """
import pickle, shmesh
assert shmesh.open("weights").sum() == 45
link = shmesh.Link.attach("control")
message = link.receive(200)
array = pickle.loads(bytes(message))
link.send(b"%d" % array.sum())
"""
    with shmesh.Link.create("control") as link:
        link.send(pickle.dumps(array))
        subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
        answer = link.receive(200)
        assert answer is not None and bytes(answer) == b"45"


@pytest.mark.parametrize("method", METHODS)
def test_killed_reader_takes_nothing_along(method: str) -> None:
    context = multiprocessing.get_context(method)
    array = shmesh.from_numpy(np.ones(1000), "kept")
    here, there = context.Pipe()
    process = context.Process(target=workers.hold, args=(array, there))
    process.start()
    assert here.recv() == 1000
    process.kill()
    process.join()
    # Its death unlinked nothing, unlike that of a reader of multiprocessing.shared_memory before Python 3.13.
    assert shmesh.open("kept").sum() == 1000 and array.sum() == 1000


def test_killed_owner_leaves_no_memory_and_no_name(ipc: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=workers.make_and_hold, args=("weights", there))
    process.start()
    pid, _ = here.recv()
    assert memfds(pid) == 1
    opened = shmesh.open("weights")
    process.kill()
    process.join()
    # Processes that have the array keep it. The kernel frees the memory with the last one.
    assert opened[0, 0] == 3 and memfds(os.getpid()) == 1
    with pytest.raises(shmesh.NotFound):
        shmesh.open("weights")
    assert os.listdir(ipc) == [], "who found the socket of the dead removed it"
    del opened
    assert memfds(os.getpid()) == 0


def test_names_of_the_killed_are_free_again(ipc: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=workers.make_and_hold, args=("one", there))
    process.start()
    here.recv()
    process.kill()
    process.join()
    other = shmesh.empty(3, name="other")
    assert os.listdir(ipc) == ["other.array"], "removed when the next name is published"
    again = shmesh.from_numpy([1, 2], "one")
    assert shmesh.open("one").tolist() == [1, 2]
    del again, other


def test_fork_does_not_make_the_parent_look_alive(ipc: Path) -> None:
    """The child has copies of the parent's sockets, and closes them."""
    script = """
import os, signal, sys, shmesh
array = shmesh.from_numpy([1, 2], "forked")
child = os.fork()
if child == 0:
    os.write(1, b"%d\\n" % os.getpid())
    os.close(1)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=200)
    child = int(done.stdout)
    try:
        assert done.returncode == -signal.SIGKILL and memfds(child) == 1
        with pytest.raises(shmesh.NotFound):
            shmesh.open("forked")
    finally:
        os.kill(child, signal.SIGKILL)


def test_forked_child_gives_out_its_arrays_itself() -> None:
    array = shmesh.from_numpy([1, 2, 3], "mine")
    pickle.loads(pickle.dumps(array))  # the parent's server runs
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        back = pool.apply(workers.identity, (array,))
        assert back.tolist() == [1, 2, 3]
    # The end of the child did not remove the parent's name.
    assert shmesh.open("mine").tolist() == [1, 2, 3]


def test_exit_with_arrays_alive_leaves_nothing(ipc: Path) -> None:
    script = """
import shmesh
array = shmesh.empty((1000, 1000), name="global")
queue = shmesh.BatchQueue(1000, name="queue")
link = shmesh.Link.create("link")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), "no warning of leaked objects either"
    assert os.listdir(ipc) == []


def test_exit_while_threads_wait_leaves_nothing(ipc: Path) -> None:
    script = """
import threading, time
import shmesh
link = shmesh.Link.create("link")
queue = shmesh.BatchQueue(1000)
seats = {link: 2, queue._consumer: 2}
for wait in (lambda: link.receive(None), queue.get, lambda: [message for message in link]):
    threading.Thread(target=wait, daemon=True).start()
# Each link has a seat for waiting.
while any(len(link.participants()) < count for link, count in seats.items()):
    time.sleep(0.001)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(ipc) == []


@pytest.mark.long
def test_children_come_by_names_also_when_their_parent_ends(ipc: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import multiprocessing.util  # before ours, as torch does: what ends last came first
import shmesh

def consume(queue, name):
    print(shmesh.open(name).sum(), queue.get(timeout=200)["x"].sum())

if __name__ == "__main__":
    array = shmesh.from_numpy([1, 2], "array")
    queue = shmesh.BatchQueue(1000)
    queue.put({"x": [3, 4]})
    multiprocessing.get_context("spawn").Process(target=consume, args=(queue, "array")).start()
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 7\n", "")
    assert os.listdir(ipc) == []


def test_many_threads_share_and_fetch() -> None:
    array = shmesh.from_numpy(np.arange(100))
    wrong: list[object] = []

    def work() -> None:
        for _ in range(50):
            try:
                assert pickle.loads(pickle.dumps(array)).sum() == 4950
                memory = shmesh.empty(10, name=None).memory
                memory.handle()
            except BaseException as error:  # noqa: BLE001 - shown below
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_stopped_client_does_not_keep_others_waiting() -> None:
    array = shmesh.from_numpy([1, 2])
    address, token = array.memory.handle()
    with contextlib.ExitStack() as stack:
        silent = []
        # One more than may wait: the oldest is disconnected.
        for _ in range(65):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.connect(b"\0" + address.encode())
            silent.append(client)
        assert pickle.loads(pickle.dumps(array)).sum() == 3
        silent[-1].send(token)
        message, descriptors, _, _ = socket.recv_fds(silent[-1], 10, 1)
        assert message == b"+" and len(descriptors) == 1, "who asks late is answered"
        os.close(descriptors[0])
        assert silent[0].recv(10) == b""


def test_without_descriptors_it_says_so_and_goes_on() -> None:
    script = """
import os, pickle, resource, time
import numpy as np
import shmesh
first = shmesh.from_numpy(np.arange(3), "first")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
arrays = []
try:
    while True:
        arrays.append(shmesh.empty(1))
except shmesh.System as error:
    assert "ulimit" in str(error), error
# No client is accepted now, and the server's thread does not spin.
child = os.fork()
if child == 0:
    arrays.clear()
    os._exit(int(shmesh.open("first").sum() != 3))
start, busy = time.monotonic(), time.process_time()
while time.monotonic() - start < 1:
    time.sleep(0.05)
assert time.process_time() - busy < 0.5, "it spins"
arrays.clear()
assert os.waitpid(child, 0)[1] == 0, "when there are some again, who has waited is answered"
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


OTHER_CONTAINER = """
import ctypes, os, pickle, sys
import shmesh
NEWUTS, NEWIPC, NEWNET = 0x04000000, 0x08000000, 0x40000000
if ctypes.CDLL(None).unshare(NEWUTS | NEWIPC | NEWNET):
    raise SystemExit(77)
"""


def in_another_container(script: str, given: bytes = b"") -> str:
    """Another network and IPC namespace, and the same IPC directory: as pods of one pool."""
    code = OTHER_CONTAINER + script
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, timeout=200, check=False)
    if done.returncode == 77:
        pytest.skip("other namespaces take root")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_in_other_containers_by_name_by_handle_and_by_queue() -> None:
    array = shmesh.from_numpy(np.arange(10), "weights")
    assert in_another_container("print(shmesh.open('weights').sum())") == "45\n"
    # The handle of an array with a name finds it by that where the address does not reach.
    script = "print(pickle.load(sys.stdin.buffer).sum())"
    assert in_another_container(script, pickle.dumps(array[1:5])) == "10\n"
    queue = shmesh.BatchQueue(1000, name="queue")
    in_another_container("with shmesh.BatchQueue.attach('queue') as queue: queue.put({'x': [1, 2]})")
    assert queue.get(timeout=200)["x"].tolist() == [1, 2]


@pytest.mark.long
def test_unreachable_memory_names_the_remedy() -> None:
    array = shmesh.from_numpy(np.arange(10))
    script = """
try:
    pickle.load(sys.stdin.buffer)
except shmesh.NotFound as error:
    print(error)
"""
    assert "give the array a name" in in_another_container(script, pickle.dumps(array))
    named = shmesh.from_numpy([1], "x")
    handle = pickle.dumps(named)
    del array, named
    other = shmesh.from_numpy([2], "x")
    assert "another array has its name" in in_another_container(script, handle)
    del other
