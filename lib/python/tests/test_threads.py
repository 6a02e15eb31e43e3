"""Threads that use the same objects at the same time. With a GIL they take turns; a free-threaded build lets them loose."""

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmesh

THREADS = 4
TIMES = 200


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time, and raises the exception of any of them."""
    barrier = threading.Barrier(len(bodies))
    results: list[Any] = [None] * len(bodies)
    failures: list[BaseException] = []

    def run(at: int, body: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            results[at] = body()
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def attempt(body: Callable[[], Any], *expected: type[BaseException]) -> Any:
    try:
        return body()
    except expected as failure:
        return type(failure)


@pytest.mark.long
def test_one_link_for_all() -> None:
    with shmesh.Link.create("all", pools={"cpu_data": (4096, 8)}, ring_len=64) as phy, shmesh.Link.attach("all") as mac:

        def send(first: int) -> None:
            for number in range(first, first + TIMES):
                while True:
                    try:
                        loan = mac.loan(8, 8)
                        break
                    except shmesh.Exhausted:
                        pass
                loan.msg.view(np.int64)[0] = number
                loan.data.view(np.int64)[0] = number
                loan.send()

        def receive() -> list[int]:
            numbers = []
            while len(numbers) < TIMES:
                message = phy.try_receive()
                if message is not None:
                    number = int(message.msg.view(np.int64)[0])
                    assert message.data.view(np.int64)[0] == number
                    numbers.append(number)
                    message.release()
            return numbers

        bodies: list[Callable[[], Any]] = [lambda first=n * TIMES: send(first) for n in range(THREADS)]
        results = together(*bodies, *[receive] * THREADS)
        assert sorted(sum(results[THREADS:], [])) == list(range(THREADS * TIMES))


def test_one_loan_is_sent_once() -> None:
    with shmesh.Link.create("once") as phy, shmesh.Link.attach("once") as mac:
        for _ in range(30):
            loans = [mac.loan(8) for _ in range(TIMES)]

            def send_all(loans: list[shmesh.Loan] = loans) -> list[Any]:
                return [attempt(loan.send, shmesh.Closed) for loan in loans]

            for outcomes in zip(*together(*[send_all] * 3), strict=True):
                assert sorted(outcomes, key=str) == [shmesh.Closed, shmesh.Closed, None]
            assert len(phy.receive_batch(2 * TIMES)) == TIMES


def test_one_message_is_released_while_it_is_read() -> None:
    with shmesh.Link.create("read", pools={"cpu_data": (64, 2)}) as phy, shmesh.Link.attach("read") as mac:

        def read(message: shmesh.Message) -> Any:
            array = attempt(lambda: message.data, shmesh.Closed)
            return array if array is shmesh.Closed else int(array.view(np.int64)[0])

        for number in range(TIMES):
            loan = mac.loan(8, 8)
            loan.data.view(np.int64)[0] = number
            loan.send()
            message = phy.receive(timeout=200)
            outcomes = together(*[lambda message=message: read(message)] * 3, message.release)
            # Closed, or all of it: never another object's.
            assert set(outcomes[:3]) <= {shmesh.Closed, number}
        assert phy.try_receive() is None


@pytest.mark.long
def test_memory_is_closed_while_it_is_viewed() -> None:
    for _ in range(TIMES):
        memory = shmesh.Memory.create(4096)

        def view(memory: shmesh.Memory = memory) -> int:
            return int(memory.view(0, 4096).sum())

        def close(memory: shmesh.Memory = memory) -> None:
            memory.close()

        outcomes = together(
            *[lambda view=view: attempt(view, shmesh.Closed)] * 2,
            *[lambda close=close: attempt(close, shmesh.StillViewed)] * 2,
        )
        assert set(outcomes[:2]) <= {0, shmesh.Closed} and set(outcomes[2:]) <= {None, shmesh.StillViewed}
        attempt(close, shmesh.Closed)
        with pytest.raises(shmesh.Closed):
            view()


def test_handles_are_made_and_fetched_by_all() -> None:
    array = shmesh.from_numpy(np.arange(100))

    def hand_on() -> None:
        for _ in range(20):
            assert int(pickle.loads(pickle.dumps(array)).sum()) == 4950

    together(*[hand_on] * THREADS)


def test_names_come_and_go() -> None:
    def name(n: int) -> None:
        for _ in range(20):
            array = shmesh.from_numpy(np.full(3, n), name=f"name-{n}")
            assert shmesh.open(f"name-{n}").tolist() == [n] * 3
            array.unlink()

    together(*[lambda n=n: name(n) for n in range(THREADS)])


def test_one_queue_for_all() -> None:
    with shmesh.BatchQueue(1024, depth=3) as queue:

        def put(first: int) -> None:
            for number in range(first, first + TIMES):
                queue.put({"x": np.full(3, number)}, meta=number)

        def get() -> list[int]:
            numbers = []
            for _ in range(TIMES):
                with queue.get(timeout=200) as batch:
                    assert batch["x"].tolist() == [batch.meta] * 3
                    numbers.append(batch.meta)
            return numbers

        bodies: list[Callable[[], Any]] = [lambda first=n * TIMES: put(first) for n in range(THREADS)]
        results = together(*bodies, *[get] * THREADS)
        assert sorted(sum(results[THREADS:], [])) == list(range(THREADS * TIMES))


@pytest.mark.long
def test_link_is_closed_while_it_is_used() -> None:
    for _ in range(20):
        phy, mac = shmesh.Link.create("closed", backing="memfd"), shmesh.Link.attach("closed")

        def use(mac: shmesh.Link = mac) -> None:
            for _ in range(TIMES):
                mac.send(b"x")

        def receive(phy: shmesh.Link = phy) -> None:
            while True:
                phy.receive(timeout=200)

        together(
            *[lambda use=use: attempt(use, shmesh.Closed, shmesh.Exhausted)] * 2,
            lambda receive=receive: attempt(receive, shmesh.Closed),
            lambda mac=mac: mac.close(strict=False),
            lambda phy=phy: phy.close(strict=False),
        )
