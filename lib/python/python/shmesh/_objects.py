"""Any object as one message: its pickle, and the memory of its arrays, which is not pickled.

`object.rs` defines the MSG part, which has the sizes of pickle and buffers and the pickle if it fits, and the DATA part, which has the
pickle if it does not fit, and the buffers.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from ._errors import Damaged
from ._shmesh import BUFFERS_MAX, PLAIN_TYPES, Loan, Message, decode, encode, object_parts, object_places

# A smaller buffer is cheaper as a part of the pickle.
_BUFFER_MIN = 1024

Pickler = Callable[..., pickle.Pickler]

_PLAIN_TYPES = [np.dtype(char) for char in PLAIN_TYPES]
# By identity, because an equal type may have metadata.
_NAME_OF_TYPE = {id(dtype): dtype.str for dtype in _PLAIN_TYPES}


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


_REDUCERS = _Reducers({dtype.type: _reduce_scalar for dtype in _PLAIN_TYPES} | {np.ndarray: _reduce_array})


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
            return cls(*plain)
        buffers: list[tuple[memoryview, int]] = []

        def keep_out(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < buffer_min or len(buffers) == BUFFERS_MAX:
                return True
            buffers.append((raw, raw.nbytes))
            return False

        file = io.BytesIO()
        (pickler or _pickler)(file, protocol=5, buffer_callback=keep_out).dump(value)
        return cls(*object_parts(file.getvalue(), buffers, msg_bytes))

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
    if (places := object_places(head)) is None:
        raise Damaged(f"{what}: received a message that is not an object: it does not begin as one")
    is_in_head, (start, length), in_data = places

    def part(offset: int, nbytes: int) -> np.ndarray:
        all_of_it = message.data if data is None else data
        if offset + nbytes > all_of_it.size:
            raise Damaged(f"{what}: received a message that is not an object: its DATA part lacks {nbytes} bytes at {offset}")
        return all_of_it[offset : offset + nbytes]

    # A copy, because the sender could still change it meanwhile.
    pickled = head[start : start + length] if is_in_head else part(start, length).tobytes()
    buffers = [bytearray(part(*place)) if copy else part(*place) for place in in_data]
    return loads(pickled, buffers=buffers)
