"""Objects from one writer to many readers."""

import asyncio
import multiprocessing
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmesh

from interrupts import interrupted, later, until_quiet

WATCHDOG = 200
SPAWN = multiprocessing.get_context("spawn")


def read_all(name: str, rank: int, results: Any) -> None:
    with shmesh.MessageQueue.attach(name, rank, timeout=WATCHDOG) as queue:
        found = []
        while True:
            try:
                value = queue.dequeue(timeout=WATCHDOG)
            except EOFError:
                break
            found.append((value["step"], float(value["weights"].sum()), value["name"]))
        results.put((rank, found))


def attach_and_stop(name: str, rank: int) -> None:
    queue = shmesh.MessageQueue.attach(name, rank, timeout=WATCHDOG)
    time.sleep(WATCHDOG)
    queue.close()


def attach_and_say_later(name: str, rank: int, pipe: Any) -> None:
    """As a reader that is interrupted between its two steps of attaching."""
    link = shmesh.Link.attach(name, timeout=WATCHDOG)
    pipe.send("attached")
    pipe.recv()
    link.send_inline(struct.pack("<iII", rank, link.seat, os.getpid()))
    pipe.send("said")
    time.sleep(WATCHDOG)


def attach_and_wait(name: str, rank: int, ready: Any) -> None:
    """A reader that sleeps between objects, until it is killed."""
    queue = shmesh.MessageQueue.attach(name, rank, timeout=WATCHDOG)
    ready.send(queue.dequeue(timeout=WATCHDOG))
    while True:
        queue.dequeue()


def write_one_and_sleep(name: str) -> None:
    queue = shmesh.MessageQueue(1000, name=name, readers=1)
    queue.enqueue("last")
    time.sleep(WATCHDOG)


def switches(pid: int) -> int:
    """How often threads of a process went to sleep by themselves."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return count


def write_one_and_die(name: str) -> None:
    queue = shmesh.MessageQueue(1000, name=name, readers=1)
    queue.enqueue("last")
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_reader_gets_everything() -> None:
    results = SPAWN.Queue()
    with shmesh.MessageQueue(1 << 16, depth=3, readers=3, name="queue") as queue:
        readers = [SPAWN.Process(target=read_all, args=("queue", rank, results)) for rank in range(3)]
        for reader in readers:
            reader.start()
        for step in range(50):
            queue.enqueue({"step": step, "weights": np.full(2000, step, np.float32), "name": "x" * step}, timeout=WATCHDOG)
    expected = [(step, 2000.0 * step, "x" * step) for step in range(50)]
    assert dict(results.get(timeout=WATCHDOG) for _ in range(3)) == {rank: expected for rank in range(3)}
    for reader in readers:
        reader.join()


def test_kinds_of_objects() -> None:
    with shmesh.MessageQueue(1 << 20, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        for value in (None, 7, "text" * 10_000, b"x" * 100_000, [np.arange(n) for n in range(300)], Path("/a"), {"a": {1, 2}}):
            queue.enqueue(value)
            found = reader.dequeue()
            assert pickle.dumps(found) == pickle.dumps(value)
        queue.enqueue([np.zeros(1000), np.asfortranarray(np.arange(6000).reshape(2, 3000)), np.arange(5000)[::2]])
        zeros, fortran, strided = reader.dequeue()
        zeros += 1  # copied, and so writable
        queue.enqueue([zeros, zeros])
        first, second = reader.dequeue()
        assert first is second
        assert fortran[1, 2999] == 5999 and fortran.flags.f_contiguous and strided[-1] == 4998


def arrays_of_many_types() -> list[Any]:
    plain = [np.arange(6).astype(char).reshape(2, 3) for char in "?bBhHiIlLqQefdFDg"]
    dates = np.array(["2026-11-26", "NaT"], "datetime64[ns]")
    text = np.array([["a", "bcd"], ["", "e"]])
    return [
        *plain,
        *(array.astype(array.dtype.newbyteorder()) for array in plain),
        *(array.T for array in plain),
        dates,
        dates - dates,
        text,
        np.asfortranarray(text),
        text.astype("S"),
        np.array("", "U0"),
        np.arange(20).reshape(4, 5)[::2, 1:],
        np.broadcast_to(np.float32(7), (3, 2)),
        np.array(5),
        np.array(dates[0]),
        np.zeros((0, 3), np.int16),
    ]


def test_arrays_keep_their_types() -> None:
    with shmesh.MessageQueue(1 << 20, name="queue") as queue:
        readers = [shmesh.MessageQueue.attach("queue", allow_pickle=allow) for allow in (False, True)]
        for array in arrays_of_many_types():
            queue.enqueue(array)
            for found in [reader.dequeue() for reader in readers]:
                assert type(found) is np.ndarray and (found.dtype, found.shape) == (array.dtype, array.shape)
                assert found.tobytes() == array.tobytes(), array
        structured = np.zeros(3, [("a", "i4"), ("b", "f8")])
        objects = np.array([1, "two", None], object)
        described = np.zeros(2, np.dtype("f4", metadata={"unit": "m"}))
        for array in (structured, objects, described):
            queue.enqueue(array)
            found = readers[1].dequeue()
            assert found.dtype == array.dtype and found.tolist() == array.tolist()
            assert found.dtype.metadata == array.dtype.metadata
            with pytest.raises(shmesh.Denied):
                readers[0].dequeue()
        for scalar in (np.float32(2.5), np.int64(-3), np.bool_(True), np.complex64(1 + 2j)):
            queue.enqueue(scalar)
            assert all(type(found) is type(scalar) and found == scalar for found in [r.dequeue() for r in readers])
        for reader in readers:
            reader.close()


class Reduced:
    """What pickles as it is said."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def test_pointers_of_a_writer_that_is_not_trusted() -> None:
    pointer = bytes(8)
    hidden = Reduced(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))
    reconstruct, arguments, _ = np.zeros(4)[::2].__reduce__()
    frombuffer = np.zeros(4).__reduce_ex__(5)[0]
    with (
        shmesh.MessageQueue(1 << 16, name="queue") as queue,
        shmesh.MessageQueue.attach("queue", allow_pickle=False) as careful,
    ):
        for forged in (
            Reduced(np.ndarray, ((1,), "O", bytearray(pointer))),
            Reduced(np.ndarray, ((1,), "i8,O", bytearray(2 * pointer))),
            Reduced(np.ndarray, ((1,), [("a", "O")], bytearray(pointer))),
            Reduced(np.ndarray, ((1,), hidden, bytearray(pointer))),
            Reduced(frombuffer, (pointer, hidden, (1,), "C")),
            Reduced(reconstruct, arguments, (1, (1,), hidden, False, pointer)),
        ):
            queue.enqueue(forged)
            with pytest.raises(shmesh.Denied):
                careful.dequeue()


def test_arrays_that_are_not_copied_hold_the_writer_up() -> None:
    with shmesh.MessageQueue(1 << 16, depth=2, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        queue.enqueue(np.arange(5000))
        array = reader.dequeue(copy=False)
        assert not array.flags.writeable and array[4999] == 4999
        queue.enqueue(np.zeros(5000))
        with pytest.raises(shmesh.Timeout, match="depth"):
            queue.enqueue(np.zeros(5000), timeout=0.05)
        assert array[4999] == 4999
        del array
        assert reader.dequeue().sum() == 0
        queue.enqueue(np.ones(5000), timeout=WATCHDOG)
        assert reader.dequeue().sum() == 5000


def test_objects_that_are_too_large() -> None:
    large = np.arange(10_000)
    with shmesh.MessageQueue(1000, name="small") as queue, shmesh.MessageQueue.attach("small") as reader:
        with pytest.raises(shmesh.TooLong, match="overflow"):
            queue.enqueue(large)
        queue.enqueue("goes on")
        assert reader.dequeue() == "goes on"
    with shmesh.MessageQueue(1000, overflow=(1 << 17, 2), name="large") as queue, shmesh.MessageQueue.attach("large") as reader:
        for _ in range(5):
            queue.enqueue(large, timeout=WATCHDOG)
            assert (reader.dequeue() == large).all()
        with pytest.raises(shmesh.TooLong):
            queue.enqueue(np.zeros(1 << 17))


def test_readers_that_join_later() -> None:
    with shmesh.MessageQueue(1000, depth=2, name="queue") as queue:
        for number in range(10):
            queue.enqueue(number, timeout=WATCHDOG)
        with shmesh.MessageQueue.attach("queue", 0) as first:
            queue.enqueue("one")
            with shmesh.MessageQueue.attach("queue", 1) as second:
                queue.enqueue("two")
                assert [first.dequeue(), first.dequeue(), second.dequeue()] == ["one", "two", "two"]
        queue.enqueue("absent", timeout=WATCHDOG)
        queue.enqueue("absent", timeout=WATCHDOG)
        queue.enqueue("absent", timeout=WATCHDOG)


@pytest.mark.long
def test_rank_of_a_reader_that_died() -> None:
    with shmesh.MessageQueue(1000, depth=2, readers=2, name="queue") as queue:
        victim = SPAWN.Process(target=attach_and_stop, args=("queue", 7))
        victim.start()
        reader = shmesh.MessageQueue.attach("queue", 3)
        queue.wait_until_ready(WATCHDOG)
        queue.enqueue(0)
        assert reader.dequeue() == 0
        victim.kill()
        victim.join()
        with pytest.raises(shmesh.PeerDied, match="reader 7") as error:
            for number in range(1, 1_000_000):
                queue.enqueue(number, timeout=WATCHDOG)
                assert reader.dequeue(timeout=WATCHDOG) == number
        assert error.value.rank == 7
        queue.enqueue("the others go on", timeout=WATCHDOG)
        assert reader.dequeue() == "the others go on"
        reader.close()


def test_seat_that_another_reader_takes() -> None:
    with shmesh.MessageQueue(1000, readers=2, name="queue") as queue:
        first = shmesh.MessageQueue.attach("queue", 1)
        with pytest.raises(shmesh.Timeout, match="1 of 2 readers"):
            queue.wait_until_ready(0)
        seat = first._link.seat
        first.close()
        with shmesh.MessageQueue.attach("queue", 2) as second, shmesh.MessageQueue.attach("queue", 3) as third:
            assert second._link.seat == seat
            queue.wait_until_ready(WATCHDOG)
            assert queue._ranks == {(seat, os.getpid()): 2, (third._link.seat, os.getpid()): 3}
        queue._look_at_peers()
        assert queue._ranks == {}


def test_rank_of_a_reader_whose_seat_the_next_one_has() -> None:
    with shmesh.MessageQueue(1000, name="queue") as queue:
        ours, theirs = SPAWN.Pipe()
        victim = SPAWN.Process(target=attach_and_say_later, args=("queue", 7, theirs))
        victim.start()
        assert ours.poll(WATCHDOG) and ours.recv() == "attached"
        queue._look_at_peers()
        ours.send("say it")
        assert ours.poll(WATCHDOG) and ours.recv() == "said"
        victim.kill()
        victim.join()
        queue._link.recover()
        # The writer looks again only when the next reader has the seat.
        with shmesh.MessageQueue.attach("queue", 8) as reader:
            with pytest.raises(shmesh.PeerDied, match="reader 7") as error:
                queue.enqueue("not sent", timeout=WATCHDOG)
            assert error.value.rank == 7
            assert queue._ranks == {(reader._link.seat, os.getpid()): 8}


def test_ranks_of_seats_that_no_reader_has() -> None:
    with shmesh.MessageQueue(1000, readers=1, name="queue") as queue, shmesh.Link.attach("queue") as other:
        for seat in (63, 64, 1 << 31):
            other.send_inline(struct.pack("<iII", 5, seat, os.getpid()))
        with shmesh.MessageQueue.attach("queue", 1):
            pass
        with pytest.raises(shmesh.Timeout, match="0 of 1 readers"):
            queue.wait_until_ready(0)


@pytest.mark.long
def test_writer_that_died() -> None:
    process = SPAWN.Process(target=write_one_and_die, args=("queue",))
    process.start()
    reader = shmesh.MessageQueue.attach("queue", timeout=WATCHDOG)
    assert reader.dequeue(timeout=WATCHDOG) == "last"
    with pytest.raises(shmesh.PeerDied, match="writer") as error:
        reader.dequeue(timeout=WATCHDOG)
    assert error.value.rank == -1
    process.join()
    with pytest.raises(shmesh.NotFound, match="no writer"):
        shmesh.MessageQueue.attach("queue")
    reader.close()


def test_writer_that_is_started_again() -> None:
    with shmesh.MessageQueue(1000, name="queue") as queue:
        queue.enqueue("of before")
        reader = shmesh.MessageQueue.attach("queue")
        queue.enqueue("unread")
    with shmesh.MessageQueue(1000, name="queue", readers=1) as queue, shmesh.MessageQueue.attach("queue", 2) as second:
        queue.enqueue("both", timeout=WATCHDOG)
        assert [reader.dequeue(WATCHDOG), reader.dequeue(WATCHDOG)] == ["unread", "both"] and second.dequeue(WATCHDOG) == "both"
    reader.close()


def test_time_limits() -> None:
    with shmesh.MessageQueue(1000, depth=2, readers=2, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        with pytest.raises(shmesh.Timeout, match="1 of 2 readers"):
            queue.enqueue(1, timeout=0.05)
        with pytest.raises(shmesh.Timeout):
            reader.dequeue(timeout=0.02)
        with pytest.raises(shmesh.Timeout):
            reader.dequeue(timeout=0)
        with pytest.raises(shmesh.Invalid):
            queue.dequeue()
        with pytest.raises(shmesh.Invalid):
            reader.enqueue(1)
        with pytest.raises(TypeError, match="attach"):
            pickle.dumps(queue)


def test_reader_that_waits_is_woken() -> None:
    with shmesh.MessageQueue(1000, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(reader.dequeue(timeout=WATCHDOG)))
        thread.start()
        time.sleep(0.05)
        queue.enqueue("wake up")
        thread.join()
        assert found == ["wake up"]


class Harmful:
    def __reduce__(self) -> Any:
        return os.getenv, ("HOME",)


def test_pickles_of_a_writer_that_is_not_trusted() -> None:
    with shmesh.MessageQueue(1 << 16, name="queue") as queue:
        with (
            shmesh.MessageQueue.attach("queue", allow_pickle=False) as careful,
            shmesh.MessageQueue.attach("queue") as trusting,
        ):
            queue.enqueue({"plain": [1, "two", 3.0], "array": np.arange(1000), "scalar": np.float32(2), "set": {1}})
            assert careful.dequeue()["array"][999] == 999 and trusting.dequeue()["scalar"] == 2
            queue.enqueue(Harmful())
            with pytest.raises(shmesh.Denied, match="allow_pickle"):
                careful.dequeue()
            assert trusting.dequeue() == os.getenv("HOME")
    with shmesh.MessageQueue(1000, name="shared", mode=0o660) as queue, shmesh.MessageQueue.attach("shared") as careful:
        queue.enqueue(Harmful())
        with pytest.raises(shmesh.Denied):
            careful.dequeue()


def test_messages_that_are_no_objects() -> None:
    with shmesh.Link.create("queue", ring_mode="broadcast") as writer, shmesh.MessageQueue.attach("queue") as reader:
        head = (0x316A624F).to_bytes(4, "little")
        for message in (
            b"",
            b"abc",
            b"x" * 200,
            head + b"\xff" * 12,
            head + bytes(4) + (1 << 40).to_bytes(8, "little") + b"x" * 200,
            head + (1).to_bytes(4, "little") + bytes(8) + (1 << 60).to_bytes(8, "little") + b"x" * 200,
        ):
            writer.send(message, b"x" * 100)
            with pytest.raises(shmesh.Damaged):
                reader.dequeue(timeout=WATCHDOG)
        assert writer.receive() is not None, "what the reader said when it attached"


def test_kept_exception_keeps_no_buffer() -> None:
    kept: list[Exception] = []
    with shmesh.MessageQueue(1 << 16, depth=2, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        for _ in range(10):
            for value in (lambda: None, np.zeros(1 << 16)):
                try:
                    queue.enqueue(value)
                except Exception as error:
                    kept.append(error)
            queue.enqueue(np.zeros(5000), timeout=WATCHDOG)
            assert reader.dequeue().sum() == 0
        assert len(kept) == 20


def is_idle(pid: int, rate: float, wait: Callable[[], None]) -> bool:
    """Whether the process is woken less often than so many times a second while it waits; other threads of it, such as those of the
    test's runner, may disturb some of the attempts."""
    for _ in range(5):
        before, start = switches(pid), time.monotonic()
        wait()
        if switches(pid) - before < rate * (time.monotonic() - start):
            return True
    return False


@pytest.mark.parametrize("seconds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_idle_readers_and_a_writer_without_room_do_not_wake_up(seconds: int) -> None:
    mine, other = SPAWN.Pipe()
    with shmesh.MessageQueue(1000, depth=2, readers=1, name="queue") as queue:
        reader = SPAWN.Process(target=attach_and_wait, args=("queue", 0, other))
        reader.start()
        assert reader.pid is not None
        queue.enqueue("ready")
        assert mine.recv() == "ready"
        # One a second is the link's own; a loop that looks twenty times a second would have 20 a second.
        assert is_idle(reader.pid, 7, lambda: time.sleep(seconds))
        with shmesh.MessageQueue.attach("queue", 1) as slow:
            for number in range(2):
                queue.enqueue(number, timeout=WATCHDOG)
            reader.kill()
            reader.join()
            with pytest.raises(shmesh.PeerDied, match="reader 0"):
                queue.enqueue("none", timeout=WATCHDOG)

            def no_room() -> None:
                with pytest.raises(shmesh.Timeout):
                    queue.enqueue("none", timeout=seconds)

            assert is_idle(os.getpid(), 10, no_room)
            assert slow.dequeue() == 0


@pytest.mark.long
def test_full_queue_and_an_empty_one_wake_each_other_up() -> None:
    # A lost wake-up costs a second: so many would not end within the time of this test.
    count = 2_000
    with shmesh.MessageQueue(1 << 16, depth=2, spin_us=0, name="queue") as queue:
        readers = [shmesh.MessageQueue.attach("queue", rank) for rank in range(2)]
        sums: list[int] = []
        threads = [
            threading.Thread(target=lambda reader=reader: sums.append(sum(reader.dequeue() for _ in range(count))), daemon=True)
            for reader in readers
        ]
        for thread in threads:
            thread.start()
        for number in range(count):
            queue.enqueue(number, timeout=WATCHDOG)
        for thread in threads:
            thread.join(WATCHDOG)
        assert sums == 2 * [count * (count - 1) // 2]
        for reader in readers:
            reader.close()


def test_reader_that_dies_wakes_a_writer_without_room() -> None:
    with shmesh.MessageQueue(1000, depth=2, readers=1, name="queue") as queue:
        victim = SPAWN.Process(target=attach_and_stop, args=("queue", 5))
        victim.start()
        queue.wait_until_ready(WATCHDOG)
        queue.enqueue(0)
        queue.enqueue(1)
        with later(0.2, victim.kill), pytest.raises(shmesh.PeerDied, match="reader 5") as error:
            queue.enqueue(2)
        assert error.value.rank == 5
        victim.join()
        queue.enqueue(2, timeout=WATCHDOG)


def test_writer_that_dies_or_closes_wakes_readers() -> None:
    writer = SPAWN.Process(target=write_one_and_sleep, args=("queue",))
    writer.start()
    with shmesh.MessageQueue.attach("queue", timeout=WATCHDOG) as reader:
        assert reader.dequeue() == "last"
        with later(0.2, writer.kill), pytest.raises(shmesh.PeerDied, match="writer"):
            reader.dequeue()
        writer.join()
    queue = shmesh.MessageQueue(1000, name="other")
    with shmesh.MessageQueue.attach("other") as reader:
        with later(0.2, queue.close), pytest.raises(EOFError):
            reader.dequeue()


def test_all_killed_leaves_no_memory(ipc: Path) -> None:
    """Writer and reader at once, with objects in the queue and in hands; the next queue of that name removes what has no bytes."""
    script = """
import numpy as np, os, shmesh, signal
queue = shmesh.MessageQueue(1 << 20, readers=1, name="gone")
if os.fork() == 0:
    reader = shmesh.MessageQueue.attach("gone")
    held = reader.dequeue(copy=False)
    os.killpg(0, signal.SIGKILL)
for _ in range(9):
    queue.enqueue(np.zeros(1 << 17))
signal.pause()
"""
    subprocess.run([sys.executable, "-c", script], timeout=WATCHDOG, start_new_session=True)
    left = {entry.name.partition("-")[0]: entry.stat().st_blocks for entry in os.scandir(ipc)}
    assert set(left) <= {"gone.broker", "gone.lock"} and set(left.values()) <= {0}
    with pytest.raises(shmesh.NotFound):
        shmesh.MessageQueue.attach("gone")
    shmesh.MessageQueue(1000, name="gone").close()
    assert os.listdir(ipc) == []


def test_closing_a_queue_ends_what_waits_in_it() -> None:
    with shmesh.MessageQueue(1000, depth=2, name="queue") as queue:
        reader = shmesh.MessageQueue.attach("queue")
        with later(0.2, reader.close), pytest.raises(shmesh.Closed):
            reader.dequeue()
        with shmesh.MessageQueue.attach("queue"):
            queue.enqueue(0)
            queue.enqueue(1)
            with later(0.2, queue.close), pytest.raises(shmesh.Closed):
                queue.enqueue(2)


def test_signals_interrupt_what_waits() -> None:
    with shmesh.MessageQueue(1000, depth=2, readers=2, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        interrupted(lambda: queue.enqueue(0))
        interrupted(reader.dequeue)
        with shmesh.MessageQueue.attach("queue", 1):
            queue.enqueue(0)
            queue.enqueue(1)
            interrupted(lambda: queue.enqueue(2))
        assert [reader.dequeue(), reader.dequeue()] == [0, 1]


def test_arrays_may_be_dropped_while_their_reader_waits() -> None:
    with shmesh.MessageQueue(1 << 16, depth=2, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        queue.enqueue(np.zeros(5000))
        kept = [reader.dequeue(copy=False)]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(reader.dequeue(WATCHDOG).size for _ in range(2)))
        thread.start()
        queue.enqueue(np.zeros(6000))
        with later(0.2, kept.clear):
            queue.enqueue(np.zeros(7000), timeout=WATCHDOG)
        thread.join()
        assert found == [6000, 7000]


def test_asyncio() -> None:
    async def run() -> None:
        with shmesh.MessageQueue(1000, depth=2, readers=1, name="queue") as queue:
            first = asyncio.create_task(queue.enqueue_async("first", timeout=WATCHDOG))
            await asyncio.sleep(0.05)
            assert not first.done()
            reader = shmesh.MessageQueue.attach("queue", 4)
            await first
            assert await reader.dequeue_async(WATCHDOG) == "first"

            # A task that is cancelled has taken no object, and sent none.
            waiting = asyncio.create_task(reader.dequeue_async())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for number in range(2):
                await queue.enqueue_async(number)
            blocked = asyncio.create_task(queue.enqueue_async("never"))
            await asyncio.sleep(0.05)
            assert not blocked.done()
            blocked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await blocked
            with pytest.raises(shmesh.Timeout):
                await queue.enqueue_async("never", timeout=0.05)
            third = asyncio.create_task(queue.enqueue_async("third"))
            assert [await reader.dequeue_async(WATCHDOG) for _ in range(3)] == [0, 1, "third"]
            await third
            with pytest.raises(shmesh.Timeout):
                await reader.dequeue_async(timeout=0.02)

            for number in range(500):
                received = asyncio.create_task(reader.dequeue_async(WATCHDOG))
                await queue.enqueue_async(number, WATCHDOG)
                assert await received == number
            waiting = asyncio.create_task(reader.dequeue_async())
            await asyncio.sleep(0.05)
            queue.close()
            with pytest.raises(EOFError):
                await waiting
            reader.close()

    asyncio.run(run())


def test_descriptor() -> None:
    with shmesh.MessageQueue(1000, depth=2, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        with select.epoll() as epoll:
            epoll.register(reader.fileno(), select.EPOLLIN)
            with pytest.raises(shmesh.Timeout):
                reader.dequeue(timeout=0)
            until_quiet(lambda: epoll.poll(0), reader.take_signal)
            queue.enqueue("x")
            assert epoll.poll(WATCHDOG) != []
            reader.take_signal()
            assert reader.dequeue(timeout=0) == "x"
            until_quiet(lambda: epoll.poll(0), reader.take_signal)
