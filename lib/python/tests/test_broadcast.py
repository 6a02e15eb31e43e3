"""Broadcast links between processes: everything to each reader, the dead and the slow, and the latest value."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import workers

import shmesh

MESSAGES = 300
CONTEXT = multiprocessing.get_context("spawn")


def start(work: Any, *args: Any) -> tuple[Any, Any]:
    """A process, and where it says what it has found."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(*args, there), daemon=True)
    process.start()
    there.close()
    return process, here


def until_readers(link: shmesh.Link, count: int) -> None:
    end = time.monotonic() + 200
    while link.readers != count:
        assert time.monotonic() < end, f"{link.readers} readers, not {count}"
        time.sleep(0.001)


def until_attached(link: shmesh.Link, readers: list[tuple[Any, Any]]) -> None:
    # They say so: a reader is counted a moment before it is attached.
    assert [said(pipe) for _, pipe in readers] == ["attached"] * len(readers)
    assert link.readers == len(readers)


def send(link: shmesh.Link, number: int) -> bool:
    """Sends a number: in the ring, or with as many bytes of DATA. ``False``: there is no room now."""
    try:
        if number % 2 == 0:
            link.send_inline(number.to_bytes(4, "little"), msg_id=number)
            return True
        with link.loan(4, 100 + number) as loan:
            loan.msg[:] = bytearray(number.to_bytes(4, "little"))
            loan.data[:] = number % 256
            loan.send(msg_id=number)
        return True
    except shmesh.Exhausted:
        return False


def found(reader: tuple[Any, Any]) -> Any:
    process, pipe = reader
    result = said(pipe)
    process.join()
    return result


def said(pipe: Any) -> Any:
    assert pipe.poll(200), "it says nothing"
    return pipe.recv()


def test_each_reader_gets_everything_and_a_dead_one_holds_up_none() -> None:
    pools = {"cpu_msg": (64, 8), "cpu_data": (1024, 8)}
    with shmesh.Link.create("all", ring_mode="broadcast", ring_len=8, pools=pools) as link:
        readers = [start(workers.read_broadcast, "all", MESSAGES - 1) for _ in range(3)]
        holder, pipe = start(workers.hold_broadcast, "all")
        until_attached(link, [*readers, (holder, pipe)])
        is_held_up = False
        for number in range(MESSAGES):
            while not send(link, number):
                if not is_held_up:
                    is_held_up = True
                    holder.kill()
                    holder.join()
                time.sleep(0.001)
        assert is_held_up, "the one that holds a message holds up the writer"
        for reader in readers:
            assert found(reader) == (list(range(MESSAGES)), 0)
        until_readers(link, 0)


def test_slow_reader_is_evicted() -> None:
    with shmesh.Link.create("evict", ring_mode="broadcast", ring_len=4, slow="evict") as link:
        holder = start(workers.hold_broadcast, "evict")
        until_attached(link, [holder])
        for number in range(20):
            while not send(link, number):
                time.sleep(0.001)
        assert found(holder) == "Evicted"
        assert link.readers == 0


@pytest.mark.long
def test_readers_of_the_latest_value_count_what_they_lose() -> None:
    with shmesh.Link.create("latest", ring_mode="broadcast", ring_len=2, slow="skip", history=1) as link:
        readers = [start(workers.read_broadcast, "latest", MESSAGES - 1) for _ in range(2)]
        until_attached(link, readers)
        assert all(send(link, number) for number in range(MESSAGES)), "the writer never waits"
        for reader in readers:
            numbers, lost = found(reader)
            assert numbers == sorted(set(numbers)) and len(numbers) + lost == MESSAGES
        with shmesh.Link.attach("latest") as newcomer, newcomer.try_receive() as latest:
            assert latest.msg_id == MESSAGES - 1


def test_writer_waits_for_its_readers() -> None:
    with shmesh.Link.create("awaited", ring_mode="broadcast") as link, ThreadPoolExecutor() as pool:
        assert not link.wait_for_readers(1, timeout=0)
        waiting = pool.submit(link.wait_for_readers, 2, 200)
        with shmesh.Link.attach("awaited"):
            assert not waiting.done(), "one is not enough"
            with shmesh.Link.attach("awaited"):
                assert waiting.result(200)
                assert link.wait_for_readers(2)
                assert not link.wait_for_readers(3, timeout=0.01)


@pytest.mark.parametrize("mode", ["mpmc", "spsc"])
def test_other_links_have_no_readers(mode: Any) -> None:
    with shmesh.Link.create("stream", ring_mode=mode) as link, shmesh.Link.attach("stream") as other:
        assert (link.readers, other.readers, other.lost) == (0, 0, 0)
