import asyncio
import gc
import multiprocessing
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import workers
from interrupts import interrupted, is_asleep, signalled, until_quiet

import shmesh


def pair(name: str = "link", **options: object) -> tuple[shmesh.Link, shmesh.Link]:
    pools = {"cpu_msg": (1024, 4), "cpu_data": (65_536, 4)}
    primary = shmesh.Link.create(name, pools=pools, ring_len=4, **options)
    return primary, shmesh.Link.attach(name)


def test_sampled_latency_belongs_to_the_shape_of_a_link() -> None:
    link = shmesh.Link.create("link", latency_sample=64)
    with pytest.raises(shmesh.Error, match="latency.sample.*64.*128"):
        shmesh.Link.create("link", latency_sample=128)
    with pytest.raises(shmesh.Error, match="a power of two"):
        shmesh.Link.create("other", latency_sample=100)
    link.close()


def test_messages_are_written_and_read_in_place() -> None:
    phy, mac = pair()
    loan = mac.loan(5, 4096)
    loan.msg[:] = np.frombuffer(b"hello", np.uint8)
    loan.data.view(np.float32)[:] = 1.5
    assert loan.data.ctypes.data % 64 == 0
    loan.send(msg_id=7, cell_id=2)
    message = phy.receive()
    assert message is not None and (message.msg_id, message.cell_id, message.inline) == (7, 2, False)
    assert bytes(message) == b"hello" and message.msg.tolist() == list(b"hello")
    assert message.data.view(np.float32).sum() == 1536
    assert not message.data.flags.writeable and not message.msg.flags.writeable
    with pytest.raises(ValueError):
        message.data.flags.writeable = True
    assert phy.receive() is None


def test_copies_and_inline_messages() -> None:
    phy, mac = pair()
    mac.send(b"up to 112 bytes", msg_id=1)
    mac.send(b"x" * 113)
    mac.send(b"", np.arange(6).reshape(2, 3).T)
    mac.send(bytearray(b"m"), b"bytes, too")
    first, second, third, fourth = phy.receive_batch()
    assert first.inline and bytes(first) == b"up to 112 bytes" and first.data.size == 0
    assert not second.inline and len(bytes(second)) == 113
    assert third.data.view(np.int64).tolist() == [0, 3, 1, 4, 2, 5]
    assert bytes(fourth.data) == b"bytes, too"
    with pytest.raises(shmesh.Invalid, match="pickle"):
        mac.send(b"", np.array([object()]))


def test_loan_is_not_sent_while_arrays_over_it_live() -> None:
    """numpy could go on writing what the receiver reads."""
    phy, mac = pair()
    loan = mac.loan(0, 100)
    data = loan.data
    part = data[10:].view(np.uint16)[::2]
    del data
    with pytest.raises(shmesh.StillViewed, match="del") as error:
        loan.send()
    assert isinstance(error.value, BufferError)
    assert phy.receive() is None
    part[:] = 1
    kept = memoryview(part)
    del part
    with pytest.raises(shmesh.StillViewed):
        loan.send()
    del kept
    loan.send()
    for use in (lambda: loan.data, lambda: loan.msg, loan.send):
        with pytest.raises(shmesh.Closed):
            use()
    message = phy.receive()
    assert message is not None and message.data.size == 100


def test_loan_that_is_not_sent_comes_back_after_its_arrays() -> None:
    phy, mac = pair()
    loans = [mac.loan(1) for _ in range(4)]
    with pytest.raises(shmesh.Exhausted, match="pool_len"):
        mac.loan(1)
    view = loans[0].msg
    del loans
    assert len([mac.loan() for _ in range(3)]) == 3
    gc.collect()
    held = [mac.loan() for _ in range(3)]
    with pytest.raises(shmesh.Exhausted):
        mac.loan()
    view[0] = 5
    del view
    held.append(mac.loan())
    held[0].drop()
    assert held[0].closed and mac.loan() is not None
    del phy


def test_loans_as_contexts() -> None:
    phy, mac = pair()
    with mac.loan(3) as loan:
        loan.msg[:] = 9
    with pytest.raises(KeyError), mac.loan(3) as loan:
        raise KeyError
    assert loan.closed
    with phy.receive() as message:
        assert bytes(message) == b"\x09\x09\x09"
    assert phy.receive() is None and message.released
    with pytest.raises(shmesh.Closed):
        _ = message.msg


def test_buffers_of_a_message_are_free_after_its_last_array() -> None:
    phy, mac = pair()
    for number in range(4):
        mac.send(b"", np.full(1000, number, np.uint8))
    messages = phy.receive_batch(10)
    views = [message.data[500:] for message in messages]
    for message in messages:
        message.release()
    with pytest.raises(shmesh.Exhausted):
        mac.loan()
    assert [int(view[0]) for view in views] == [0, 1, 2, 3]
    views.pop()
    loan = mac.loan(0, 10)
    loan.data[:] = 77
    assert [int(view[0]) for view in views] == [0, 1, 2], "no other message uses a buffer that is viewed"


def test_full_and_too_long() -> None:
    phy, mac = pair(backing="memfd")
    for _ in range(4):
        mac.send(b"x")
    with pytest.raises(shmesh.Exhausted):
        mac.send(b"x")
    kept = phy.receive()
    del kept
    with pytest.raises(shmesh.TooLong, match="buf_size_bytes"):
        mac.loan(1025)
    with pytest.raises(shmesh.TooLong):
        mac.loan(0, 65_537)
    with pytest.raises(shmesh.TooLong, match="loan a buffer"):
        mac.send_inline(b"x" * 113)
    with pytest.raises(shmesh.Invalid, match="not configured"):
        mac.loan(0, 1, pool="cpu_large")
    with pytest.raises(shmesh.Invalid, match="cpu_msg, cpu_data"):
        mac.loan(0, 1, pool="none")
    assert mac.pool("cpu_data") == (65_536, 4) and mac.pool("cpu_large") is None


def test_loan_that_cannot_be_sent_is_kept() -> None:
    phy, mac = pair()
    for _ in range(4):
        mac.send_inline(b"x")
    loan = mac.loan(1)
    loan.msg[0] = 5
    with pytest.raises(shmesh.Exhausted, match="ring"):
        loan.send()
    phy.receive_batch()
    loan.send()
    message = phy.receive()
    assert message is not None and bytes(message) == b"\x05"


def test_batches() -> None:
    phy, mac = pair()
    loans = [mac.loan(1) for _ in range(3)]
    for number, loan in enumerate(loans):
        loan.msg[0] = number
    assert mac.send_batch(loans) == 3
    assert [bytes(message) for message in phy.receive_batch(2)] == [b"\0", b"\1"]
    assert [bytes(message) for message in phy.receive_batch(2)] == [b"\2"]
    assert phy.receive_batch() == []


@pytest.mark.parametrize("mode", ["mpmc", "spsc"])
def test_between_processes(mode: str) -> None:
    context = multiprocessing.get_context("spawn")
    with shmesh.Link.create("echo", ring_mode=mode) as link:
        process = context.Process(target=workers.echo, args=("echo", 200))
        process.start()
        for number in range(200):
            link.send(b"%d" % number * (1 + number % 30), msg_id=number)
            answer = link.receive(200)
            assert answer is not None and answer.msg_id == number
            assert bytes(answer) == b"%d" % number * (1 + number % 30)
        process.join()
        assert process.exitcode == 0


def test_waiting_leaves_the_interpreter_to_others() -> None:
    phy, mac = pair()
    came: list[bytes] = []

    def wait() -> None:
        message = phy.receive(200)
        assert message is not None
        came.append(bytes(message))

    thread = threading.Thread(target=wait)
    thread.start()
    # The same handle can send while another thread waits with it.
    phy.send(b"to mac")
    message = mac.receive(200)
    assert message is not None and bytes(message) == b"to mac"
    mac.send(b"to phy")
    thread.join()
    assert came == [b"to phy"]


def test_timeouts() -> None:
    phy, _mac = pair()
    start = time.monotonic()
    assert phy.wait(0.05) is False and phy.receive(0.05) is None
    assert time.monotonic() - start >= 0.1
    assert phy.wait(0) is False
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(shmesh.Invalid):
            phy.wait(wrong)


def test_signal_ends_a_wait() -> None:
    phy, _mac = pair()
    interrupted(lambda: phy.wait(None))


def test_signal_whose_handler_returns_does_not_shorten_a_wait() -> None:
    phy, _mac = pair()
    while phy.next_event() is not None:
        pass
    start = time.monotonic()
    with signalled(lambda _number, _frame: None):
        assert not phy.wait_any(1.0)
    assert time.monotonic() - start >= 1.0


def test_asyncio() -> None:
    phy, mac = pair()

    async def main() -> list[bytes]:
        seen: list[bytes] = []

        async def read() -> None:
            async for message in phy:
                seen.append(bytes(message))
                if len(seen) == 3:
                    return

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        for number in range(3):
            mac.send(b"%d" % number)
            await asyncio.sleep(0.01 if number == 1 else 0)
        await asyncio.wait_for(task, 200)
        # Cancelled while it waits, it leaves no reader behind.
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(phy.receive_async(), 0.02)
        mac.send(b"after")
        seen.append(bytes(await asyncio.wait_for(phy.receive_async(), 200)))
        return seen

    assert asyncio.run(main()) == [b"0", b"1", b"2", b"after"]


def test_asyncio_with_several_tasks() -> None:
    phy, mac = pair()

    async def main() -> list[bytes]:
        tasks = [asyncio.create_task(phy.receive_async()) for _ in range(3)]
        # All of them wait.
        for _ in range(5):
            await asyncio.sleep(0)
        for number in range(3):
            mac.send(b"%d" % number)
        messages = await asyncio.wait_for(asyncio.gather(*tasks), 200)
        return sorted(bytes(message) for message in messages)

    assert asyncio.run(main()) == [b"0", b"1", b"2"]


def test_asyncio_hears_of_what_was_sent_before_it_listened() -> None:
    phy, mac = pair()

    class Late(shmesh.Link):
        def fileno(self) -> int:
            mac.send(b"no receiver yet")
            return super().fileno()

    with Late.attach("link", "primary", allow_second_primary=True) as late:
        message = asyncio.run(asyncio.wait_for(late.receive_async(), 200))
        assert bytes(message) == b"no receiver yet"
        del message


def test_asyncio_ends_when_the_link_is_closed() -> None:
    phy, mac = pair()
    mac.send(b"1")

    async def main() -> list[bytes]:
        seen = []

        async def read() -> None:
            async for message in phy:
                seen.append(bytes(message))
                del message

        task = asyncio.create_task(read())
        for _ in range(5):
            await asyncio.sleep(0)
        phy.close()
        await asyncio.wait_for(task, 200)
        return seen

    assert asyncio.run(main()) == [b"1"], "and nothing of the message was kept while it waited"


def test_invalid_messages_are_refused() -> None:
    phy, mac = pair()
    for wrong in (5, None, "text", [1, 2]):
        with pytest.raises(TypeError):
            mac.send(wrong)  # type: ignore[arg-type]
    assert phy.receive() is None


def test_wait_is_as_long_as_was_said_though_others_are_faster() -> None:
    phy, mac = pair()

    class Slow(shmesh.Link):
        left = 2

        def try_receive(self) -> shmesh.Message | None:
            # Another participant takes the message that woke this one, twice.
            if self.left > 0 and self.has_message:
                self.left -= 1
                assert phy.receive() is not None
                mac.send(b"next")
                return None
            return super().try_receive()

    with Slow.attach("link", "primary", allow_second_primary=True) as slow:
        mac.send(b"first")
        with slow.receive(200) as message:
            assert bytes(message) == b"next" and slow.left == 0
        del message


def test_signal_ends_the_wait_for_a_link() -> None:
    interrupted(lambda: shmesh.Link.attach("absent", timeout=1000))


def test_selectors() -> None:
    phy, mac = pair()
    with selectors.DefaultSelector() as selector:
        selector.register(phy, selectors.EVENT_READ)

        def drain() -> None:
            while phy.take_signal():
                pass

        until_quiet(lambda: selector.select(0), drain)
        mac.send(b"x")
        assert len(selector.select(200)) == 1
        assert phy.take_signal()
        message = phy.receive()
        assert message is not None and bytes(message) == b"x"
        until_quiet(lambda: selector.select(0), drain)


def test_posts() -> None:
    phy, mac = pair()
    assert phy.wait_tti(0) is False
    mac.post()
    assert phy.wait_tti(200) is True and phy.wait_tti(0) is False


def test_closing() -> None:
    phy, mac = pair()
    mac.send(b"", np.arange(10))
    message = phy.receive()
    assert message is not None
    view = message.data
    with pytest.raises(shmesh.StillViewed, match="release"):
        phy.close()
    message.release()
    with pytest.raises(shmesh.StillViewed):
        phy.close()
    with phy:
        pass
    # The memory stays mapped while it is in use.
    assert phy.closed and view.view(np.int64)[9] == 9
    for use in (phy.receive, lambda: phy.send(b"x"), phy.fileno, lambda: phy.seat, phy.clone().close):
        if use.__name__ == "close":
            use()
            continue
        with pytest.raises(shmesh.Closed, match="attach again"):
            use()
    phy.close()
    assert repr(phy) == "<shmesh.Link link primary closed>"
    del view


def test_iterating_ends_when_the_link_is_closed() -> None:
    phy, mac = pair()
    mac.send(b"1")
    # Not `strict`: the variable of the loop still has the message.
    closing, seen = threading.Timer(0.05, phy.close, kwargs={"strict": False}), []
    for message in phy:
        seen.append(bytes(message))
        closing.start()
    closing.join()
    assert seen == [b"1"]


@pytest.mark.parametrize("call", ["wait", "wait_any", "wait_room"])
def test_closing_a_link_ends_the_wait_of_another_thread(call: str) -> None:
    pools = {"cpu_msg": (64, 4)}
    with shmesh.Link.create("link", pools=pools, ring_len=8, ring_mode="broadcast") as writer, shmesh.Link.attach("link") as reader:
        link, ends = reader, []
        if call == "wait_room":
            link = writer
            for _ in range(4):
                writer.loan(1).send()

        def wait() -> None:
            try:
                while True:
                    while link.next_event() is not None:
                        pass
                    getattr(link, call)()
            except shmesh.Closed:
                ends.append("closed")

        thread = threading.Thread(target=wait)
        thread.start()
        while not is_asleep(thread):
            time.sleep(0.01)
        link.close()
        thread.join()
        assert ends == ["closed"]
        if call == "wait_room":
            assert len(reader.receive_batch()) == 4


def test_participants() -> None:
    phy, mac = pair()
    there = phy.participants()
    assert {(other.side, other.pid, other.alive) for other in there} == {
        ("primary", os.getpid(), True),
        ("secondary", os.getpid(), True),
    }
    assert {other.seat for other in there} == {phy.seat, mac.seat}
    assert phy.recover() == (0, 0, 0)


def test_wrong_configurations(tmp_path: Path) -> None:
    with pytest.raises(shmesh.NotFound, match="start its primary"):
        shmesh.Link.attach("absent")
    with pytest.raises(shmesh.Invalid):
        shmesh.Link.attach("../x")
    with pytest.raises(shmesh.Invalid, match="side"):
        shmesh.Link.attach("x", "third")  # type: ignore[arg-type]
    with pytest.raises(shmesh.Invalid):
        shmesh.Link.create("x", ring_len=0)
    with pytest.raises(shmesh.Invalid):
        shmesh.Link.create("x", pools={"cpu_fast": (1, 1)})
    with pytest.raises(shmesh.NoSpace, match="smaller"):
        shmesh.Link.create("x", pools={"cpu_data": ((1 << 31) - 1, 1 << 8)})
    first = shmesh.Link.create("x")
    with pytest.raises(shmesh.Mismatch, match="same configuration"):
        shmesh.Link.create("x", ring_len=4)
    del first
    config = tmp_path / "links.yaml"
    config.write_text("version: 1\nlinks:\n  - name: y\n    ring: { len: 8 }\n")
    with shmesh.Link.create("y", config=config) as link:
        assert link.ring_len == 8
    config.write_text("version: 1\nlinks:\n  - name: y\n    ring: { len: 0 }\n")
    with pytest.raises(shmesh.Invalid) as wrong:
        shmesh.Link.create("y", config=config)
    assert f" --> {config}:4:18\n" in str(wrong.value) and "ring: { len: 0 }" in str(wrong.value)


def test_configuration_of_several_links(tmp_path: Path) -> None:
    config = tmp_path / "links.yaml"
    config.write_text("version: 1\nlinks:\n  - name: x\n    ring: { len: 8 }\n  - name: y\n    ring: { len: 16 }\n")
    with shmesh.Link.create("y", config=config) as link:
        assert (link.name, link.ring_len) == ("y", 16)
    with pytest.raises(shmesh.Invalid, match="it has x, y"):
        shmesh.Link.create("z", config=config)


def test_full_directory_is_an_exception_with_the_remedy(tmp_path: Path) -> None:
    """An error now, instead of SIGBUS later."""
    script = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x4c000, None):
    raise SystemExit(77)
if libc.mount(b"tmpfs", {os.fsencode(tmp_path)!r}, b"tmpfs", 0, b"size=1m"):
    raise SystemExit(77)
import shmesh
try:
    shmesh.Link.create("big", backing="named", directory={str(tmp_path)!r})
except shmesh.NoSpace as error:
    assert isinstance(error, MemoryError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    if done.returncode == 77:
        pytest.skip("mounting a small tmpfs takes root")
    assert done.returncode == 0, done.stderr
    assert "make pools smaller" in done.stdout and "sizeLimit" in done.stdout


def test_child_of_a_fork_cannot_use_its_parents_handle() -> None:
    phy, mac = pair()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=workers.use_link, args=(mac, queue))
    process.start()
    error = queue.get(timeout=200)
    process.join()
    assert error is not None and "create one in the child" in error
    mac.send(b"still mine")
    message = phy.receive()
    assert message is not None and bytes(message) == b"still mine"


def test_fork_in_the_middle_of_a_loan() -> None:
    phy, mac = pair()
    loan = mac.loan(1, 10)
    loan.data[:] = 4
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=workers.leave_loan, args=(loan, mac, queue))
    process.start()
    assert queue.get(timeout=200) == ["Forked"] * 3
    process.join()
    assert process.exitcode == 0
    # The child dropped its copy without releasing anything: this buffer is not given to another participant.
    others = [mac.loan(1, 10) for _ in range(3)]
    with pytest.raises(shmesh.Exhausted):
        mac.loan()
    loan.send()
    message = phy.receive()
    assert message is not None and message.data.tolist() == [4] * 10
    del others


def test_pickled_link_is_a_participant_of_its_own() -> None:
    phy, mac = pair()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        other = pool.apply(seat_of, (mac,))
    assert other != mac.seat and len(phy.participants()) == 2


def seat_of(link: shmesh.Link) -> int:
    with link:
        return link.seat


def test_killed_participant_gives_its_buffers_back() -> None:
    context = multiprocessing.get_context("spawn")
    phy, mac = pair()
    here, there = context.Pipe()
    process = context.Process(target=take_all, args=("link", there))
    process.start()
    assert here.recv() == 4
    with pytest.raises(shmesh.Exhausted):
        phy.loan()
    process.kill()
    process.join()
    deadline = time.monotonic() + 200
    while True:
        mac.recover()
        try:
            loan = phy.loan()
            break
        except shmesh.Exhausted:
            assert time.monotonic() < deadline
    del loan


def take_all(name: str, ready: object) -> None:
    link = shmesh.Link.attach(name)
    loans = [link.loan(0, 10) for _ in range(4)]
    ready.send(len(loans))  # type: ignore[attr-defined]
    time.sleep(300)


def test_many_threads_on_one_handle() -> None:
    phy, mac = pair()
    count, received = 200, []

    def send(first: int) -> None:
        for number in range(first, first + count):
            while True:
                try:
                    mac.send(b"", np.full(10, number % 251, np.uint8), msg_id=number)
                    break
                except shmesh.Exhausted:
                    time.sleep(0.0005)

    threads = [threading.Thread(target=send, args=(first * count,)) for first in range(3)]
    for thread in threads:
        thread.start()
    while len(received) < 3 * count:
        message = phy.receive(200)
        assert message is not None and set(message.data.tolist()) == {message.msg_id % 251}
        received.append(message.msg_id)
    for thread in threads:
        thread.join()
    assert sorted(received) == list(range(3 * count))


class Peer:
    """Another process, which attaches, detaches and attaches again on command."""

    def __init__(self, name: str) -> None:
        self.orders, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=workers.come_and_go, args=(name, theirs), daemon=True)
        self.process.start()

    def go_on(self) -> None:
        self.orders.send(None)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


STEPS = ["attached", "detached", "attached", "died"]


def act_on(event: shmesh.PeerEvent, peer: Peer, seen: list[str]) -> bool:
    assert (event.pid, event.side) == (peer.process.pid, "secondary")
    seen.append(event.kind)
    assert seen == STEPS[: len(seen)]
    if len(seen) == 3:
        peer.kill()
    elif len(seen) < 3:
        peer.go_on()
    return len(seen) == len(STEPS)


@pytest.mark.parametrize("backing", ["named", "memfd"])
def test_thread_hears_of_peers(backing: str) -> None:
    with shmesh.Link.create("link", backing=backing) as phy:
        assert phy.next_event() is None and phy.next_event(0.01) is None
        peer, seen = Peer("link"), []
        for event in phy.events():
            if act_on(event, peer, seen):
                break
        assert phy.next_event(0.05) is None and not phy.has_event


@pytest.mark.parametrize("backing", ["named", "memfd"])
def test_asyncio_hears_of_peers_beside_messages(backing: str) -> None:
    async def main(phy: shmesh.Link) -> None:
        messages = asyncio.create_task(phy.receive_async())
        peer, seen = Peer("link"), []

        async def listen() -> None:
            async for event in phy.events():
                if act_on(event, peer, seen):
                    return

        await asyncio.wait_for(listen(), 200)
        assert not messages.done()
        messages.cancel()
        before = time.process_time()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(phy.next_event_async(), 0.5)
        assert time.process_time() - before < 0.25, "it spins"

    with shmesh.Link.create("link", backing=backing) as phy:
        asyncio.run(main(phy))


def test_events_name_peers_of_before_and_end_with_the_link() -> None:
    phy, mac = pair()
    thread = threading.Thread(target=lambda: heard.extend(phy.events()))
    heard: list[shmesh.PeerEvent] = []
    thread.start()
    while len(heard) < 1:
        time.sleep(0.001)
    assert heard[0] == ("attached", mac.seat, "secondary", os.getpid(), 0)
    seat = mac.seat
    mac.close()
    while len(heard) < 2:
        time.sleep(0.001)
    assert heard[1] == ("detached", seat, "secondary", os.getpid(), 0)
    phy.close(strict=False)
    thread.join()
    assert len(heard) == 2


@pytest.mark.long
def test_fresh_drops_what_an_earlier_run_left() -> None:
    script = """
import os, shmesh
link = shmesh.Link.create("run")
link.send(b"of the last run")
assert link.was_created
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
    with shmesh.Link.create("run") as phy, shmesh.Link.attach("run") as mac:
        assert not phy.was_created and not mac.was_created and mac.queued == 1
        with pytest.raises(shmesh.AlreadyExists, match="fresh"):
            shmesh.Link.create("run", fresh=True)
        message = mac.receive(timeout=200)
        assert message is not None and bytes(message) == b"of the last run"
        del message
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
    with shmesh.Link.create("run", fresh=True) as phy, shmesh.Link.attach("run") as mac:
        assert not phy.was_created and mac.queued == 0 and phy.queued == 0


def test_link_has_the_backing_that_other_languages_default_to(tmp_path: Path) -> None:
    config = tmp_path / "links.yaml"
    config.write_text("version: 1\nlinks:\n  - name: x\n")
    with shmesh.Link.create("x", config=config), shmesh.Link.create("x"):
        with pytest.raises(shmesh.Mismatch, match="backing named, but memfd was requested"):
            shmesh.Link.create("x", backing="memfd")


def test_second_receiving_process_is_refused_where_there_is_one() -> None:
    script = """
import shmesh
try:
    shmesh.Link.attach("one")
except shmesh.AlreadyExists as error:
    print(error)
"""
    with shmesh.Link.create("one", receivers="one") as phy, shmesh.Link.attach("one") as mac, mac.clone() as other:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
        assert f"process {os.getpid()} already receives on the secondary side" in done.stdout, done.stdout + done.stderr
        assert "receivers: one" in done.stdout and phy.seat != other.seat


def test_lost_messages_are_reported_before_the_next_one() -> None:
    phy, mac = pair()
    while mac.next_event() is not None:
        pass
    phy.report_lost(3)
    phy.send(b"the fourth")
    with mac.receive() as message:
        assert bytes(message) == b"the fourth"
    assert mac.lost == 3 and phy.lost == 0
    assert mac.next_event() == ("lost", 0, "", 0, 3)
    assert mac.next_event() is None


def test_end_of_a_peer_whose_seat_the_waiter_takes_is_an_event() -> None:
    phy, mac = pair()
    event = phy.next_event()
    assert event is not None and event.kind == "attached"
    mac.close()
    # The first wait takes a seat: the one that is free now.
    assert not phy.wait(0.01)
    assert phy.next_event() == ("detached", event.seat, "secondary", os.getpid(), 0)
    assert phy.next_event() is None
