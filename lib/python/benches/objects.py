"""Objects from one writer to four readers: `shmesh.MessageQueue`, and vLLM's beside it in the same run.

    python objects.py --vllm shm_broadcast.py          # vllm/distributed/device_communicators/shm_broadcast.py of a release; needs pyzmq

vLLM's file is run as it is, with stand-ins for torch and the parts of vLLM that it imports. Each case runs `--rounds` times in turns, and the
median is shown: microseconds for each object until all readers have it. As a real-time process (`chrt -f 5`) on a machine with other work.
"In place" is `dequeue(copy=False)`, whose arrays are memory of the queue; vLLM's queue has nothing like it.
"""

import argparse
import importlib.util
import logging
import multiprocessing
import os
import statistics
import sys
import time
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

import shmesh

READERS = 4
DEPTH = 10
NBYTES = 2 << 20
CONTEXT = multiprocessing.get_context("fork")
OBJECTS: dict[str, tuple[Any, int]] = {
    "bytes, 8 KiB": (b"x" * 8192, 20_000),
    "array, 8 KiB": (np.zeros(2048, np.float32), 20_000),
    "array, 1 MiB": (np.zeros(1 << 18, np.float32), 1_000),
}


def ours(payload: Any, count: int, copy: bool = True) -> float:
    name = f"bench-{uuid.uuid4().hex[:8]}"

    def reader(rank: int, done: Any) -> None:
        with shmesh.MessageQueue.attach(name, rank, timeout=20) as queue:
            for _ in range(count):
                queue.dequeue(timeout=60, copy=copy)
            done.put(time.perf_counter())

    with shmesh.MessageQueue(NBYTES, depth=DEPTH, readers=READERS, name=name) as queue:
        return measured(reader, lambda: queue.wait_until_ready(20), lambda value: queue.enqueue(value, timeout=60), payload, count)


def vllms(module: Any, payload: Any, count: int) -> float:
    queue = module.MessageQueue(READERS, READERS, max_chunk_bytes=NBYTES, max_chunks=DEPTH)
    handle = queue.export_handle()

    def reader(rank: int, done: Any) -> None:
        mine = module.MessageQueue.create_from_handle(handle, rank)
        mine.wait_until_ready()
        for _ in range(count):
            mine.dequeue(timeout=60)
        done.put(time.perf_counter())

    return measured(reader, queue.wait_until_ready, lambda value: queue.enqueue(value, timeout=60), payload, count)


def measured(
    reader: Callable[[int, Any], None],
    wait_until_ready: Callable[[], None],
    enqueue: Callable[[Any], None],
    payload: Any,
    count: int,
) -> float:
    """Microseconds for each object."""
    done = CONTEXT.Queue()
    readers = [CONTEXT.Process(target=reader, args=(rank, done)) for rank in range(READERS)]
    for process in readers:
        process.start()
    wait_until_ready()
    time.sleep(0.2)
    start = time.perf_counter()
    for step in range(count):
        enqueue({"step": step, "payload": payload})
    end = max(done.get() for _ in readers)
    for process in readers:
        process.join()
    return (end - start) / count * 1e6


def stand_in(name: str, **content: Any) -> Any:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


class Zeroed:
    def __init__(self, buffer: Any, dtype: Any = None) -> None:
        self.bytes = np.frombuffer(buffer, np.uint8)

    def fill_(self, value: int) -> None:
        self.bytes[:] = value


class Settings:
    VLLM_USE_SPINLOOP_EXT = False
    VLLM_RINGBUFFER_WARNING_INTERVAL = 60

    def __getattr__(self, _name: str) -> int:
        return 0


class Platform:
    def __getattr__(self, _name: str) -> Callable[..., bool]:
        return lambda *_: False


def logger(name: str) -> Any:
    made: Any = logging.getLogger(name)
    made.info_once = made.warning_once = lambda *_, **__: None
    return made


def vllms_module(path: str) -> Any:
    group = type("ProcessGroup", (), {})
    stand_in("torch", Tensor=type("Tensor", (), {}), uint8="u8", frombuffer=Zeroed, dtype=str, strided=0)
    sys.modules["torch"].distributed = stand_in("torch.distributed", ProcessGroup=group)  # type: ignore[attr-defined]
    stand_in("vllm", envs=Settings())
    sys.modules["vllm.envs"] = sys.modules["vllm"].envs
    stand_in("vllm.distributed")
    stand_in("vllm.distributed.utils", StatelessProcessGroup=group, sched_yield=os.sched_yield)
    stand_in("vllm.logger", init_logger=logger)
    stand_in("vllm.platforms", current_platform=Platform())
    stand_in("vllm.utils")
    stand_in("vllm.utils.cpu_resource_utils", check_cgroup_memory_available=lambda *_, **__: None)
    stand_in(
        "vllm.utils.network_utils",
        get_ip=lambda: "127.0.0.1",
        get_open_zmq_inproc_path=lambda: f"inproc://{uuid.uuid4()}",
        get_open_zmq_ipc_path=lambda: f"ipc:///tmp/{uuid.uuid4()}",
        is_valid_ipv6_address=lambda _: False,
    )
    spec = importlib.util.spec_from_file_location("shm_broadcast", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shm_broadcast"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="vLLM's file; without it, ours alone")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ways: dict[str, Callable[[Any, int], float]] = {
        "shmesh": ours,
        "shmesh in place": lambda payload, count: ours(payload, count, copy=False),
    }
    if options.vllm:
        module = vllms_module(options.vllm)
        ways["vLLM"] = lambda payload, count: vllms(module, payload, count)
    print(f"microseconds for each object until {READERS} readers have it, medians of {options.rounds}")
    for name, (payload, count) in OBJECTS.items():
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, run in ways.items():
                found[way].append(run(payload, count))
        medians = {way: statistics.median(times) for way, times in found.items()}
        text = ", ".join(f"{way} {median:.1f}" for way, median in medians.items())
        ratios = [f"{medians['vLLM'] / medians[way]:.1f}" for way in ways if way != "vLLM"] if "vLLM" in medians else []
        print(f"{name}: {text}" + (f"; {' and '.join(ratios)} times" if ratios else ""))


if __name__ == "__main__":
    main()
