"""The functions of the tests' child processes. Importable, for `spawn`."""

import os
import signal
import time
from typing import Any

import numpy as np

import shmesh


def total(array: np.ndarray, queue: Any) -> None:
    queue.put((float(np.asarray(array).sum()), array.flags.writeable, type(array).__name__))


def come_and_go(name: str, orders: Any) -> None:
    """Attaches and detaches, and attaches for as long as it lives."""
    with shmesh.Link.attach(name, timeout=200):
        orders.recv()
    orders.recv()
    link = shmesh.Link.attach(name)
    time.sleep(300)
    del link


def read_broadcast(name: str, last: int, result: Any) -> None:
    """Says which numbers it got up to the last one, and how many it lost."""
    numbers = []
    with shmesh.Link.attach(name, timeout=200) as link:
        result.send("attached")
        while not numbers or numbers[-1] != last:
            link.wait(200)
            message = link.try_receive()
            if message is None:
                continue
            with message:
                number = int.from_bytes(bytes(message), "little")
                assert number == message.msg_id
                assert len(message.data) == (100 + number if number % 2 else 0)
                assert (message.data == number % 256).all()
                numbers.append(number)
        result.send((numbers, link.lost))


def hold_broadcast(name: str, result: Any) -> None:
    """Never releases the messages that have DATA, until it is killed or evicted."""
    held = []
    try:
        with shmesh.Link.attach(name, timeout=200) as link:
            result.send("attached")
            while True:
                held.append(link.try_receive())
                time.sleep(0.001)
    except shmesh.Error as error:
        result.send(type(error).__name__)


def total_of(array: np.ndarray) -> float:
    return float(np.asarray(array).sum())


def fill(array: np.ndarray, value: float) -> None:
    array[...] = value


def identity(array: np.ndarray) -> np.ndarray:
    return array


def hold(array: np.ndarray, ready: Any) -> None:
    """Says when it has read the array, and then has it until it is killed."""
    ready.send(float(array.sum()))
    time.sleep(300)


def make_and_hold(name: str, ready: Any) -> None:
    array = shmesh.empty((1024, 1024), np.uint8, name)
    array[...] = 3
    ready.send((os.getpid(), shmesh.Memory.handle(array.memory)[0]))
    time.sleep(300)


def produce(queue: shmesh.BatchQueue, first: int, count: int) -> None:
    with queue:
        for number in range(first, first + count):
            queue.put({"x": np.full((8, 4), number, np.float32)}, meta={"number": number})


def attach_and_produce(name: str, first: int, count: int) -> None:
    end = time.monotonic() + 200
    while True:
        try:
            queue = shmesh.BatchQueue.attach(name)
            break
        except shmesh.NotFound:
            assert time.monotonic() < end, "no process answers for the name"
            time.sleep(0.01)
    produce(queue, first, count)


def produce_for_ever(queue: shmesh.BatchQueue) -> None:
    number = 0
    while True:
        number += 1
        with queue.batch({"x": ((50, 100), "f8"), "y": (3, "i8")}, meta={"number": number}) as batch:
            batch["x"][...] = number
            batch["y"][...] = number


def produce_and_die(queue: shmesh.BatchQueue, count: int, held: int) -> None:
    """Sends some, holds others unsent, and is killed."""
    for number in range(count):
        queue.put({"x": np.full((8, 4), number, np.float32)}, meta={"number": number})
    batches = [queue.batch({"x": ((8, 4), np.float32)}) for _ in range(held)]
    assert len(batches) == held
    os.kill(os.getpid(), signal.SIGKILL)


def produce_and_fail(queue: shmesh.BatchQueue) -> None:
    with queue:
        queue.put({"x": np.zeros(3)})
        raise SystemExit(3)


def fail_as_producer(queue: shmesh.BatchQueue) -> None:
    with queue.as_producer():
        raise SystemExit(3)


def consume(queue: shmesh.BatchQueue, results: Any) -> None:
    results.put([batch.meta["number"] for batch in queue])


def consume_and_die(queue: shmesh.BatchQueue, ready: Any) -> None:
    batch = queue.get(timeout=200)
    ready.send(batch.meta["number"])
    time.sleep(300)


def echo(name: str, count: int) -> None:
    with shmesh.Link.attach(name, timeout=200) as link:
        for _ in range(count):
            message = link.receive(200)
            assert message is not None
            link.send(bytes(message), msg_id=message.msg_id)


def serve_requests(name: str, ready: Any) -> None:
    """Replies with the reversed bytes, or as the message id says, until a message ends it."""
    with shmesh.Link.create(name, requests=4) as link:
        ready.send("serving")
        for request in link.requests():
            if request.msg_id == 2:
                for number in range(int(bytes(request).split()[1])):
                    assert request.reply(str(number).encode(), more=True, timeout=200)
                assert request.reply(b"end", timeout=200)
            elif request.msg_id == 7:
                loan = link.loan(0, request.data.nbytes)
                loan.data.view(np.uint16)[:] = request.data.view(np.uint16) * 2
                assert request.reply(loan, msg_id=7)
            else:
                assert request.reply(bytes(request)[::-1])
            if request.msg_id == 3:
                return


def hold_request(name: str, ready: Any) -> None:
    """Takes a request, replies once, and has it until it is killed."""
    with shmesh.Link.attach(name, "primary", timeout=200) as link:
        ready.send("attached")
        request = link.receive_request(200)
        assert request is not None and request.reply(b"part", more=True)
        ready.send("held")
        time.sleep(300)


def ask_and_wait(name: str, ready: Any) -> None:
    with shmesh.Link.attach(name, timeout=200) as link:
        pending = link.request(b"question", np.zeros(100))
        ready.send("asked")
        assert pending.wait(200) is not None
        time.sleep(300)


def leave_requests(pending: list[shmesh.PendingReply], requests: list[shmesh.Request], queue: Any) -> None:
    """What comes of using requests of before the fork, and of dropping them."""
    errors = []
    uses = (
        lambda: pending[0].wait(0),
        lambda: pending[0].try_take(),
        lambda: requests[0].msg,
        lambda: requests[0].reply(b"x"),
        lambda: requests[1].is_wanted,
    )
    for use in uses:
        try:
            use()
        except shmesh.Forked:
            errors.append("Forked")
    for reply in pending:
        assert reply.is_over
        reply.drop()
    for request in requests[1:]:
        request.drop()
    del reply, request, pending[:], requests[:]
    queue.put(errors)


def use_link(link: shmesh.Link, queue: Any) -> None:
    """The result of using a handle from before the fork."""
    try:
        link.send(b"x")
    except shmesh.Forked as error:
        queue.put(str(error))
    else:
        queue.put(None)


def leave_loan(loan: shmesh.Loan, link: shmesh.Link, queue: Any) -> None:
    errors = []
    for use in (loan.send, lambda: loan.data, link.try_receive):
        try:
            use()
        except shmesh.Forked:
            errors.append("Forked")
    # Dropped here, it must not come back to the parent's pool.
    del loan
    queue.put(errors)


def import_key(name: str, connection: Any) -> None:
    with shmesh.DeviceSession(name) as session:
        connection.send(session.bare_tgid())
        key = connection.recv()
        # What fails imports nothing: one close is enough below.
        for shape, dtype in ((100, np.int32), (4, object), (None, "nonsense")):
            try:
                session.import_by_key(key, shape, dtype)
            except (shmesh.Mismatch, TypeError):
                continue
            raise AssertionError(f"{shape} of {dtype} was imported")
        array = session.import_by_key(key, 4, np.int32)
        connection.send(array.tolist())
        try:
            session.close(key)
        except shmesh.StillViewed as error:
            assert "`del`" in str(error)
            connection.send("still viewed")
        connection.recv()
        array[0] = 99
        del array
        session.close(key)
        connection.send("closed")


def import_gpu(name: str, connection: Any) -> None:
    with shmesh.GpuSession(name) as session:
        connection.send(session.bare_tgid())
        key = connection.recv()
        array = session.import_by_key(key, (2, 2), np.float32)
        connection.send(array.copy_to_host().tolist())
        try:
            session.close(key)
        except shmesh.StillViewed:
            connection.send("still viewed")
        connection.recv()
        array.copy_from_host([[99, 0], [0, 0]])
        del array
        session.close(key)
        connection.send("closed")
