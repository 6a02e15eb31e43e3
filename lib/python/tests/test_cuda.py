"""GPU memory, with the broker of a sidecar, over the driver that SHMESH_CUDA_LIBRARY names: the fake one, or a GPU's."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import workers
from test_device import sidecar as sidecar

import shmesh

pytestmark = pytest.mark.skipif("SHMESH_CUDA_LIBRARY" not in os.environ, reason="no driver is named")

GRANULARITY = 2 << 20


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


def inside(capsule: Any, kind: Any, name: bytes) -> Any:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(capsule, name)
    return kind.from_address(address), address


def test_two_processes(sidecar: str) -> None:
    with shmesh.GpuSession(sidecar) as session:
        key, array = session.export_key((2, 2), np.float32)
        array.copy_from_host([[1, 2], [3, 4]])
        assert array.copy_to_host().tolist() == [[1, 2], [3, 4]] and array.uuid.startswith("GPU-")
        here, there = multiprocessing.Pipe()
        importer = multiprocessing.get_context("spawn").Process(target=workers.import_gpu, args=(sidecar, there))
        importer.start()
        session.set_import_pid(key, [here.recv()])
        here.send(key)
        assert here.recv() == [[1, 2], [3, 4]]
        assert here.recv() == "still viewed"
        with pytest.raises(shmesh.Busy, match=str(importer.pid)):
            session.close(key)
        here.send("go on")
        assert here.recv() == "closed"
        importer.join()
        assert array.copy_to_host()[0, 0] == 99, "it wrote the same memory"
        session.close(key)
        assert array.copy_to_host()[0, 0] == 99, "an array keeps the memory"


def test_interfaces_for_others(sidecar: str) -> None:
    with shmesh.GpuSession(sidecar) as session:
        _, array = session.export_key((3, 5), np.int16)
        interface = array.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((3, 5), "<i2", 3)
        address, read_only = interface["data"]
        assert address % GRANULARITY == 0 and not read_only
        assert array.__dlpack_device__() == (2, 0)
        for managed, _ in (
            inside(array.__dlpack__(), Managed, b"dltensor"),
            inside(array.__dlpack__(max_version=(1, 1)), ManagedVersioned, b"dltensor_versioned"),
        ):
            del managed
        old, new = array.__dlpack__(), array.__dlpack__(max_version=(1, 0), stream=1)
        first, _ = inside(old, Managed, b"dltensor")
        second, _ = inside(new, ManagedVersioned, b"dltensor_versioned")
        assert (second.major, second.flags) == (1, 0)
        for tensor in (first.tensor, second.tensor):
            assert (tensor.data, tensor.device_type, tensor.device_id, tensor.byte_offset) == (address, 2, 0, 0)
            assert (tensor.code, tensor.bits, tensor.lanes, tensor.ndim) == (0, 16, 1, 2)
            assert (tensor.shape[:2], tensor.strides[:2]) == ([3, 5], [5, 1])
        with pytest.raises(BufferError, match="cannot be exported to another device"):
            array.__dlpack__(dl_device=(1, 0))
        with pytest.raises(BufferError, match="shared"):
            array.__dlpack__(copy=True)


def test_streams_devices_versions_and_copies(sidecar: str) -> None:
    """The shapes of the array API standard."""
    with shmesh.GpuSession(sidecar) as session:
        _, array = session.export_key((2, 3), np.float32)
        for stream in (None, -1, 1, 2, 0x7F00_1234_5678):
            assert inside(array.__dlpack__(stream=stream), Managed, b"dltensor")
        for stream in (0, -2):
            with pytest.raises(ValueError, match="ambiguous"):
                array.__dlpack__(stream=stream)
        for wrong in ("1", 1.0, True):
            with pytest.raises(TypeError, match="a number"):
                array.__dlpack__(stream=wrong)  # type: ignore[arg-type]

        # A consumer that gives no version, or one before 1, gets the unversioned form.
        for old in (None, (0, 8)):
            assert inside(array.__dlpack__(max_version=old), Managed, b"dltensor")
        for new in ((1, 0), (1, 3), (2, 0)):
            capsule = array.__dlpack__(max_version=new)
            managed, _ = inside(capsule, ManagedVersioned, b"dltensor_versioned")
            assert (managed.major, managed.minor) <= new and managed.flags == 0, "writable, and no copy"

        # Only on its device, and only without a copy.
        here = array.__dlpack_device__()
        assert here == (2, 0) and inside(array.__dlpack__(dl_device=here, copy=False), Managed, b"dltensor")
        for elsewhere in ((1, 0), (2, 1), (3, 0)):
            with pytest.raises(BufferError, match="cannot be exported to another device"):
                array.__dlpack__(dl_device=elsewhere)
        for options in ({"copy": True}, {"copy": True, "dl_device": here}, {"copy": True, "max_version": (1, 0)}):
            with pytest.raises(BufferError, match="shared"):
                array.__dlpack__(**options)
        with pytest.raises(TypeError):
            array.__dlpack__(1)  # type: ignore[misc]
        with pytest.raises((BufferError, RuntimeError, ValueError)):
            np.from_dlpack(array)


@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [("i1", 0, 8), ("u8", 1, 64), ("f2", 2, 16), ("f8", 2, 64), ("c8", 5, 64), ("c16", 5, 128), ("?", 6, 8)],
)
def test_types_that_dlpack_has(sidecar: str, dtype: str, code: int, bits: int) -> None:
    with shmesh.GpuSession(sidecar) as session:
        for shape, strides in (((), []), ((4,), [1]), ((2, 1, 3), [3, 3, 1])):
            capsule = session.export_key(shape, dtype)[1].__dlpack__()
            tensor = inside(capsule, Managed, b"dltensor")[0].tensor
            assert (tensor.code, tensor.bits, tensor.lanes, tensor.ndim) == (code, bits, 1, len(shape))
            assert (tensor.shape[: len(shape)], tensor.strides[: len(shape)]) == (list(shape), strides)


@pytest.mark.parametrize("dtype", [">f4", "g", "G", "S3", "U2", "m8[s]", [("a", "i4")]])
def test_types_that_dlpack_has_not(sidecar: str, dtype: Any) -> None:
    with shmesh.GpuSession(sidecar) as session:
        _, array = session.export_key(4, dtype)
        with pytest.raises(BufferError, match="DLPack has no"):
            array.__dlpack__()


def test_consumed_capsule_keeps_the_memory(sidecar: str) -> None:
    with shmesh.GpuSession(sidecar) as exporter:
        key, array = exporter.export_key(16)
        array.copy_from_host(np.arange(16))
        script = """
import ctypes, sys, shmesh
with shmesh.GpuSession(sys.argv[1]) as session:
    print(session.bare_tgid(), flush=True)
    key = bytes.fromhex(sys.stdin.readline())
    array = session.import_by_key(key)
    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    place = get(capsule, b"dltensor")
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = b"used_dltensor"
    rename(capsule, used)
    del array, capsule
    try:
        session.close(key)
        raise SystemExit("the consumer has it still")
    except shmesh.StillViewed:
        pass
    # Tensor (48 bytes), context, deleter: the consumer calls the deleter in the end.
    deleter = ctypes.c_void_p.from_address(place + 56).value
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(place)
    session.close(key)
    print("closed", flush=True)
"""
        importer = subprocess.Popen(
            [sys.executable, "-c", script, sidecar], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert importer.stdin is not None and importer.stdout is not None
        exporter.set_import_pid(key, [int(importer.stdout.readline())])
        importer.stdin.write(key.hex() + "\n")
        importer.stdin.flush()
        assert importer.stdout.readline() == "closed\n"
        assert importer.wait(200) == 0
        importer.stdin.close()
        importer.stdout.close()


def test_child_of_a_fork_leaves_the_device_alone(sidecar: str) -> None:
    with shmesh.GpuSession(sidecar) as session:
        _, array = session.export_key(4)
        array.copy_from_host(np.arange(4))
        child = os.fork()
        if child == 0:
            try:
                array.copy_to_host()
            except shmesh.Forked:
                del array
                os._exit(3)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert array.copy_to_host().tolist() == [0, 1, 2, 3], "the parent's goes on"


def test_wrong_use(sidecar: str) -> None:
    with shmesh.GpuSession(sidecar) as session:
        with pytest.raises(shmesh.Invalid):
            session.export_key(0)
        with pytest.raises(shmesh.NoSpace, match="OUT_OF_MEMORY"):
            session.export_key(1 << 46)
        with pytest.raises(shmesh.System, match="does not see"):
            session.export_key(1, uuid="GPU-00000000-0000-0000-0000-000000000000")
        with pytest.raises(shmesh.System, match="not a UUID"):
            session.export_key(1, uuid="0")
        _, array = session.export_key((4, 4), np.uint8)
        with pytest.raises(shmesh.Mismatch, match="shape"):
            array.copy_from_host(np.zeros(5, np.uint8))
        with pytest.raises(BufferError, match="no datetime64"):
            session.export_key(4, "datetime64[s]")[1].__dlpack__()
