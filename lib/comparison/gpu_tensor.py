#!/usr/bin/env python3
"""A GPU tensor of 1 MiB to another process and back: by torch.multiprocessing, and by a message of a link beside GPU memory that is shared once.

The other process adds 1 to an eighth of the tensor, synchronizes, and answers. Prints the median and the 99th percentile of a round trip for each, in
turns. Needs a GPU, PyTorch, and a sidecar with a link: `shmesh-sidecar --link fronthaul`.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

import shmesh

LINK = "fronthaul"
ROUNDS = 2000
WARM_UP = 200
BUFFERS = 8
SHAPE = (8, 32768)
SPAWN = torch.multiprocessing.get_context("spawn")


def change(tensor: Any) -> None:
    tensor[0].add_(1)
    torch.cuda.synchronize()


def torch_side(tensors: Any, replies: Any) -> None:
    for _ in range(WARM_UP + ROUNDS):
        tensor = tensors.get()
        change(tensor)
        del tensor
        replies.put(None)


def by_torch() -> list[int]:
    there, back = SPAWN.SimpleQueue(), SPAWN.SimpleQueue()
    process = SPAWN.Process(target=torch_side, args=(there, back))
    process.start()
    tensors = [torch.zeros(SHAPE, device="cuda") for _ in range(BUFFERS)]

    def round_trip(at: int) -> None:
        there.put(tensors[at])
        back.get()

    times = measure(round_trip, lambda at: change(tensors[at]))
    process.join()
    return times


def link_side(pipe: Any) -> None:
    with shmesh.GpuSession(LINK) as session, shmesh.Link.attach(LINK, "secondary") as link:
        pipe.send(session.bare_tgid())
        key = pipe.recv()
        array = session.import_by_key(key, (BUFFERS, *SHAPE), np.float32)
        tensors = torch.from_dlpack(array)
        pipe.send(None)
        for _ in range(WARM_UP + ROUNDS):
            message = link.receive(timeout=10)
            assert message is not None
            at = message.msg_id
            del message
            change(tensors[at])
            link.send(b"", msg_id=at)
        del tensors, array
        pipe.recv()
        session.close(key)


def by_link() -> list[int]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=link_side, args=(there,))
    process.start()
    with shmesh.GpuSession(LINK) as session, shmesh.Link.attach(LINK, "primary") as link:
        key, array = session.export_key((BUFFERS, *SHAPE), np.float32)
        tensors = torch.from_dlpack(array)
        tensors.zero_()
        torch.cuda.synchronize()
        session.set_import_pid(key, [here.recv()])
        here.send(key)
        here.recv()

        def round_trip(at: int) -> None:
            link.send(b"", msg_id=at)
            assert link.receive(timeout=10) is not None

        times = measure(round_trip, lambda at: change(tensors[at]))
        expected = 2 * (WARM_UP + ROUNDS) * SHAPE[1]
        assert tensors[:, 0].sum().item() == expected, "each change was made once"
        here.send(None)
        process.join()
        del tensors
    return times


def measure(round_trip: Callable[[int], None], prepare: Callable[[int], None]) -> list[int]:
    times = []
    for number in range(WARM_UP + ROUNDS):
        prepare(number % BUFFERS)
        start = time.perf_counter_ns()
        round_trip(number % BUFFERS)
        times.append(time.perf_counter_ns() - start)
    return sorted(times[WARM_UP:])


def main() -> None:
    for _ in range(3):
        for name, run in (("torch.multiprocessing", by_torch), ("shmesh", by_link)):
            times = run()
            print(f"{name}: median {times[ROUNDS // 2] / 1000:.0f} us, p99 {times[ROUNDS * 99 // 100] / 1000:.0f} us", flush=True)


if __name__ == "__main__":
    main()
