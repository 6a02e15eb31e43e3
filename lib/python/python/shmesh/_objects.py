"""Any object as one message: its pickle, and the memory of its arrays, which is not pickled.

The MSG part has the number of buffers, the bytes of the pickle and of each buffer, and the pickle if it fits; the DATA part the pickle
if it does not, and the buffers, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ._errors import Damaged
from ._shmesh import Loan, Message, decode, encode

_HEAD = struct.Struct("<IIQ")
_MAGIC = 0x316A624F
_ALIGN = 64
# A smaller buffer is cheaper as a part of the pickle.
_BUFFER_MIN = 1024
# Limit per object, so that the sizes fit into the MSG part with the pickle.
_BUFFERS_MAX = 256

# Exceptions of parsing data that another process has written.
_NONSENSE = (ValueError, TypeError, LookupError, ArithmeticError, struct.error)

Pickler = Callable[..., pickle.Pickler]

_PLAIN_TYPES = [np.dtype(char) for char in "?bBhHiIlLqQefdFD"]
# By identity, because an equal type may have metadata.
_NAME_OF_TYPE = {id(dtype): dtype.str for dtype in _PLAIN_TYPES}
PLAIN_SCALARS = {dtype.type for dtype in _PLAIN_TYPES}


def _reduce_array(array: Any) -> Any:
    """As numpy's, at half the price, and without a `dtype`: in the state of one, a hostile sender can hide that elements are pointers."""
    dtype = array.dtype
    name = _NAME_OF_TYPE.get(id(dtype))
    if name is None:
        name = dtype.str
        if dtype.hasobject or dtype.metadata or np.dtype(name) != dtype:
            return array.__reduce_ex__(5)
        # Not all types can be exported as buffers.
        array = array.view(f"V{dtype.itemsize}") if dtype.itemsize else array
    if not array.size or not dtype.itemsize:
        return np.ndarray, (array.shape, name)
    if array.flags.c_contiguous:
        return np.ndarray, (array.shape, name, pickle.PickleBuffer(array))
    if array.flags.f_contiguous:
        return np.ndarray, (array.shape, name, pickle.PickleBuffer(array), 0, None, "F")
    return np.ndarray, (array.shape, name, pickle.PickleBuffer(array.copy()))


def _reduce_scalar(scalar: Any) -> Any:
    return type(scalar), (scalar.item(),)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """The functions of `copyreg`, as they are at each use, except for numpy's types."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[kind]


_REDUCERS = _Reducers(dict.fromkeys(PLAIN_SCALARS, _reduce_scalar) | {np.ndarray: _reduce_array})


def _pickler(file: io.BytesIO, *, protocol: int, buffer_callback: Any) -> pickle.Pickler:
    pickler = pickle.Pickler(file, protocol, buffer_callback=buffer_callback)
    pickler.dispatch_table = _REDUCERS
    return pickler


class Parts:
    """An object in parts: the bytes of its MSG part, and the buffers of its DATA part with their offsets."""

    __slots__ = ("data", "head", "nbytes")

    def __init__(self, head: bytes, data: list[tuple[int, Any]], nbytes: int) -> None:
        self.head = head
        self.data = data
        self.nbytes = nbytes

    @classmethod
    def of(
        cls, value: Any, msg_bytes: int, pickler: Pickler | None = None, buffer_min: int = _BUFFER_MIN
    ) -> Parts:
        """Splits an object, for buffers with ``msg_bytes`` in their MSG part. Arrays below ``buffer_min`` bytes are pickled."""
        if pickler is None and (plain := encode(value, msg_bytes, buffer_min)) is not None:
            head, pieces, nbytes = plain
            return cls(head, pieces, nbytes)
        buffers: list[memoryview] = []

        def keep_out(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < buffer_min or len(buffers) == _BUFFERS_MAX:
                return True
            buffers.append(raw)
            return False

        file = io.BytesIO()
        (pickler or _pickler)(file, protocol=5, buffer_callback=keep_out).dump(value)
        pickled = file.getvalue()
        head = _HEAD.pack(_MAGIC, len(buffers), len(pickled))
        if buffers:
            head += struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
        data: list[tuple[int, Any]] = []
        nbytes = 0
        if len(head) + len(pickled) <= msg_bytes:
            head += pickled
        else:
            data.append((0, memoryview(pickled)))
            nbytes = _aligned(len(pickled))
        for buffer in buffers:
            data.append((nbytes, buffer))
            nbytes += _aligned(buffer.nbytes)
        return cls(head, data, nbytes)

    def write(self, data: np.ndarray) -> None:
        """Writes the DATA part."""
        for offset, piece in self.data:
            data[offset : offset + piece.nbytes] = np.frombuffer(piece, np.uint8)

    def send(self, loan: Loan) -> None:
        """Writes the object into a loan, and sends it."""
        try:
            loan.msg[:] = np.frombuffer(self.head, np.uint8)
            if self.nbytes:
                self.write(loan.data)
            loan.send()
        except BaseException:
            # A caller that keeps the exception would keep the frames with the loan.
            loan.drop()
            raise


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def read(
    message: Message,
    *,
    copy: bool,
    what: str,
    loads: Callable[..., Any] = pickle.loads,
    head: bytes | None = None,
    data: np.ndarray | None = None,
) -> Any:
    """The object in a message. Without ``copy`` its arrays are read-only memory of the message, and keep its buffers.

    ``head`` and ``data`` are the MSG and the DATA part, if they lie elsewhere. Unpickling runs code that the sender chooses: only for
    senders that are trusted.
    """
    if head is None and data is None and (plain := decode(message, copy)) is not None:
        return plain[0]
    if head is None:
        head = bytes(message)
    try:
        magic, count, pickle_bytes = _HEAD.unpack_from(head)
        if magic != _MAGIC or count > _BUFFERS_MAX:
            raise ValueError("it does not begin as one")
        lengths = struct.unpack_from(f"<{count}Q", head, _HEAD.size) if count else ()
        rest = memoryview(head)[_HEAD.size + 8 * count :]
        offset = 0
        bytes_of_data = (message.data if data is None else data) if count or len(rest) < pickle_bytes else None
        if len(rest) >= pickle_bytes:
            pickled: Any = rest[:pickle_bytes]
        elif bytes_of_data is not None and pickle_bytes <= bytes_of_data.size:
            # A copy, because the sender could still change it meanwhile.
            pickled = bytes_of_data[:pickle_bytes].tobytes()
            offset = _aligned(pickle_bytes)
        else:
            raise ValueError(f"it has no room for {pickle_bytes} bytes of pickle")
        buffers = []
        for length in lengths:
            if bytes_of_data is None or offset + length > bytes_of_data.size:
                raise ValueError(f"it has no room for a buffer of {length} bytes")
            buffer = bytes_of_data[offset : offset + length]
            buffers.append(bytearray(buffer) if copy else buffer)
            offset += _aligned(length)
    except _NONSENSE as wrong:
        raise Damaged(f"{what}: received a message that is not an object: {wrong}") from None
    return loads(pickled, buffers=buffers)
