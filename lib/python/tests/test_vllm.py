"""The adapter for vLLM, with a stand-in for the class that it replaces, because vLLM needs a GPU. It tests the calls, not
vLLM.
"""

import dataclasses
import multiprocessing
import sys
import threading
import types
from typing import Any

import pytest
from interrupts import later

import shmesh
import shmesh.vllm

WATCHDOG = 200


@dataclasses.dataclass
class Handle:
    local_reader_ranks: list[int]
    buffer_handle: Any = None


class Original:
    """What queues with readers on other nodes use."""

    def __init__(self, n_reader: int, n_local_reader: int, *others: Any) -> None:
        self.handle = Handle([], ("original",))

    def export_handle(self) -> Handle:
        return self.handle

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> str:
        return "a reader of the original"

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        self.sent = obj


def read(handle: Handle, rank: int, results: Any) -> None:
    queue = shmesh.vllm.adapter_of(Original, Handle).create_from_handle(handle, rank)
    queue.wait_until_ready()
    results.put((rank, [queue.dequeue(WATCHDOG), queue.broadcast_object(), queue.dequeue(cancel=threading.Event())]))


def test_methods_of_vllm() -> None:
    context = multiprocessing.get_context("spawn")
    writer = shmesh.vllm.adapter_of(Original, Handle)(2, 2, [1, 2], 1 << 16, 4)
    results = context.Queue()
    readers = [context.Process(target=read, args=(writer.export_handle(), rank, results)) for rank in (1, 2)]
    for reader in readers:
        reader.start()
    writer.wait_until_ready()
    writer.enqueue(("execute_model", {"step": 1}), timeout=WATCHDOG)
    assert writer.broadcast_object("second") == "second"
    writer.enqueue("third")
    expected = [("execute_model", {"step": 1}), "second", "third"]
    assert dict(results.get(timeout=WATCHDOG) for _ in range(2)) == {1: expected, 2: expected}
    for reader in readers:
        reader.join()
    writer.shutdown()


@pytest.mark.long
def test_time_limits_and_cancelling() -> None:
    adapter = shmesh.vllm.adapter_of(Original, Handle)
    writer = adapter(1, 1)
    reader = adapter.create_from_handle(writer.export_handle(), 0)
    cancel = threading.Event()
    for arguments in ({"timeout": 0.02}, {"timeout": 0.02, "cancel": cancel}):
        with pytest.raises(TimeoutError):
            reader.dequeue(**arguments)
    cancel.set()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(cancel=cancel)
    reader.shutdown()
    writer.shutdown()


def test_remaining_behaviour_of_the_class_of_vllm() -> None:
    adapter = shmesh.vllm.adapter_of(Original, Handle)
    with pytest.raises(ValueError, match="ranks"):
        adapter(2, 2, [1])
    writer = adapter(1, 1, [3], 1 << 12, 2)
    with pytest.raises(ValueError, match="rank 0"):
        adapter.create_from_handle(writer.export_handle(), 0)
    reader = adapter.create_from_handle(writer.export_handle(), 3)
    for size in (1, 100_000, 200_000, 300_000):
        writer.enqueue(b"x" * size, WATCHDOG)
        # The second argument is `indefinite` in some releases, and `cancel` in others.
        assert len(reader.dequeue(WATCHDOG, True) if size > 1 else reader.dequeue(indefinite=True)) == size
    with later(0.2, reader.shutdown), pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(indefinite=True)
    writer.shutdown()


def test_queues_with_readers_elsewhere_stay_vllms() -> None:
    adapter = shmesh.vllm.adapter_of(Original, Handle)
    queue = adapter(2, 1)
    queue.enqueue("x")
    assert queue.sent == "x" and adapter.create_from_handle(queue.export_handle(), 1) == "a reader of the original"


@dataclasses.dataclass
class SglangHandle:
    connect_ip: str
    local_reader_ranks: list[int] = dataclasses.field(default_factory=list)
    buffer: Any = None
    local_subscribe_port: int | None = None


class SglangOriginal:
    """Its methods take no time limits."""

    def __init__(self, n_reader: int, n_local_reader: int, local_reader_ranks: Any = None, *others: Any) -> None:
        self.handle = SglangHandle("10.0.0.1", [], object())

    def export_handle(self) -> SglangHandle:
        return self.handle

    @staticmethod
    def create_from_handle(handle: SglangHandle, rank: int) -> str:
        return "a reader of the original"

    def enqueue(self, obj: Any) -> None:
        self.sent = obj

    def dequeue(self) -> Any:
        return self.sent


def test_sglangs_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.distributed.device_communicators"]
    modules = {name: types.ModuleType(name) for name in [*names, f"{names[-1]}.shm_broadcast", "sglang.srt.user"]}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    place, user = modules[f"{names[-1]}.shm_broadcast"], modules["sglang.srt.user"]
    place.MessageQueue, place.Handle = SglangOriginal, SglangHandle  # type: ignore[attr-defined]
    user.MessageQueue = SglangOriginal  # type: ignore[attr-defined]
    with pytest.raises(shmesh.Invalid, match="sglang"):
        shmesh.vllm.register("other")
    shmesh.vllm.register("sglang")
    adapter = user.MessageQueue
    assert adapter is place.MessageQueue is not SglangOriginal
    writer = adapter(n_reader=1, n_local_reader=1, local_reader_ranks=[1], max_chunk_bytes=1 << 16, max_chunks=3)
    reader = adapter.create_from_handle(writer.export_handle(), 1)
    writer.wait_until_ready()
    writer.enqueue({"step": 1})
    assert reader.dequeue() == {"step": 1}
    writer.shutdown()
    elsewhere = adapter(2, 1)
    elsewhere.enqueue("x")
    assert elsewhere.dequeue() == "x" and adapter.create_from_handle(elsewhere.export_handle(), 1) == "a reader of the original"


def test_plugin_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["vllm", "vllm.distributed", "vllm.distributed.device_communicators"]
    modules = {name: types.ModuleType(name) for name in [*names, f"{names[-1]}.shm_broadcast", "vllm.executor"]}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    broadcast = modules[f"{names[-1]}.shm_broadcast"]
    vars(modules[names[-1]])["shm_broadcast"] = broadcast
    vars(broadcast).update(MessageQueue=Original, Handle=Handle)
    vars(modules["vllm.executor"])["MessageQueue"] = Original
    monkeypatch.delenv("SHMESH_VLLM", raising=False)
    shmesh.vllm.register()
    assert vars(broadcast)["MessageQueue"] is Original
    monkeypatch.setenv("SHMESH_VLLM", "1")
    for _ in range(2):
        shmesh.vllm.register()
        adapter = vars(broadcast)["MessageQueue"]
        assert issubclass(adapter, Original) and adapter.__mro__[1] is Original
        assert vars(modules["vllm.executor"])["MessageQueue"] is adapter
