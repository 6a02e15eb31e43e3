"""numpy arrays in shared memory."""

from __future__ import annotations

import ast
import operator
import os
import sys
from typing import Any

import numpy as np

from ._errors import Invalid, Mismatch, NotFound, Unsupported
from ._shmesh import DEFAULT_DIR, Memory

__all__ = ["Array", "attach_sysv", "empty", "from_dlpack", "from_numpy", "ipc_directory", "open"]


# Exceptions of parsing data that another process has written.
_NONSENSE = (ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)

# The library with bfloat16 and types of at most 8 bits, which jax and others use.
_ML_DTYPES = "ml_dtypes"


def ipc_directory(directory: str | os.PathLike[str] | None = None) -> str:
    """The IPC directory: ``directory``, or ``SHMESH_DIR``, or ``/dev/shm``."""
    return os.fspath(directory or os.environ.get("SHMESH_DIR") or DEFAULT_DIR)


class Array(np.ndarray):
    """An array in shared memory.

    It is a numpy array in every respect. Views of it are in the same memory, which stays mapped as long as any of them
    lives; results of computations are ordinary arrays. It is pickled as a handle: the receiver maps the same memory,
    read-only unless it was created with ``readers_write=True``.
    """

    _memory: Memory | None

    def __array_finalize__(self, obj: Any, /) -> None:
        memory = getattr(obj, "_memory", None)
        # numpy also calls this for copies and results, which are not in shared memory.
        self._memory = memory if memory is not None and _offset(self, memory) is not None else None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False, /) -> Any:
        if array is self or (isinstance(array, Array) and array._memory is not None):
            return array
        plain = np.asarray(array)
        return plain[()] if return_scalar or plain.ndim == 0 else plain

    def __getitem__(self, index: Any, /) -> Any:
        item = super().__getitem__(index)
        # Indexed by a list or a mask, it is a copy.
        if type(item) is Array and item._memory is None:
            return item.view(np.ndarray)
        return item

    @property
    def memory(self) -> Memory:
        """The memory that the array is in."""
        if self._memory is None:
            raise Invalid("this array is not in shared memory, because it was copied or computed; use `shmesh.from_numpy`")
        return self._memory

    @property
    def name(self) -> str | None:
        """Its name in the IPC directory, in the process that gave it the name."""
        path = self.memory.path
        return None if path is None else os.path.basename(path).removesuffix(".array")

    def unlink(self) -> None:
        """Removes the name. Processes that have the array keep it."""
        self.memory.unlink()

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        memory = self._memory
        offset = None if memory is None else _offset(self, memory)
        if memory is None or offset is None:
            return self.view(np.ndarray).__reduce_ex__(protocol)
        address, token = memory.handle()
        writable = self.flags.writeable and memory.readers_write
        path = memory.path
        # Other processes can open a name even if they cannot use a handle, and by then another array may have it.
        named = None if path is None else (os.fspath(path.parent), self.name, memory.identity)
        return _fetch, (address, token, named, self.shape, self.dtype, offset, self.strides, writable)

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def copy(self, order: Any = "C") -> Any:
        """An ordinary array. `from_numpy` copies to shared memory."""
        return np.array(self, order=order, copy=True, subok=False)

    def __deepcopy__(self, memo: Any, /) -> Any:
        return np.array(self, copy=True, subok=False)


def _offset(array: np.ndarray, memory: Memory) -> int | None:
    """The offset of the first element in the memory."""
    offset = int(array.__array_interface__["data"][0]) - memory.address
    return offset if 0 <= offset <= memory.nbytes and array.base is not None else None


def _checked(dtype: Any) -> np.dtype:
    """The data type, if elements consist of nothing else."""
    kind: np.dtype = np.dtype(dtype)
    if kind.hasobject:
        raise Unsupported(
            f"dtype {kind} holds Python objects, which another process cannot read; use a fixed-size type, or pickle them"
        )
    if kind.itemsize == 0:
        raise Unsupported(f"dtype {kind} has no size; give the length of its elements, as in 'S16'")
    return kind


def _laid_out(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype, int]:
    kind = _checked(dtype)
    lengths = (shape,) if isinstance(shape, (int, np.integer)) else shape
    try:
        lengths = tuple(operator.index(length) for length in lengths)
    except TypeError:
        raise Invalid(f"shape {shape!r} is neither a whole number nor a sequence of whole numbers") from None
    if any(length < 0 for length in lengths):
        raise Invalid(f"shape {lengths} has a negative length")
    if kind.subdtype is not None:
        kind, inner = kind.subdtype
        lengths += inner
    nbytes = kind.itemsize
    for length in lengths:
        nbytes *= length
    if nbytes > sys.maxsize:
        raise Invalid(f"shape {lengths} of {kind} has {nbytes} bytes, which exceeds the address space; use a smaller shape")
    return lengths, kind, nbytes


def _described(kind: np.dtype) -> Any:
    """The data type as literals, for processes that get its description as text. Not every type can be described."""
    if kind.type.__module__ == _ML_DTYPES and kind.type.__name__ == kind.name:
        return f"{_ML_DTYPES}.{kind.name}"
    try:
        descr = np.lib.format.dtype_to_descr(kind)
        if np.lib.format.descr_to_dtype(descr) == kind:
            return descr
    except (TypeError, ValueError):
        pass
    raise Unsupported(
        f"dtype {kind} cannot be described to a process that opens it by a name or receives a batch of it (fields that "
        "overlap, or a type of another library than numpy and ml_dtypes); view it as one of numpy's, as in "
        "`array.view('u2')`, or pickle an array without a name"
    )


def _dtype_of(descr: Any) -> np.dtype:
    """The data type from a description of `_described` in another process."""
    module, _, name = descr.partition(".") if isinstance(descr, str) else ("", "", "")
    if module != _ML_DTYPES:
        return np.lib.format.descr_to_dtype(descr)
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError(f"{descr} is a type of ml_dtypes, which is not installed here (`pip install ml_dtypes`)") from None
    # In the module, only the types of numbers have this base class.
    kind = getattr(ml_dtypes, name, None)
    if not (isinstance(kind, type) and issubclass(kind, np.generic)):
        raise ValueError(f"ml_dtypes {ml_dtypes.__version__} has no type {name}")
    return np.dtype(kind)


def _meta(kind: np.dtype, lengths: tuple[int, ...]) -> bytes:
    """The description of an array with a name."""
    return repr((_described(kind), lengths)).encode()


def _over(
    memory: Memory,
    shape: tuple[int, ...],
    dtype: np.dtype,
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
) -> Array:
    root = memory.view(0, memory.nbytes)
    # numpy does not check the offset.
    if offset < 0:
        raise Invalid(f"offset {offset} is negative")
    try:
        array = np.ndarray.__new__(Array, shape, dtype, root, offset, strides)
    except (TypeError, ValueError) as wrong:
        raise Mismatch(f"shape {shape} of {dtype} does not fit into {memory.nbytes} bytes of shared memory: {wrong}") from None
    array._memory = memory
    return array


def empty(
    shape: Any,
    dtype: Any = np.float64,
    name: str | None = None,
    *,
    readers_write: bool = False,
    directory: str | os.PathLike[str] | None = None,
    mode: int = 0o600,
) -> Array:
    """A new array, all zero, C-contiguous and page-aligned, whose memory is reserved.

    With a name, `open` finds it in the IPC directory as long as any view of it lives here. Only this process (and those
    forked from it) can write it, unless ``readers_write``. ``mode`` 0o660 lets the group open it.
    """
    lengths, kind, nbytes = _laid_out(shape, dtype)
    meta = None if name is None else _meta(kind, lengths)
    memory = Memory.create(nbytes, readers_write=readers_write)
    array = _over(memory, lengths, kind)
    if name is not None and meta is not None:
        memory.publish(ipc_directory(directory), name, meta, mode=mode)
    return array


def from_numpy(
    array: Any,
    name: str | None = None,
    *,
    readers_write: bool = False,
    directory: str | os.PathLike[str] | None = None,
    mode: int = 0o600,
) -> Array:
    """Copies an array into shared memory. The copy is C-contiguous, whatever the layout of the original is."""
    source = np.asarray(array)
    copy = empty(
        source.shape, source.dtype, name, readers_write=readers_write, directory=directory, mode=mode
    )
    copy[...] = source
    return copy


def from_dlpack(tensor: Any, name: str | None = None, *, readers_write: bool = False) -> Array:
    """Copies a tensor of another library (torch, cupy, jax), even from a device, into shared memory."""
    if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] != 1:
        try:
            source = np.from_dlpack(tensor, device="cpu", copy=True)  # numpy 2.1 and later
        except (TypeError, BufferError, ValueError) as wrong:
            raise Unsupported(f"the tensor is on a device, and cannot be copied from there ({wrong}); move it to the CPU") from None
    else:
        try:
            source = np.from_dlpack(tensor)
        except (AttributeError, TypeError, BufferError, RuntimeError) as wrong:
            raise Unsupported(
                f"numpy cannot convert this tensor ({wrong}); detach it, or view it as a type that numpy has"
            ) from None
    return from_numpy(source, name, readers_write=readers_write)


def open(  # noqa: A001 - as `io.open` and `Image.open` are called
    name: str,
    shape: Any = None,
    dtype: Any = None,
    *,
    writable: bool = False,
    directory: str | os.PathLike[str] | None = None,
) -> Array:
    """Opens the array that another process shares under this name, read-only unless ``writable``.

    ``shape`` and ``dtype``, if given, must match.
    """
    memory, meta = Memory.open(ipc_directory(directory), name, writable=writable)
    try:
        descr, found = ast.literal_eval(meta.decode())
        kind = _checked(_dtype_of(descr))
        lengths, kind, _ = _laid_out(found, kind)
    except _NONSENSE as wrong:
        raise Mismatch(f"array {name}: its owner describes it in a way that this version does not know: {wrong}") from None
    if shape is not None or dtype is not None:
        asked_shape = lengths if shape is None else shape
        asked = _laid_out(asked_shape, kind if dtype is None else dtype)
        if asked[:2] != (lengths, kind):
            raise Mismatch(
                f"array {name} is {lengths} of {kind}, not {asked[0]} of {asked[1]}; omit shape and dtype to use those of the owner"
            )
    return _over(memory, lengths, kind)


def attach_sysv(
    shape: Any,
    dtype: Any = np.float64,
    *,
    shmid: int | None = None,
    key: int | None = None,
    offset: int = 0,
    writable: bool = False,
) -> Array:
    """An array over an existing System V segment (``shmget``), by id or by key; read-only unless ``writable``.

    The segment is attached at a free address, detached when the last view is gone, and never created or removed.
    """
    lengths, kind, nbytes = _laid_out(shape, dtype)
    if key is not None and key >= 1 << 31:
        key -= 1 << 32  # `ipcs` shows keys without a sign
    memory = Memory.attach_sysv(shmid=shmid, key=key, writable=writable)
    if offset + nbytes > memory.nbytes:
        raise Mismatch(
            f"{lengths} of {kind} from byte {offset} needs {offset + nbytes} bytes, the segment has {memory.nbytes}"
        )
    return _over(memory, lengths, kind, offset)


def _fetch(
    address: str,
    token: bytes,
    named: tuple[str, str, tuple[int, int]] | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    offset: int,
    strides: tuple[int, ...],
    writable: bool,
) -> Array:
    """Unpickles an array."""
    try:
        memory = Memory.fetch(address, token, writable=writable)
    except NotFound:
        if named is None:
            raise
        directory, name, identity = named
        memory, _ = Memory.open(directory, name, writable=writable)
        if memory.identity != identity:
            raise NotFound(f"the array {name} of this handle was removed, and another array has its name now") from None
    return _over(memory, shape, _checked(dtype), offset, strides)

