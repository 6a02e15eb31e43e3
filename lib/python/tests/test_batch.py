import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import workers

import shmesh

METHODS = ["fork", "spawn", "forkserver"]


def test_five_lines() -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(nbytes=1024, producers=2)
    loaders = [context.Process(target=workers.produce, args=(queue, first, 25)) for first in (0, 100)]
    for loader in loaders:
        loader.start()
    numbers = []
    for batch in queue:
        assert batch["x"].shape == (8, 4) and not batch["x"].flags.writeable
        assert set(batch["x"].ravel().tolist()) == {batch.meta["number"]}
        numbers.append(batch.meta["number"])
    assert sorted(numbers) == [*range(25), *range(100, 125)]
    for loader in loaders:
        loader.join()
        assert loader.exitcode == 0
    with pytest.raises(EOFError):
        queue.get()


@pytest.mark.parametrize("method", METHODS)
def test_any_way_to_start_a_process(method: str) -> None:
    context = multiprocessing.get_context(method)
    with shmesh.BatchQueue(1024) as queue:
        loader = context.Process(target=workers.produce, args=(queue, 0, 10))
        loader.start()
        assert [batch.meta["number"] for batch in queue] == list(range(10)), "in order"
        loader.join()


def test_batches_are_written_in_place_and_ragged() -> None:
    queue = shmesh.BatchQueue(10_000, producers=1)
    for length in (1, 100, 0):
        with queue.batch({"x": ((length, 3), "f4"), "y": (length, [("id", "i8"), ("z", "u1")])}) as batch:
            batch["x"][...] = length
            batch["y"]["id"] = np.arange(length)
    for length in (1, 100, 0):
        batch = queue.get(timeout=200)
        assert list(batch) == ["x", "y"] and len(batch) == 2
        assert batch["x"].shape == (length, 3) and (batch["x"] == length).all()
        assert batch["y"]["id"].tolist() == list(range(length))
        assert all(array.ctypes.data % 64 == 0 for array in batch.values())
        with pytest.raises(KeyError):
            batch["z"]


def test_batch_is_a_mapping() -> None:
    queue = shmesh.BatchQueue(1000, depth=3)
    for scale in (1, 2):
        # A shape in a list is encoded each time, with the same meaning.
        with queue.batch({"x": ([2, 2], "f4"), "y": (3, np.int16)}, meta=scale) as batch:
            batch["x"][...] = scale
            batch["y"][...] = scale
        assert repr(batch) == "<shmesh.Batch x: (2, 2) float32, y: (3,) int16>"
    queue.put({})
    for scale in (1, 2):
        batch = queue.get(timeout=200)
        assert isinstance(batch, Mapping) and batch.meta == scale and len(batch) == 2
        assert list(batch) == batch.keys() == ["x", "y"] and "x" in batch and "z" not in batch and 1 not in batch
        assert [(key, array.sum()) for key, array in batch.items()] == [("x", 4 * scale), ("y", 3 * scale)]
        assert [array.dtype for array in batch.values()] == [np.float32, np.int16]
        assert batch.get("z") is None and batch.get("z", 5) == 5 and batch.get("x") is not None
        del batch
    assert dict(queue.get(timeout=200)) == {}


def test_more_layouts_than_a_receiver_knows() -> None:
    queue = shmesh.BatchQueue(4096, depth=2)
    for turn in range(2):
        for length in range(40):
            queue.put({f"x{length % 20}": np.full(length, turn, np.uint8)})
            batch = queue.get(timeout=200)
            assert batch[f"x{length % 20}"].tolist() == [turn] * length
            del batch


def test_known_layout_does_not_vouch_for_the_bytes() -> None:
    queue = shmesh.BatchQueue(1000, name="queue")
    queue.put({"x": np.arange(100, dtype=np.uint8)})
    text = b"[('x', '|u1', (100,), 0)]"
    intruder = shmesh.Link.attach("queue")
    assert queue.get(timeout=200)["x"][99] == 99
    intruder.send(len(text).to_bytes(4, "little") + text, b"x" * 99)
    with pytest.raises(shmesh.Damaged):
        queue.get(timeout=200)["x"]


def test_back_pressure() -> None:
    queue = shmesh.BatchQueue(1000, depth=2)
    queue.put({"x": np.arange(3)})
    queue.put({"x": np.arange(3)})
    with pytest.raises(shmesh.Timeout, match="depth") as error:
        queue.put({"x": np.arange(3)}, timeout=0.05)
    assert isinstance(error.value, TimeoutError)
    first = queue.get()
    view = first["x"][1:]
    first.release()
    with pytest.raises(shmesh.Timeout):
        queue.put({"x": np.arange(3)}, timeout=0.05)
    # The producer waits until the last view is gone, and no longer.
    done = threading.Event()
    thread = threading.Thread(target=lambda: (queue.put({"x": np.arange(3)}), done.set()))
    thread.start()
    assert not done.wait(0.05)
    assert view.tolist() == [1, 2]
    del view
    assert done.wait(200)
    thread.join()


def test_batch_is_not_sent_while_its_arrays_live() -> None:
    queue = shmesh.BatchQueue(1000)
    batch = queue.batch({"x": (3, "f4")})
    array = batch["x"]
    with pytest.raises(shmesh.StillViewed):
        batch.send()
    array[:] = 2
    del array
    batch.send()
    with pytest.raises(shmesh.Closed):
        batch["x"]
    received = queue.get()
    with pytest.raises(shmesh.Invalid):
        received.send()
    assert received["x"].tolist() == [2, 2, 2]


def test_batch_given_up_comes_back() -> None:
    queue = shmesh.BatchQueue(1000, depth=2)
    for _ in range(5):
        with pytest.raises(KeyError), queue.batch({"x": (3, "f4")}):
            raise KeyError
    with pytest.raises(shmesh.Timeout):
        queue.get(timeout=0.02)


def test_nothing_is_sent_after_the_end() -> None:
    queue = shmesh.BatchQueue(1000)
    producer = shmesh.BatchQueue.attach(queue.name)
    late = producer.batch({"x": (3, "f4")})
    producer.close()
    with pytest.raises(EOFError):
        queue.get()
    with pytest.raises(shmesh.Closed, match="then close"):
        late.send()
    with pytest.raises(shmesh.Closed):
        late["x"]


def test_batch_that_does_not_fit_is_refused() -> None:
    queue = shmesh.BatchQueue(1000)
    with pytest.raises(shmesh.TooLong, match="nbytes"):
        queue.put({"x": np.zeros(1025, np.uint8)})
    with pytest.raises(shmesh.TooLong, match="meta"):
        queue.put({"x": np.zeros(1)}, meta="x" * 20_000)
    with pytest.raises(shmesh.Unsupported):
        queue.put({"x": np.array([object()])})
    overlapping = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 0]})
    with pytest.raises(shmesh.Unsupported, match="view"):
        queue.put({"x": np.zeros(1, overlapping)})
    with pytest.raises(shmesh.Invalid):
        queue.batch({"x": (-1, "f4")})
    with pytest.raises(shmesh.Invalid, match="str"):
        queue.put({1: np.zeros(1)})  # type: ignore[dict-item]
    for wrong in ({"nbytes": 0}, {"nbytes": 1, "depth": 1}, {"nbytes": 1, "producers": 0}):
        with pytest.raises(shmesh.Invalid):
            shmesh.BatchQueue(**wrong)


def test_attach_by_name() -> None:
    queue = shmesh.BatchQueue(1000, name="train")
    with shmesh.BatchQueue.attach("train") as other:
        other.put({"x": np.arange(3)})
    assert queue.get()["x"].tolist() == [0, 1, 2]
    with pytest.raises(EOFError):
        queue.get()
    with pytest.raises(shmesh.Closed, match="attach again"):
        other.put({"x": np.arange(3)})
    with pytest.raises(shmesh.NotFound):
        shmesh.BatchQueue.attach("absent")


@pytest.mark.parametrize("method", METHODS)
def test_killed_producer_is_noticed_and_its_buffers_come_back(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = shmesh.BatchQueue(1000, depth=6, producers=2)
    victim = context.Process(target=workers.produce_and_die, args=(queue, 2, 3))
    victim.start()
    victim.join()
    assert [queue.get(timeout=200).meta["number"] for _ in range(2)] == [0, 1], "what was sent is delivered"
    with pytest.raises(shmesh.PeerDied, match="1 producer"):
        queue.get(timeout=200)
    assert queue.died == 1
    # All six buffers are free again.
    batches = [queue.batch({"x": (1, "u1")}, timeout=200) for _ in range(6)]
    del batches
    other = context.Process(target=workers.produce, args=(queue, 10, 5))
    other.start()
    # This process was a producer, too, because it took loans: it finishes.
    queue.producers = 3
    seen = [queue.get(timeout=200).meta["number"] for _ in range(5)]
    other.join()
    assert seen == list(range(10, 15))


def test_producer_that_fails_has_not_finished() -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(1000)
    process = context.Process(target=workers.produce_and_fail, args=(queue,))
    process.start()
    assert queue.get(timeout=200)["x"].tolist() == [0, 0, 0]
    with pytest.raises(shmesh.PeerDied, match="without `close`"):
        queue.get(timeout=200)
    process.join()
    with pytest.raises(EOFError):
        queue.get(timeout=200)


@pytest.mark.parametrize("timeout", [0, 0.001])
def test_get_without_waiting_reports_the_end(timeout: float) -> None:
    queue = shmesh.BatchQueue(1000, producers=2)
    with pytest.raises(shmesh.Timeout):
        queue.get(timeout=timeout)
    victim = multiprocessing.get_context("spawn").Process(target=workers.produce_and_die, args=(queue, 1, 1))
    victim.start()
    victim.join()
    with shmesh.BatchQueue.attach(queue.name) as producer:
        producer.put({"x": np.zeros(1)}, meta={"number": 7})
    assert {queue.get(timeout=timeout).meta["number"] for _ in range(2)} == {0, 7}
    with pytest.raises(shmesh.PeerDied):
        queue.get(timeout=timeout)
    with pytest.raises(EOFError):
        queue.get(timeout=timeout)


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_get_without_waiting_gets_batches_of_dead_producers(timeout: float) -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(1000, depth=2, producers=2)
    here, there = context.Pipe()
    victim = context.Process(target=workers.consume_and_die, args=(queue, there))
    victim.start()
    queue.put({"x": np.zeros(1)}, meta={"number": 5})
    assert here.recv() == 5
    victim.kill()
    victim.join()
    for number in (6, 7):
        queue.put({"x": np.zeros(1)}, meta={"number": number}, timeout=timeout)
    assert [queue.get(timeout=200).meta["number"] for _ in range(2)] == [6, 7]


def test_producer_that_fails_before_its_first_batch() -> None:
    queue = shmesh.BatchQueue(1000)
    process = multiprocessing.get_context("spawn").Process(target=workers.fail_as_producer, args=(queue,))
    process.start()
    with pytest.raises(shmesh.PeerDied):
        queue.get()
    process.join()
    with pytest.raises(EOFError):
        queue.get()


def test_producer_that_is_killed_in_another_container() -> None:
    """Its pid has no meaning in this namespace."""
    queue = shmesh.BatchQueue(1000, name="queue", depth=3)
    script = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).unshare(0x20000000):
    raise SystemExit(77)
for _ in range(2):  # the first process of a pid namespace cannot be killed from inside
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(0 if code in (0, -signal.SIGKILL) else 1)
import shmesh
producer = shmesh.BatchQueue.attach("queue")
producer.put({"x": [1]})
kept = [producer.batch({"x": (1, "u1")}) for _ in range(2)]
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode == 77:
        pytest.skip("another pid namespace takes root")
    assert done.returncode == 0, done.stderr
    assert queue.get()["x"].tolist() == [1]
    with pytest.raises(shmesh.PeerDied):
        queue.get()
    batches = [queue.batch({"x": (1, "u1")}, timeout=0) for _ in range(3)]
    assert len(batches) == 3, "all buffers are there"


@pytest.mark.long
def test_several_consumers() -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(1024, depth=8, producers=3)
    results = context.Queue()
    consumers = [context.Process(target=workers.consume, args=(queue, results)) for _ in range(2)]
    producers = [context.Process(target=workers.produce, args=(queue, first, 40)) for first in (0, 100, 200)]
    for process in consumers + producers:
        process.start()
    numbers = results.get(timeout=200) + results.get(timeout=200)
    assert sorted(numbers) == [*range(40), *range(100, 140), *range(200, 240)], "each batch went to one of them"
    for process in consumers + producers:
        process.join()
        assert process.exitcode == 0


def test_killed_consumer_gives_its_batch_back() -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(1000, depth=2)
    here, there = context.Pipe()
    victim = context.Process(target=workers.consume_and_die, args=(queue, there))
    victim.start()
    queue.put({"x": np.zeros(1)}, meta={"number": 5})
    assert here.recv() == 5
    queue.put({"x": np.zeros(1)}, meta={"number": 6})
    victim.kill()
    victim.join()
    queue.put({"x": np.zeros(1)}, meta={"number": 7}, timeout=200)
    assert [queue.get(timeout=200).meta["number"] for _ in range(2)] == [6, 7]


def test_producer_without_consumers_gets_an_error() -> None:
    script = """
import numpy as np, os, shmesh, signal
queue = shmesh.BatchQueue(1000, depth=2, name="left")
print("ready", flush=True)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    with shmesh.BatchQueue.attach("left") as queue:
        queue.put({"x": np.zeros(1)})
        queue.put({"x": np.zeros(1)})
        process.kill()
        process.wait()
        with pytest.raises(shmesh.PeerDied, match="no consumer"):
            queue.put({"x": np.zeros(1)}, timeout=200)
    process.stdout.close()


@pytest.mark.parametrize("end", ["killed", pytest.param("closed", marks=pytest.mark.long)])
def test_others_come_when_the_maker_has_gone(ipc: Path, end: str) -> None:
    script = """
import shmesh, sys
queue = shmesh.BatchQueue(1000, name="kept", producers=2, mode=0o660)
print("ready", flush=True)
sys.stdin.readline()
queue.close()
"""
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdin is not None and maker.stdout is not None and maker.stdout.readline() == "ready\n"
    with shmesh.BatchQueue.attach("kept") as queue, shmesh.BatchQueue.attach("kept") as first:
        first.put({"x": np.zeros(1)}, meta={"number": 1})
        assert queue.get(timeout=200).meta["number"] == 1
        if end == "killed":
            maker.kill()
        maker.stdin.close()
        maker.wait()
        maker.stdout.close()
        context = multiprocessing.get_context("spawn")
        # It attaches by the name, for which a process that uses the queue answers again.
        late = context.Process(target=workers.attach_and_produce, args=("kept", 10, 3))
        late.start()
        assert [queue.get(timeout=200).meta["number"] for _ in range(3)] == [10, 11, 12]
        late.join()
        assert late.exitcode == 0
        assert (ipc / "kept.array").stat().st_mode & 0o777 == 0o660, "as its maker wanted it"
        assert queue.producers == 2 and queue.died == 0
    with pytest.raises(shmesh.NotFound):
        shmesh.BatchQueue.attach("kept")
    assert os.listdir(ipc) == [], "the last one takes the name away"


@pytest.mark.long
def test_all_killed_leaves_no_memory_and_names_are_swept(ipc: Path) -> None:
    script = """
import numpy as np, os, shmesh, signal
queue = shmesh.BatchQueue(1 << 20, name="gone")
queue.put({"x": np.zeros(1)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], timeout=200)
    left = {name.split("-")[0]: os.stat(ipc / name).st_blocks for name in os.listdir(ipc)}
    assert set(left) <= {"gone.array", "gone.broker", "gone.lock"} and set(left.values()) <= {0}
    with pytest.raises(shmesh.NotFound):
        shmesh.BatchQueue.attach("gone")
    assert os.listdir(ipc) == []


def test_message_that_is_no_batch() -> None:
    queue = shmesh.BatchQueue(1000, name="queue")
    intruder = shmesh.Link.attach("queue")
    for msg in (
        b"",
        b"abc",
        b"\xff\xff\xff\xffx",
        b"\3\0\0\0{]x",
        b"\x03\0\0\0[1]",
        b"\x22\0\0\0[('x', '|O', (1,), 0)]            ",
        b"\x22\0\0\0[('x', '<f8', (1 << 60,), 0)]     ",
        b"\x22\0\0\0[('x', '<f8', (-1,), 0)]          ",
        b"\x02\0\0\0[]" + b"not json",
    ):
        intruder.send(msg, b"x" * 8)
        with pytest.raises(shmesh.Error):
            queue.get(timeout=200)
    # It describes an array outside of its memory.
    for where in (b"'<f8', (100,), 0", b"'<f8', (1,), 4096", b"'<f8', (1,), -8", b"'<f8', (1,), 1", b"(), (1,), 0", b"'<f8', (1,), 100000000000000000000"):
        text = b"[('x', " + where + b")]"
        intruder.send(len(text).to_bytes(4, "little") + text, b"x" * 8)
        with pytest.raises((shmesh.Damaged, KeyError)):
            queue.get(timeout=200)["x"]


@pytest.mark.long
def test_kills_at_any_moment() -> None:
    """Producers are killed at any moment. Batches arrive whole, and no buffer is lost."""
    context = multiprocessing.get_context("fork")
    random = np.random.default_rng(7)
    queue = shmesh.BatchQueue(64 << 10, depth=6, producers=1000)
    whole = died = 0

    def drain(seconds: float) -> None:
        nonlocal whole, died
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                batch = queue.get(timeout=0.005)
            except shmesh.Timeout:
                continue
            except shmesh.PeerDied:
                died = queue.died
                continue
            number = batch.meta["number"]
            assert (batch["x"] == number).all() and batch["y"].tolist() == [number] * 3
            whole += 1

    for _ in range(30):
        victim = context.Process(target=workers.produce_for_ever, args=(queue,))
        victim.start()
        # Some are killed before they have sent anything, some while they wait for a buffer.
        drain(float(random.uniform(0.001, 0.03)))
        victim.kill()
        victim.join()
    while queue.died > died:
        drain(0.05)
    assert whole > 0 and died > 0
    with queue:
        batches = [queue.batch({"x": (1, "u1")}, timeout=200) for _ in range(6)]
        assert len(batches) == 6, "all buffers are there"
        del batches
