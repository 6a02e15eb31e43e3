"""Requests and replies between processes, in tasks, and when either side dies."""

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import workers
from interrupts import is_asleep

import shmesh

WATCHDOG = 200
T = TypeVar("T")


def run(task: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(task, WATCHDOG)

    return asyncio.run(bounded())


def take(server: shmesh.Link) -> shmesh.Request:
    request = server.receive_request(WATCHDOG)
    assert request is not None, "a request comes"
    return request


def text(message: shmesh.Message | None) -> bytes:
    assert message is not None, "a reply comes"
    return bytes(message)


@contextmanager
def process(target: Any, *args: Any) -> Iterator[Any]:
    """A process, and a connection to it; killed at the end if it still runs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*args, theirs))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()


def ends(**options: Any) -> tuple[shmesh.Link, shmesh.Link]:
    server = shmesh.Link.create("link", requests=4, pools={"cpu_msg": (4096, 32), "cpu_data": (65_536, 16)}, **options)
    return server, shmesh.Link.attach("link")


def loans_of(link: shmesh.Link) -> int:
    """The number of messages with DATA that can be loaned, which is the number of free buffers."""
    loans = []
    try:
        while True:
            loans.append(link.loan(0, 0))
    except shmesh.Exhausted:
        return len(loans)


def test_another_process_answers_each_kind() -> None:
    client_ends_first = []
    with process(workers.serve_requests, "link") as (child, ready):
        assert ready.recv() == "serving"
        with shmesh.Link.attach("link") as client:
            for size in (0, 1, 104, 105, 112, 113, 4000):
                sent = bytes(range(256)) * 16
                assert text(client.request(sent[:size]).wait(WATCHDOG)) == sent[:size][::-1]
            array = np.arange(1000, dtype=np.uint16)
            reply = client.request(b"array", array, msg_id=7).wait(WATCHDOG)
            assert reply is not None and reply.msg_id == 7
            assert (reply.data.view(np.uint16) == array * 2).all()
            loan = client.loan(4)
            loan.msg[:] = [1, 2, 3, 4]
            assert text(client.request(loan, msg_id=1).wait(WATCHDOG)) == bytes([4, 3, 2, 1])
            with pytest.raises(shmesh.Closed):
                loan.send()
            parts = [bytes(part) for part in client.request(b"count 50", msg_id=2)]
            assert parts == [str(number).encode() for number in range(50)] + [b"end"]
            client_ends_first.append(client.request(b"stop", msg_id=3).wait(WATCHDOG))
            reply = None
        child.join(WATCHDOG)
        assert child.exitcode == 0
    client_ends_first.clear()


def test_requests_end_with_their_objects() -> None:
    server, client = ends()
    pending = [client.request(str(i).encode()) for i in range(4)]
    with pytest.raises(shmesh.Exhausted, match="pending"):
        client.request(b"fifth")
    assert pending[0].wait(0.001) is None and not pending[0].is_ready
    first = take(server)
    assert (bytes(first), first.client, first.is_wanted) == (b"0", client.seat, True)
    pending.pop(0)
    gc.collect()
    assert not first.is_wanted
    assert first.reply(b"late") is False
    client.request(b"fifth").drop()
    # Dropped by the server: replies that it had sent come first.
    second = take(server)
    assert second.reply(b"part", more=True)
    msg = second.msg
    del second
    assert text(pending[0].wait(WATCHDOG)) == b"part"
    with pytest.raises(shmesh.Unanswered):
        pending[0].wait(WATCHDOG)
    assert pending[0].is_over and list(pending[0]) == []
    with pytest.raises(shmesh.Closed):
        pending[0].try_take()
    assert msg.tobytes() == b"1", "an array keeps the bytes, and not the client"
    with pytest.raises(shmesh.StillViewed):
        server.close()
    del first, msg
    pending[1].drop()
    with pytest.raises(shmesh.Closed, match="dropped"):
        pending[1].wait(WATCHDOG)
    with client.request(b"last") as last:
        pass
    assert last.is_over
    pending.clear()
    del last
    while (left := server.receive_request()) is not None:
        assert left.reply() is False
    del left
    assert loans_of(server) == 16
    client.close()
    server.close()


def test_messages_that_are_not_requests_are_refused() -> None:
    server, client = ends()
    for refused in (lambda: server.request(b"x"), client.receive_request, client.requests().__iter__().__next__):
        with pytest.raises(shmesh.Invalid):
            refused()
    with pytest.raises(shmesh.TooLong):
        client.request(b"x", np.zeros(100_000, np.uint8))
    pending = client.request(b"x")
    request = take(server)
    with pytest.raises(shmesh.Timeout):
        for _ in range(8):
            request.reply(b"part", more=True, timeout=0.01)
    assert text(pending.wait(WATCHDOG)) == b"part"
    assert request.reply(b"last")
    with pytest.raises(shmesh.Closed):
        request.reply(b"one more")
    assert [bytes(reply) for reply in pending] == [b"part"] * 6 + [b"last"]
    del request, pending
    with shmesh.Link.create("plain") as plain, shmesh.Link.attach("plain") as other:
        with pytest.raises(shmesh.Invalid):
            other.request(b"x")
        assert plain.pool("cpu_msg") is not None
    client.close()
    server.close()


def test_dead_server_fails_what_it_took_and_no_other() -> None:
    server, client = ends()
    server.close()
    with process(workers.hold_request, "link") as (child, ready):
        assert ready.recv() == "attached"
        held, waiting = client.request(b"held"), client.request(b"waits")
        assert ready.recv() == "held"
        assert text(held.wait(WATCHDOG)) == b"part"
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(shmesh.PeerDied, match=str(child.pid)):
            held.wait(WATCHDOG)
    with shmesh.Link.attach("link", "primary", timeout=WATCHDOG) as heir:
        assert take(heir).reply(b"answer")
        assert text(waiting.wait(WATCHDOG)) == b"answer"
    del held, waiting
    client.close()


def test_dead_client_waits_no_more() -> None:
    server, client = ends()
    with process(workers.ask_and_wait, "link") as (child, ready):
        request = take(server)
        assert ready.recv() == "asked"
        assert request.is_wanted and request.reply(b"part", more=True)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    while request.is_wanted:
        server.recover()
    assert request.reply(b"late") is False
    del request
    assert loans_of(server) == 16
    client.close()
    server.close()


def test_threads_wait_while_others_ask() -> None:
    server, client = ends()
    answers: dict[int, bytes] = {}

    def wait(number: int, pending: shmesh.PendingReply) -> None:
        answers[number] = text(pending.wait(WATCHDOG))

    threads = []
    for number in range(4):
        thread = threading.Thread(target=wait, args=(number, client.request(str(number).encode())))
        thread.start()
        threads.append(thread)
    requests = [take(server) for _ in threads]
    for request in reversed(requests):
        assert request.reply(b"to " + bytes(request))
    for thread in threads:
        thread.join()
    assert answers == {number: f"to {number}".encode() for number in range(4)}
    del request, requests, thread, threads
    client.close()
    server.close()


def test_tasks_ask_and_answer() -> None:
    server, client = ends()

    async def serve() -> None:
        async for request in server.requests():
            if bytes(request) == b"stop":
                await request.reply_async(b"stopped")
                return
            for part in range(20):
                assert await request.reply_async(str(part).encode(), more=True)
            assert await request.reply_async(bytes(request))

    async def ask(name: bytes) -> list[bytes]:
        return [bytes(reply) async for reply in client.request(name)]

    async def both() -> None:
        serving = asyncio.create_task(serve())
        for answers, name in zip(await asyncio.gather(*(ask(name) for name in (b"a", b"b", b"c"))), (b"a", b"b", b"c")):
            assert answers == [str(part).encode() for part in range(20)] + [name]
        assert bytes(await client.request(b"stop")) == b"stopped"
        await serving

    run(both())
    gc.collect()
    client.close()
    server.close()


@pytest.mark.parametrize("in_task", [False, True])
def test_reply_beyond_the_share_of_a_slow_client_waits(in_task: bool) -> None:
    server, client = ends()
    pending = [client.request(b"all of it") for _ in range(2)]
    requests = [take(server) for _ in pending]
    data = np.zeros(200, np.uint8)
    for sent in range(6):
        assert requests[sent // 4].reply(b"part", data, more=True, timeout=0)
    with pytest.raises(shmesh.Timeout):
        requests[1].reply(b"part", data, more=True, timeout=0.01)
    loan = server.loan(0, 200)
    other = client.request(b"another")
    requests.append(take(server))
    assert requests[2].reply(b"first", data, more=True, timeout=0)
    client_takes = threading.Timer(0.2, lambda: [pending[0].try_take() for _ in range(4)])
    client_takes.start()
    if in_task:
        assert run(requests[2].reply_async(loan))
    else:
        assert requests[2].reply(loan, timeout=WATCHDOG)
    client_takes.join()
    assert [bytes(reply.data) for reply in other] == [bytes(200)] * 2
    del pending, requests, other
    gc.collect()
    client.close()
    server.close()


def test_cancelled_task_loses_no_reply_and_gives_its_request_up() -> None:
    server, client = ends()

    async def cancel() -> None:
        pending = client.request(b"kept")
        waiting = asyncio.ensure_future(pending.wait_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        request = take(server)
        assert request.is_wanted and request.reply(b"answer")
        assert bytes(await pending) == b"answer"

        async def ask() -> bytes:
            # At once, and not when the exception is gone.
            with client.request(b"dropped") as pending:
                return bytes(await pending)

        asking = asyncio.create_task(ask())
        dropped = await server.receive_request_async()
        assert bytes(dropped) == b"dropped" and dropped.is_wanted
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not dropped.is_wanted
        serving = asyncio.ensure_future(server.receive_request_async())
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        pending = client.request(b"next")
        assert bytes(await server.receive_request_async()) == b"next"

    run(cancel())
    gc.collect()
    client.close()
    server.close()


def test_forked_child_ends_no_request_of_its_parent() -> None:
    server, client = ends()
    pending = [client.request(b"inline"), client.request(b"buffer", np.zeros(10))]
    requests = [take(server), take(server)]
    array = requests[1].data
    # Threads that wait hold locks, which nothing releases in the child.
    pending += [client.request(b"unread"), client.request(b"unanswered")]
    requests += [take(server), take(server)]
    for _ in range(7):
        assert requests[2].reply(b"part", more=True)
    waits = [lambda request=requests[2]: request.reply(b"end"), lambda waiting=pending[3]: waiting.wait()]
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    for thread in threads:
        while not is_asleep(thread):
            time.sleep(0.01)
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=workers.leave_requests, args=(pending, requests, queue))
    child.start()
    assert queue.get() == ["Forked"] * 5
    child.join()
    assert child.exitcode == 0
    assert all(request.is_wanted for request in requests) and array.sum() == 0
    assert [bytes(part) for part in pending[2]] == [b"part"] * 7 + [b"end"]
    assert requests[3].reply(b"answer")
    for thread in threads:
        thread.join()
    for request, waiting in zip(requests[:2], pending):
        assert request.reply(bytes(request))
        assert text(waiting.wait(WATCHDOG)) == bytes(request)
    del request, waiting, array, thread, threads, waits
    pending.clear()
    requests.clear()
    queue.close()
    assert loans_of(server) == 16
    client.close()
    server.close()
