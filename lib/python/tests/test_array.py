import contextlib
import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import shmesh


def mapped(array: np.ndarray) -> bool:
    """Whether the page of the first element is mapped."""
    return mapped_at(array.__array_interface__["data"][0])


def mapped_at(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "shmesh-array" in line
    return False


def test_array_is_zeroed_page_aligned_and_contiguous() -> None:
    array = shmesh.empty((3, 5), np.float32)
    assert isinstance(array, np.ndarray)
    assert (array.shape, array.dtype, array.sum()) == ((3, 5), np.float32, 0.0)
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    assert array.ctypes.data % 4096 == 0
    array[1, 2] = 7
    assert array.sum() == 7


def test_computed_array_is_an_ordinary_array() -> None:
    array = shmesh.empty(4)
    for computed in (array + 1, np.sqrt(array), array.copy(), array[[0, 2]], array[array == 0]):
        assert type(computed) is np.ndarray, computed
    assert isinstance(array.sum(), float) and isinstance(array[0], float)
    assert type(array[1:]) is shmesh.Array and type(array.T) is shmesh.Array
    same = array
    same += 1
    assert same is array and array.tolist() == [1, 1, 1, 1]


def test_mapping_lives_as_long_as_the_last_view() -> None:
    array = shmesh.empty((1000, 1000), np.uint8)
    address = array.ctypes.data
    plain = np.asarray(array).view(np.ndarray)[10:, 3:]
    flat = memoryview(plain)
    del array
    gc.collect()
    assert mapped_at(address)
    plain[0, 0] = 9
    assert flat[0, 0] == 9
    del plain
    gc.collect()
    assert mapped_at(address), "a memoryview is a view, too"
    del flat
    gc.collect()
    assert not mapped_at(address)


def test_descriptor_is_closed_with_it() -> None:
    def files() -> set[int]:
        found = set()
        for descriptor in os.listdir("/proc/self/fd"):
            # The one of the listing itself is closed.
            with contextlib.suppress(FileNotFoundError):
                found.add(os.stat(f"/proc/self/fd/{descriptor}").st_ino)
        return found

    # Not their number: threads of links that earlier tests closed may still close theirs.
    before = files()
    arrays = [shmesh.empty(10) for _ in range(20)]
    made = files() - before
    assert len(made) == 20
    del arrays
    gc.collect()
    assert not files() & made


def test_dlpack_both_ways_without_a_copy_out() -> None:
    array = shmesh.from_numpy(np.arange(6, dtype=np.int64).reshape(2, 3))
    address = array.ctypes.data
    out = np.from_dlpack(array)
    assert out.ctypes.data == address and array.__dlpack_device__() == (1, 0)
    del array
    gc.collect()
    assert mapped_at(address) and out.tolist() == [[0, 1, 2], [3, 4, 5]], "what came out keeps the mapping"
    assert shmesh.from_dlpack(np.arange(3)).tolist() == [0, 1, 2]
    for wrong in ([1, 2], np.zeros(2, [("a", "i4")])):
        with pytest.raises(shmesh.Unsupported, match="view"):
            shmesh.from_dlpack(wrong)
    del out
    gc.collect()
    assert not mapped_at(address)


def test_torch_tensors_both_ways() -> None:
    torch = pytest.importorskip("torch")
    array = shmesh.empty((2, 3), np.float32)
    tensor = torch.from_dlpack(array)
    tensor += 1
    assert array.sum() == 6
    assert shmesh.from_dlpack(tensor).sum() == 6


def test_jax_arrays_both_ways() -> None:
    jax = pytest.importorskip("jax")
    array = shmesh.from_numpy(np.arange(6, dtype=np.float32))
    theirs = jax.numpy.from_dlpack(array)
    assert theirs.unsafe_buffer_pointer() == array.ctypes.data, "no copy"
    assert shmesh.from_dlpack(theirs * 2).tolist() == [0, 2, 4, 6, 8, 10]


def test_interfaces() -> None:
    array = shmesh.empty((2, 2), "<i4")
    interface = array.__array_interface__
    assert (interface["version"], interface["data"][1], interface["typestr"]) == (3, False, "<i4")
    view = memoryview(array)
    assert (view.format, view.shape, view.readonly) == ("i", (2, 2), False)
    reader = pickle.loads(pickle.dumps(array))
    assert reader.__array_interface__["data"][1] is True and memoryview(reader).readonly


def test_copy_of_any_layout_is_contiguous() -> None:
    source = np.arange(24).reshape(4, 6).T[::2]
    assert not source.flags.c_contiguous
    copy = shmesh.from_numpy(source)
    assert copy.flags.c_contiguous and np.array_equal(copy, source)
    assert type(shmesh.from_numpy([1, 2])) is shmesh.Array


@pytest.mark.parametrize("shape", [0, (0, 3), (2, 0)])
def test_zero_sizes(shape: object) -> None:
    array = shmesh.empty(shape, np.float32)
    assert array.size == 0
    assert pickle.loads(pickle.dumps(array)).shape == array.shape


def test_no_dimension() -> None:
    array = shmesh.empty((), np.int32)
    array[()] = 5
    assert pickle.loads(pickle.dumps(array))[()] == 5


@pytest.mark.parametrize("dtype", ["?", "<c16", "S7", "U3", "datetime64[ns]", ">f8", [("a", "i4"), ("b", "f8", (2,))]])
def test_types(dtype: object) -> None:
    array = shmesh.empty(3, dtype, "typed")
    opened = shmesh.open("typed")
    assert opened.dtype == array.dtype and opened.shape == (3,)
    assert pickle.loads(pickle.dumps(array)).dtype == array.dtype


def test_type_with_dimensions() -> None:
    assert shmesh.empty(2, "(3,)f4").shape == (2, 3)


@pytest.mark.parametrize("dtype", [object, [("a", object)], "S0", "V0", "U0"])
def test_types_that_cannot_be_shared(dtype: object) -> None:
    with pytest.raises(shmesh.Unsupported) as error:
        shmesh.empty(3, dtype)
    assert isinstance(error.value, TypeError)
    assert any(word in str(error.value) for word in ("use", "say", "give")), "it names the remedy"


def test_types_that_only_a_pickle_can_describe() -> None:
    overlapping = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 0]})
    with pytest.raises(shmesh.Unsupported, match="view"):
        shmesh.empty(3, overlapping, "x")
    array = shmesh.empty(3, overlapping)
    array["a"] = 5
    assert pickle.loads(pickle.dumps(array))["b"].tolist() == [5, 5, 5]


def test_types_of_other_libraries() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fields = np.dtype([("a", ml_dtypes.bfloat16)])
    with pytest.raises(shmesh.Unsupported, match="view"):
        shmesh.empty(3, fields, "x")
    array = shmesh.empty(2, fields)
    array["a"] = [1, 2]
    assert pickle.loads(pickle.dumps(array))["a"].astype(float).tolist() == [1, 2]


@pytest.mark.skipif(not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="numpy 2 has it")
def test_strings_of_any_length_cannot_be_shared() -> None:
    with pytest.raises(shmesh.Unsupported):
        shmesh.empty(3, np.dtypes.StringDType())


@pytest.mark.parametrize("shape", [-1, (2, -3), "ab", "12", 2.5, (2.5, 3), (1 << 40, 1 << 40), None])
def test_shapes_that_cannot_be(shape: object) -> None:
    with pytest.raises((shmesh.Invalid, TypeError)):
        shmesh.empty(shape, np.float64)


def test_more_than_there_is() -> None:
    with pytest.raises(shmesh.NoSpace) as error:
        shmesh.empty(1 << 50, np.uint8)
    assert isinstance(error.value, MemoryError) and "smaller" in str(error.value)


def test_names(ipc: Path) -> None:
    array = shmesh.from_numpy(np.arange(4), "weights")
    assert array.name == "weights" and os.listdir(ipc) == ["weights.array"]
    opened = shmesh.open("weights", 4, np.int64)
    assert opened.tolist() == [0, 1, 2, 3] and not opened.flags.writeable
    array[0] = 9
    assert opened[0] == 9
    view = array[1:]
    del array
    gc.collect()
    assert shmesh.open("weights").shape == (4,), "a view keeps the name, as it keeps the memory"
    del view
    gc.collect()
    assert os.listdir(ipc) == [] and opened[0] == 9
    with pytest.raises(shmesh.NotFound):
        shmesh.open("weights")


def test_name_can_be_taken_away_and_given_again() -> None:
    first = shmesh.from_numpy([1], "x")
    with pytest.raises(shmesh.AlreadyExists) as error:
        shmesh.empty(3, name="x")
    assert isinstance(error.value, FileExistsError)
    first.unlink()
    assert first.name is None
    second = shmesh.from_numpy([2], "x")
    assert shmesh.open("x").tolist() == second.tolist() == [2] and first.tolist() == [1]


def test_end_of_an_array_removes_no_others_name(ipc: Path) -> None:
    first = shmesh.from_numpy([1], "x")
    (ipc / "x.array").unlink()  # as `rm /dev/shm/*` does
    second = shmesh.from_numpy([2], "x")
    del first
    gc.collect()
    assert shmesh.open("x").tolist() == second.tolist() == [2]


def test_wrong_expectations_and_names(ipc: Path) -> None:
    array = shmesh.empty((2, 3), np.float32, "x")
    for shape, dtype in (((3, 2), None), (None, np.float64), (6, np.float32), ((2, 3), np.int32)):
        with pytest.raises(shmesh.Mismatch, match="omit shape and dtype"):
            shmesh.open("x", shape, dtype)
    assert shmesh.open("x", array.shape, array.dtype).shape == (2, 3)
    for name in ("", "../x", "a/b", "x" * 100, ".x", "a\0b"):
        with pytest.raises((shmesh.Invalid, ValueError)):
            shmesh.open(name)
        with pytest.raises((shmesh.Invalid, ValueError)):
            shmesh.empty(1, name=name)
    with pytest.raises(shmesh.NotFound, match="SHMESH_DIR"):
        shmesh.empty(1, name="x", directory="/nowhere")
    with pytest.raises(shmesh.NotFound):
        shmesh.open("x", directory="/nowhere")
    deep = ipc / ("x" * 100)
    deep.mkdir()
    for use in (lambda: shmesh.empty(1, name="x", directory=deep), lambda: shmesh.open("x", directory=deep)):
        with pytest.raises(shmesh.System, match="shorter"):
            use()
    deep.rmdir()


def test_only_the_owner_writes() -> None:
    array = shmesh.empty(4, np.int32, "x")
    opened = shmesh.open("x")
    with pytest.raises(ValueError):
        opened[0] = 1
    with pytest.raises(ValueError):
        opened.flags.writeable = True
    with pytest.raises(shmesh.ReadOnly, match="readers_write"):
        shmesh.open("x", writable=True)
    # Not by the descriptor either: the memory is sealed against new writers, and against changes of its size.
    with pytest.raises(PermissionError):
        os.pwrite(array.memory.fileno(), b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(array.memory.fileno(), 1)


def test_readers_that_may_write() -> None:
    array = shmesh.empty(4, np.int32, "x", readers_write=True)
    shmesh.open("x", writable=True)[0] = 5
    pickle.loads(pickle.dumps(array))[1] = 6
    assert array.tolist() == [5, 6, 0, 0]
    assert not shmesh.open("x").flags.writeable


def test_views_travel_as_views() -> None:
    array = shmesh.from_numpy(np.arange(24).reshape(4, 6))
    for view in (array[1:3], array[::2, ::-1], array.T, array[2, 3:], array.reshape(-1)):
        copy = pickle.loads(pickle.dumps(view))
        assert np.array_equal(copy, view) and copy.strides == view.strides
    array[...] = 0
    assert copy.sum() == 0, "it is the same memory"


def test_copies_outside_shared_memory_are_pickled_whole() -> None:
    array = shmesh.empty(4)
    assert pickle.loads(pickle.dumps(array + 1)).tolist() == [1, 1, 1, 1]
    with pytest.raises(shmesh.Invalid, match="from_numpy"):
        _ = array.copy().view(shmesh.Array).memory


def test_handle_can_be_used_often_while_the_array_lives_and_once_after() -> None:
    array = shmesh.from_numpy([1, 2, 3])
    handle = pickle.dumps(array)
    assert [pickle.loads(handle).sum() for _ in range(3)] == [6, 6, 6]
    handle = pickle.dumps(array)
    del array
    gc.collect()
    assert pickle.loads(handle).tolist() == [1, 2, 3], "it was on its way"
    gc.collect()
    with pytest.raises(shmesh.NotFound, match="keep it there"):
        pickle.loads(handle)


def test_closing_with_live_views_and_use_after() -> None:
    memory = shmesh.Memory.create(100)
    view = memory.view(10, 20)
    with pytest.raises(shmesh.StillViewed, match="del") as error:
        memory.close()
    assert isinstance(error.value, BufferError)
    view[0] = 1
    part = view[3:]
    del view
    with pytest.raises(shmesh.StillViewed):
        memory.close()
    del part
    memory.close()
    assert memory.closed
    for use in (lambda: memory.view(0, 1), lambda: memory.nbytes, memory.handle, memory.fileno):
        with pytest.raises(shmesh.Closed):
            use()
    memory.close()


def test_no_view_reaches_outside() -> None:
    memory = shmesh.Memory.create(100)
    for offset, length in ((0, 101), (100, 1), (101, 0), (1 << 63, 1 << 63), (50, (1 << 64) - 50)):
        with pytest.raises((shmesh.Mismatch, OverflowError)):
            memory.view(offset, length)


def test_no_handle_reaches_outside() -> None:
    """A pickle that was manipulated or damaged."""
    array = shmesh.empty(8, np.uint8)
    fetch, (address, token, named, shape, dtype, offset, strides, writable) = array.__reduce_ex__(2)
    for wrong in ((shape, -1, strides), (shape, 1 << 62, strides), ((9,), 0, None), (shape, 0, (-1,)), (shape, 0, (1 << 40,))):
        memory = shmesh.Memory.fetch(*array.memory.handle())
        with pytest.raises((shmesh.Mismatch, shmesh.Invalid)):
            shmesh._array._over(memory, wrong[0], dtype, wrong[1], wrong[2])
    assert fetch(address, token, named, shape, dtype, offset, strides, writable).shape == shape
    # memory is mapped in whole pages, and what is behind the last element of one is not the array's
    assert array.memory.nbytes == 8


def test_handle_of_an_ended_process() -> None:
    with pytest.raises(shmesh.NotFound):
        shmesh.Memory.fetch("shmesh-absent", bytes(16))
    array = shmesh.empty(1)
    address, token = array.memory.handle()
    with pytest.raises(shmesh.NotFound):
        shmesh.Memory.fetch(address, bytes(16))
    with pytest.raises((ValueError, TypeError)):
        shmesh.Memory.fetch(address, token[:3])
    assert shmesh.Memory.fetch(address, token).nbytes == 8


def test_deep_copies_are_ordinary() -> None:
    import copy

    assert type(copy.deepcopy(shmesh.empty(3))) is np.ndarray


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "int4"])
def test_types_of_ml_dtypes(kind: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, kind))
    source = np.array([[-1, 0, 1], [2, 3, 1]]).astype(dtype)
    named = shmesh.from_numpy(source, name="weights")
    opened = shmesh.open("weights", shape=(2, 3), dtype=dtype)
    assert opened.dtype == dtype and opened.astype(float).tolist() == source.astype(float).tolist()
    copy = pickle.loads(pickle.dumps(named[1:]))
    assert copy.dtype == dtype and copy.astype(float).tolist() == source[1:].astype(float).tolist()
    queue = shmesh.BatchQueue(1000)
    queue.put({"x": source})
    with queue.batch({"x": ((2, 3), dtype)}) as batch:
        batch["x"][...] = source + source
    for factor in (1, 2):
        batch = queue.get(timeout=200)
        assert batch["x"].dtype == dtype
        assert batch["x"].astype(float).tolist() == (source.astype(float) * factor).tolist()
    del batch
    queue.close()


def test_unknown_types_of_ml_dtypes_are_refused() -> None:
    for name in ("os", "__name__", "finfo", "bfloat16.__class__", "nonsense"):
        with pytest.raises(ValueError, match="ml_dtypes"):
            shmesh._array._dtype_of(f"ml_dtypes.{name}")  # type: ignore[attr-defined]
