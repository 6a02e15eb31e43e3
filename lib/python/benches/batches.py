"""Batches between two processes, ours and others in one run: batches per second, CPU time of each, and round trips.

    pip install shmesh numpy pyzmq          # and torch, where it is to be measured; what is missing is left out, and said
    python batches.py --seconds 3 --json batches.json --svg ../../../docs/python-batches.svg

A producer process fills float32 batches; a consumer process sums each. All have the same depth of four batches. Each
case runs `--rounds` times in turn, and the median is shown. Quiet machine, at least two cores, a release build of the wheel.
"""

import argparse
import json
import multiprocessing
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np

import shmesh

DEPTH = 4
CONTEXT = multiprocessing.get_context("spawn")


def cpu() -> float:
    times = os.times()
    return times.user + times.system


# Each transport is a pair of generators: one yields arrays to fill, and sends them when it resumes; the other yields
# received ones.


def ours_out(queue: shmesh.BatchQueue, count: int) -> Iterator[np.ndarray]:
    while True:
        with queue.batch({"x": (count, np.float32)}) as batch:
            yield batch["x"]


def ours_in(queue: shmesh.BatchQueue, _count: int) -> Iterator[np.ndarray]:
    while True:
        batch = queue.get()
        yield batch["x"]
        # Before waiting for the next one: a `for` loop would hold it until then.
        del batch


def queue_out(queue: Any, count: int) -> Iterator[np.ndarray]:
    while True:
        array = np.empty(count, np.float32)
        yield array
        queue.put(array)


def queue_in(queue: Any, _count: int) -> Iterator[np.ndarray]:
    while True:
        yield queue.get()


def pool_out(ways: Any, count: int) -> Iterator[np.ndarray]:
    names, free, full = ways
    memories = [shared_memory.SharedMemory(name) for name in names]
    arrays = [np.ndarray(count, np.float32, memory.buf) for memory in memories]
    while True:
        index = free.get()
        yield arrays[index]
        full.put(index)


def pool_in(ways: Any, count: int) -> Iterator[np.ndarray]:
    names, free, full = ways
    memories = [shared_memory.SharedMemory(name) for name in names]
    arrays = [np.ndarray(count, np.float32, memory.buf) for memory in memories]
    while True:
        index = full.get()
        yield arrays[index]
        free.put(index)


def zmq_out(address: str, count: int) -> Iterator[np.ndarray]:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.sndhwm = DEPTH
    socket.connect(address)
    while True:
        array = np.empty(count, np.float32)
        yield array
        socket.send(array, copy=False)


def zmq_in(address: str, _count: int) -> Iterator[np.ndarray]:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.rcvhwm = DEPTH
    socket.bind(address)
    while True:
        yield np.frombuffer(socket.recv(copy=False).buffer, np.float32)


def torch_out(queue: Any, count: int) -> Iterator[np.ndarray]:
    import torch

    while True:
        tensor = torch.empty(count, dtype=torch.float32)
        yield tensor.numpy()
        queue.put(tensor)


def torch_in(queue: Any, _count: int) -> Iterator[np.ndarray]:
    while True:
        yield queue.get().numpy()


def sizes_of(count: int) -> int:
    return count * np.dtype(np.float32).itemsize


def make_ours(count: int) -> tuple[Any, Callable[[], None]]:
    queue = shmesh.BatchQueue(sizes_of(count), DEPTH)
    return queue, queue.close


def make_queue(_count: int) -> tuple[Any, Callable[[], None]]:
    return CONTEXT.Queue(DEPTH), lambda: None


def make_pool(count: int) -> tuple[Any, Callable[[], None]]:
    memories = [shared_memory.SharedMemory(create=True, size=sizes_of(count)) for _ in range(DEPTH)]
    free, full = CONTEXT.Queue(), CONTEXT.Queue()
    for index in range(DEPTH):
        free.put(index)

    def end() -> None:
        for memory in memories:
            memory.close()
            memory.unlink()

    return ([memory.name for memory in memories], free, full), end


def make_zmq(_count: int) -> tuple[Any, Callable[[], None]]:
    import zmq  # noqa: F401 - is it there?

    return f"ipc://{tempfile.gettempdir()}/batches-{secrets.token_hex(4)}", lambda: None


def make_torch(_count: int) -> tuple[Any, Callable[[], None]]:
    import torch.multiprocessing

    return torch.multiprocessing.get_context("spawn").Queue(DEPTH), lambda: None


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "shmesh.BatchQueue": (make_ours, ours_out, ours_in),
    "shared_memory pool, two Queues": (make_pool, pool_out, pool_in),
    "pyzmq ipc": (make_zmq, zmq_out, zmq_in),
    "multiprocessing.Queue": (make_queue, queue_out, queue_in),
    "torch.multiprocessing.Queue": (make_torch, torch_out, torch_in),
}


def produce(way: str, thing: Any, count: int, start: Any, used: Any, stop: Any) -> None:
    """Fills batches until the consumer ends it. CPU time and number of batches are in shared words."""
    out = WAYS[way][1](thing, count)
    start.wait()
    number = 0
    # Not with `enumerate`, which would keep the array.
    for array in out:
        number += 1
        array.fill(number)
        del array
        used[0], used[1] = cpu(), number
        if stop.is_set():
            # The consumer has ended, and with it everything to wait for.
            os._exit(0)


def measure(way: str, count: int, seconds: float) -> dict[str, float]:
    make, _, into = WAYS[way]
    thing, end = make(count)
    start, stop = CONTEXT.Event(), CONTEXT.Event()
    used = CONTEXT.Array("d", 2, lock=False)
    producer = CONTEXT.Process(target=produce, args=(way, thing, count, start, used, stop), daemon=True)
    producer.start()
    batches, total, warm = 0, 0.0, 2 * DEPTH
    start.set()
    for array in into(thing, count):
        total += float(array.sum())
        del array
        if warm:
            warm -= 1
            if warm == 0:
                first, first_cpu, first_used = time.monotonic(), cpu(), tuple(used)
            continue
        batches += 1
        elapsed = time.monotonic() - first
        if elapsed >= seconds and batches >= 3:
            break
    ours, theirs = cpu() - first_cpu, used[0] - first_used[0]
    sent = max(used[1] - first_used[1], 1)
    stop.set()
    producer.kill()
    producer.join()
    end()
    return {
        "batches_per_second": batches / elapsed,
        "producer_cpu_ms": 1e3 * theirs / sent,
        "consumer_cpu_ms": 1e3 * ours / batches,
    }


def echo_link(name: str) -> None:
    with shmesh.Link.attach(name, timeout=20) as link:
        for message in link:
            if message.msg_id == 1:
                return
            link.send_inline(bytes(message))


def echo_pipe(connection: Any) -> None:
    while True:
        message = connection.recv_bytes()
        if not message:
            return
        connection.send_bytes(message)


def round_trips(count: int) -> dict[str, dict[str, float]]:
    """Round-trip time of 48 bytes in microseconds."""
    message = bytes(48)
    found = {}

    def timed(call: Callable[[], object]) -> dict[str, float]:
        for _ in range(count // 10):
            call()
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
        times.sort()
        return {"p50_us": times[count // 2], "p99_us": times[count * 99 // 100]}

    with shmesh.Link.create(f"bench-{secrets.token_hex(4)}", spin_us=1000) as link:
        process = CONTEXT.Process(target=echo_link, args=(link.name,))
        process.start()

        def call() -> None:
            link.send_inline(message)
            link.receive(None)

        found["shmesh.Link"] = timed(call)
        link.send_inline(b"", msg_id=1)
        process.join()
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=echo_pipe, args=(there,))
    process.start()

    def call_pipe() -> None:
        here.send_bytes(message)
        here.recv_bytes()

    found["multiprocessing.Pipe"] = timed(call_pipe)
    here.send_bytes(b"")
    process.join()
    return found


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def table(result: dict[str, Any]) -> str:
    lines = [f"Python {result['python']}, numpy {result['numpy']}, {result['cpus']} CPUs, {result['machine']}"]
    for size, ways in result["batches"].items():
        lines += ["", f"| {size} | batches/s | producer CPU ms | consumer CPU ms |", "|---|---|---|---|"]
        for way, found in ways.items():
            lines.append(
                f"| {way} | {found['batches_per_second']:.1f} | {found['producer_cpu_ms']:.2f} "
                f"| {found['consumer_cpu_ms']:.2f} |"
            )
    lines += ["", "| 48 bytes there and back | p50 µs | p99 µs |", "|---|---|---|"]
    for way, found in result["round_trip"].items():
        lines.append(f"| {way} | {found['p50_us']:.1f} | {found['p99_us']:.1f} |")
    return "\n".join(lines + [""] + [f"left out: {why}" for why in result["left_out"]])


def svg(result: dict[str, Any]) -> str:
    """Bars of batches per second, each panel to a scale of its own."""
    panels = [(f"{size}: batches per second", {way: f["batches_per_second"] for way, f in ways.items()})
              for size, ways in result["batches"].items()]
    panels.append(("48 bytes there and back: µs, p50", {way: f["p50_us"] for way, f in result["round_trip"].items()}))
    rows, y = [], 30
    for title, bars in panels:
        rows.append(f'<text x="10" y="{y}" class="title">{title}</text>')
        y += 14
        largest = max(bars.values())
        for way, value in bars.items():
            width = max(1.0, 380 * value / largest)
            kind = "ours" if way.startswith("shmesh") else "other"
            rows.append(f'<text x="210" y="{y + 14}" text-anchor="end">{way}</text>')
            rows.append(f'<rect x="220" y="{y + 2}" width="{width:.1f}" height="16" class="{kind}"/>')
            rows.append(f'<text x="{226 + width:.1f}" y="{y + 14}">{value:,.1f}</text>')
            y += 22
        y += 30
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.ours{fill:#2a7f62}.other{fill:#b9c2c9}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.other{fill:#5b666e}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {y - 20}" role="img" '
        f'aria-label="Batches per second, ours and others"><style>{style}</style>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 147])
    parser.add_argument("--round-trips", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--from-json", type=Path, help="draw what was measured before")
    args = parser.parse_args()

    if args.from_json:
        result = json.loads(args.from_json.read_text())
    else:
        left_out, usable = [], []
        for way, (make, _, _) in WAYS.items():
            try:
                _, end = make(1)
                end()
                usable.append(way)
            except ImportError as missing:
                left_out.append(f"{way}: {missing}")
        result = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "shmesh": shmesh.__version__,
            "cpus": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "left_out": left_out,
            "batches": {},
        }
        for mib in args.mib:
            count = int(mib * (1 << 20)) // 4
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in usable}
            for _ in range(args.rounds):
                for way in usable:
                    runs[way].append(measure(way, count, args.seconds))
                    print(f"{mib:g} MiB {way}: {runs[way][-1]['batches_per_second']:.1f}/s", file=sys.stderr)
            result["batches"][f"{mib:g} MiB"] = {way: median_of(found) for way, found in runs.items()}
        result["round_trip"] = round_trips(args.round_trips)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.svg:
        args.svg.write_text(svg(result))
    print(table(result))


if __name__ == "__main__":
    main()
