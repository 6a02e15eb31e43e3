"""Queues of batches in `asyncio` and by their descriptor."""

import asyncio
import multiprocessing
import selectors
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import workers

import shmesh

WATCHDOG = 200


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def watched() -> Any:
        return await asyncio.wait_for(work, WATCHDOG)

    return asyncio.run(watched())


@pytest.mark.long
def test_async_for_ends_with_the_last_producer() -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(1024, producers=2)
    producers = [context.Process(target=workers.produce, args=(queue, first, 20)) for first in (0, 100)]

    async def numbers() -> list[int]:
        return [batch.meta["number"] async for batch in queue]

    for process in producers:
        process.start()
    assert sorted(run(numbers())) == [*range(20), *range(100, 120)]
    for process in producers:
        process.join()
        assert process.exitcode == 0
    queue.close()


def test_one_loop_produces_and_consumes() -> None:
    """More batches than buffers: each side waits for the other many times, in one thread."""
    queue = shmesh.BatchQueue(1024, depth=2)

    async def produce() -> None:
        for number in range(200):
            if number % 2:
                await queue.put_async({"x": np.full(3, number)}, meta=number)
            else:
                with await queue.batch_async({"x": (3, "i8")}, meta=number) as batch:
                    batch["x"][...] = number

    async def consume() -> None:
        for number in range(200):
            batch = await queue.get_async()
            assert batch.meta == number and batch["x"].tolist() == [number] * 3
            del batch

    async def both() -> None:
        await asyncio.gather(produce(), consume())

    run(both())
    queue.close()


def test_put_that_waits_is_woken() -> None:
    queue = shmesh.BatchQueue(1000, depth=2)

    async def wait_for_room() -> None:
        queue.put({"x": np.zeros(1)}, meta=0)
        queue.put({"x": np.zeros(1)}, meta=1)
        third = asyncio.create_task(queue.put_async({"x": np.zeros(1)}, meta=2))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(third), 0.05)
        queue.get().release()
        await third

    run(wait_for_room())
    assert [queue.get(WATCHDOG).meta for _ in range(2)] == [1, 2]
    queue.close()


def test_cancelled_task_loses_no_batch() -> None:
    queue = shmesh.BatchQueue(1000, depth=4)
    got: list[int] = []

    async def cancel_at_each_moment() -> None:
        for number in range(100):
            task = asyncio.create_task(queue.get_async())
            for _ in range(number % 5):
                await asyncio.sleep(0)
            await queue.put_async({"x": np.zeros(1)}, meta=number)
            for _ in range(number % 7):
                await asyncio.sleep(0)
            task.cancel()
            try:
                got.append((await task).meta)
            except asyncio.CancelledError:
                got.append((await queue.get_async()).meta)
            del task

    run(cancel_at_each_moment())
    assert got == list(range(100))
    queue.close()


def test_cancelled_puts_send_nothing_and_keep_no_buffer() -> None:
    queue = shmesh.BatchQueue(1000, depth=2)

    async def cancel() -> None:
        for number in range(2):
            queue.put({"x": np.zeros(1)}, meta=number)
        tasks = [asyncio.create_task(queue.put_async({"x": np.zeros(1)}, meta=9)) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        assert all(isinstance(done, asyncio.CancelledError) for done in await asyncio.gather(*tasks, return_exceptions=True))

    run(cancel())
    assert [queue.get().meta for _ in range(2)] == [0, 1]
    assert queue.get_nowait() is None
    batches = [queue.batch({"x": (1, "u1")}, timeout=WATCHDOG) for _ in range(2)]
    assert len(batches) == 2, "all buffers are there"
    del batches
    queue.close()


def test_time_limits_deaths_and_the_end() -> None:
    queue = shmesh.BatchQueue(1000, producers=2)

    async def wait() -> None:
        with pytest.raises(shmesh.Timeout):
            await queue.get_async(timeout=0.02)
        with pytest.raises(shmesh.Timeout):
            await queue.get_async(timeout=0)
        victim = multiprocessing.get_context("spawn").Process(target=workers.produce_and_die, args=(queue, 1, 1))
        victim.start()
        assert (await queue.get_async()).meta["number"] == 0
        with pytest.raises(shmesh.PeerDied):
            await queue.get_async()
        victim.join()
        with shmesh.BatchQueue.attach(queue.name) as producer:
            await producer.put_async({"x": np.zeros(1)}, meta=7, timeout=WATCHDOG)
        assert (await queue.get_async(timeout=WATCHDOG)).meta == 7
        with pytest.raises(EOFError):
            await queue.get_async()
        with pytest.raises(shmesh.TooLong, match="nbytes"):
            await queue.put_async({"x": np.zeros(1000)})

    run(wait())
    queue.close()


def test_task_that_waits_ends_when_the_queue_is_closed() -> None:
    queue = shmesh.BatchQueue(1000)

    async def close_under_it() -> None:
        task = asyncio.create_task(queue.get_async())
        await asyncio.sleep(0.02)
        queue.close()
        with pytest.raises(shmesh.Closed):
            await task

    run(close_under_it())


def test_selector_sees_batches_and_the_end() -> None:
    context = multiprocessing.get_context("spawn")
    queue = shmesh.BatchQueue(1024, producers=1)
    numbers: list[int] = []
    with selectors.DefaultSelector() as selector:
        selector.register(queue, selectors.EVENT_READ)
        process = context.Process(target=workers.produce, args=(queue, 0, 30))
        process.start()
        with pytest.raises(EOFError):
            while True:
                batch = queue.get_nowait()
                if batch is not None:
                    numbers.append(batch.meta["number"])
                    del batch
                else:
                    assert selector.select(WATCHDOG), "the descriptor signals batches and the end"
    assert numbers == list(range(30))
    process.join()
    queue.close()


def test_time_limit_holds_while_others_take_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = shmesh.BatchQueue(1000, name="queue")
    queue.put({"x": np.zeros(1)})
    # As a consumer sees it that loses each race.
    monkeypatch.setattr(queue, "_take", lambda: None)
    with pytest.raises(shmesh.Timeout):
        queue.get(timeout=0.02)
    with pytest.raises(shmesh.Timeout):
        run(queue.get_async(timeout=0.02))

    class Loser(shmesh.Link):
        def try_receive(self) -> None:
            return None

    with Loser.create("link") as loser, shmesh.Link.attach("link") as peer:
        peer.send(b"x")
        assert loser.receive(timeout=0.02) is None
        assert shmesh.Link.try_receive(loser) is not None
    monkeypatch.undo()
    queue.get()
    queue.close()


def test_kept_exception_keeps_no_buffer() -> None:
    kept: list[Exception] = []
    with shmesh.Link.create("link", pools={"cpu_data": (4096, 8)}, ring_len=4) as link:
        for _ in range(4):
            link.send(b"x")
        for _ in range(20):
            try:
                link.send(b"y", np.zeros(10))
            except shmesh.Exhausted as error:
                kept.append(error)
        loans = [link.loan(data=1) for _ in range(8)]
        assert len(kept) == 20 and len(loans) == 8, "all buffers are there"
        del loans
        other = shmesh.Link.attach("link")
        while other.receive() is not None:
            pass
        other.close()
    queue = shmesh.BatchQueue(1000, depth=2)
    for _ in range(5):
        try:
            with queue.batch({"x": (3, "f4")}, timeout=0) as batch:
                batch["x"][...] = "nonsense"
        except ValueError as error:
            kept.append(error)
    assert len(kept) == 25
    del batch
    queue.close()
