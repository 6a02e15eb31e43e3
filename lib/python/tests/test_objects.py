"""Objects as messages: what the module writes and reads itself, beside pickle."""

import itertools
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import shmesh
from shmesh import _objects
from shmesh._shmesh import Link, decode, encode, object_parts

PLAIN = "?bBhHiIlLqQefdFD"
ROOMY = 1 << 14


@contextmanager
def link_of_two() -> Iterator[tuple[Link, Link]]:
    with shmesh.Link.create("objects", pools={"cpu_msg": (ROOMY, 8), "cpu_data": (1 << 20, 8)}) as here, shmesh.Link.attach("objects") as there:
        yield here, there


def crossed(here: Link, there: Link, head: bytes, data: bytes | np.ndarray[Any, Any] = b"") -> Any:
    here.send(head, data)
    message = there.try_receive()
    assert message is not None
    return message


def arrays(draw: random.Random) -> np.ndarray[Any, Any]:
    shape = tuple(draw.randrange(1, 5) for _ in range(draw.randrange(4)))
    length = int(np.prod(shape, dtype=int))
    made = np.frombuffer(draw.randbytes(16 * length), np.uint8)[: length * 8].astype(draw.choice(PLAIN))[:length].reshape(shape)
    made.flags.writeable = draw.random() < 0.8
    return made


def values(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return draw.choice([None, True, False, (), "", b""])
    if kind == 1:
        return draw.choice([1, -1]) * (draw.getrandbits(draw.randrange(1, 64)))
    if kind == 2:
        return draw.choice([draw.gauss(0, 1e3), float("inf"), -0.0])
    if kind == 3:
        return "".join(map(chr, (draw.randrange(0x20, 0xD800) for _ in range(draw.choice([1, 5, 90, 300])))))
    if kind == 4:
        return draw.randbytes(draw.choice([1, 100, 255, 256, 5000]))
    if kind == 5:
        return arrays(draw)
    several = [values(draw, depth + 1) for _ in range(draw.randrange(5))]
    if kind == 6:
        return several
    if kind == 7:
        return tuple(several)
    return {draw.choice([draw.getrandbits(20), f"key {i}"]): item for i, item in enumerate(several)}


def assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.shape, found.flags.writeable) == (value.dtype, value.shape, value.flags.writeable)
        assert found.tobytes() == value.tobytes()
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key, item in value.items():
            assert_same(found[key], item)
    elif isinstance(value, (list, tuple)):
        assert len(found) == len(value)
        for one, other in zip(found, value):
            assert_same(one, other)
    elif isinstance(value, set):
        assert found == value
    else:
        assert repr(found) == repr(value)


def test_random_objects_arrive_and_pickle_agrees() -> None:
    draw = random.Random(7)
    with link_of_two() as (here, there):
        for _ in range(300):
            value = values(draw)
            msg_bytes, buffer_min = draw.choice([100, 1000, ROOMY]), draw.choice([1, 8, 10_000])
            made = encode(value, msg_bytes, buffer_min)
            assert made is not None
            parts = _objects.Parts(*made)
            assert len(parts.head) <= ROOMY
            data = np.zeros(parts.nbytes, np.uint8)
            parts.write(data)
            message = crossed(here, there, parts.head, data)
            plain = decode(message, True)
            assert plain is not None
            assert_same(plain[0], value)
            by_pickle = _objects.read(message, copy=True, what="test", head=bytes(message))
            assert_same(by_pickle, value)
            plain = decode(message, False)
            assert plain is not None
            kept = plain[0]
            del plain
            del message
            assert_same_but_read_only(kept, value, buffer_min)
            del kept


def assert_same_but_read_only(found: Any, value: Any, buffer_min: int) -> None:
    if isinstance(value, np.ndarray):
        assert found.tobytes() == value.tobytes() and found.dtype == value.dtype
        assert found.flags.writeable == (value.flags.writeable and value.nbytes < buffer_min)
    elif isinstance(value, (list, tuple)):
        for one, other in zip(found, value):
            assert_same_but_read_only(one, other, buffer_min)


def test_all_plain_values_that_pickle_writes_are_read() -> None:
    draw = random.Random(8)
    with link_of_two() as (here, there):
        more: list[Any] = [
            [[1]] * 3,
            list(range(2000)),
            [str(i) for i in range(400)] * 2,
            -(1 << 62),
            1 << 31,
            -(1 << 100),
            1 << 2000,
            "\ud800",
            {1, "two", b"3"},
            {None: 1, 2.5: 2, np.int64(3): 4, np.float32(0.5): 5},
            [1 + 2j, bytearray(3)],
            [np.dtype(char).type(1) for char in PLAIN],
            np.zeros(3, ">f4"),
            np.zeros((0, 3), np.int16),
            np.arange(12.0).reshape(3, 4).T,
            np.arange(12.0)[::3],
            np.array(["a", "bcd"]),
            np.array([b"a", b"bcd"]),
            np.array(["2020-01-01", "NaT"], "M8[D]"),
            np.array([5], "m8[25s]"),
        ]
        for value in [*(values(draw) for _ in range(100)), *more]:
            parts = _objects.Parts.of(value, ROOMY, _objects._pickler)
            data = np.zeros(parts.nbytes, np.uint8)
            parts.write(data)
            message = crossed(here, there, parts.head, data)
            plain = decode(message, True)
            assert plain is not None, value
            assert_same(plain[0], value)
            assert_same(_objects.read(message, copy=True, what="test", head=bytes(message)), value)


class Text(str):
    pass


def test_rest_is_left_to_pickle() -> None:
    shared = np.arange(3)
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(50):
        deep = [deep]
    for value in (
        [shared, shared],
        [[shared]] * 2,
        [b"x" * 100] * 2,
        ["x" * 100] * 2,
        itself,
        deep,
        list(range(300)),
        {1, 2},
        Text("a"),
        1 << 64,
        "\ud800",
        bytearray(3),
        np.float32(1),
        np.zeros(3, "f4,i4"),
        np.zeros(3, ">f4"),
        np.zeros(3, np.dtype("f4", metadata={"unit": "m"})),
        np.array([None]),
        np.zeros(0),
        np.zeros((4, 4))[:, 1],
        np.zeros((4, 4)).T,
        np.zeros(3).view(np.recarray),
        len,
    ):
        assert encode(value, ROOMY, 1 << 14) is None
    with shmesh.MessageQueue(1 << 16, name="queue") as queue, shmesh.MessageQueue.attach("queue") as reader:
        queue.enqueue([shared, shared])
        one, other = reader.dequeue()
        assert one is other
        # Twice its bytes would not fit.
        text = b"x" * 40_000
        queue.enqueue({"a": text, "b": text})
        assert reader.dequeue() == {"a": text, "b": text}


def message_of(program: bytes) -> bytes:
    """The MSG part of an object without buffers."""
    return object_parts(program, [], ROOMY)[0]


# Opcodes that leave a value on the stack: a tuple of two times the same tuple, and so on.
SHARED = b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60))
LONG_TO_HASH = {
    "tuple of tuples": b"K\x01\x85",
    "as deep as it is long": b")" + b"\x85" * 10_000,
    "a tuple of 2^60 others": SHARED,
    "integers with one hash": b"\x8a\x0a" + (7 * ((1 << 61) - 1)).to_bytes(10, "little"),
    "complex numbers with one hash": b"\x8c\x08builtins\x8c\x07complex\x93K\x01K\x02\x86R",
    "numpy's of them": b"\x8c\x05numpy\x8c\x09complex64\x93K\x01\x85R",
}


def test_keys_that_take_long_to_hash_are_left_to_pickle() -> None:
    with link_of_two() as (here, there):
        for key, is_plain in ((b"K\x01", True), *((key, False) for key in LONG_TO_HASH.values())):
            for program in (b"}(" + key + b"Nu.", b"}" + key + b"Ns.", b"\x8f(" + key + b"\x90."):
                assert (decode(crossed(here, there, message_of(program)), True) is not None) == is_plain


EXHAUSTING = {
    **{name: b"}(" + key + b"Nu." for name, key in LONG_TO_HASH.items()},
    "deep keys": b"})" + b"\x85" * 200_000 + b"Ns.",
    "deep elements": b"\x8f()" + b"\x85" * 200_000 + b"\x90.",
    "a frozen set of deep ones": b"()" + b"\x85" * 200_000 + b"\x91.",
    "a set by its class": b"\x8c\x08builtins\x8c\x03set\x93" + SHARED + b"\x85\x85R.",
    "a memo of 2^31 places": b"Nr\xff\xff\xff\x7f.",
    "a million bytes of nothing": b"\x8c\x08builtins\x8c\x09bytearray\x93J\x40\x42\x0f\x00\x85R.",
    "numbers in a row of places": b"}(" + b"".join(b"\x8a\x08" + n.to_bytes(8, "little") + b"N" for n in range(5000)) + b"u.",
    "numbers in a row of places of a set": b"\x8f(" + b"".join(b"\x8a\x08" + n.to_bytes(8, "little") for n in range(5000)) + b"\x90.",
    "one number again and again": b"}(" + b"K\x01N" * 5000 + b"u.",
    "memory of any size": b"\x8c\x05numpy\x8c\x07ndarray\x93\x8a\x05\x00\x00\x00\x00\x7f\x85\x8c\x03<i8\x86R.",
    "memory as it was before": b"\x8c\x05numpy\x8c\x07ndarray\x93K\x09\x85\x8c\x03<i8\x86R.",
    "strings of pointers": b"\x8c\x05numpy\x8c\x07ndarray\x93K\x01\x85\x8c\x01TC\x10" + bytes(16) + b"\x87R.",
}


def put(queue: shmesh.MessageQueue, program: bytes) -> None:
    parts = _objects.Parts(*object_parts(program, [], ROOMY))
    link = queue._link
    if parts.nbytes:
        parts.send(link.loan(len(parts.head), parts.nbytes))
    else:
        link.send(parts.head)


@pytest.mark.parametrize("name", EXHAUSTING)
def test_pickles_that_exhaust_a_reader_are_refused(name: str) -> None:
    """Where the writer is not trusted. They crash `pickle.loads`, or take as much time or memory as a sender likes."""
    with (
        shmesh.MessageQueue(1 << 21, name="queue") as queue,
        shmesh.MessageQueue.attach("queue", allow_pickle=False) as careful,
    ):
        put(queue, EXHAUSTING[name])
        with pytest.raises(shmesh.Denied, match="allow_pickle=True"):
            careful.dequeue()


def test_array_keeps_its_buffer_from_being_shortened() -> None:
    buffer = bytearray(8)
    shared = {"raw": buffer, "array": _SharedBuffer(buffer)}
    with (
        shmesh.MessageQueue(1 << 21, name="queue") as queue,
        shmesh.MessageQueue.attach("queue", allow_pickle=False) as careful,
    ):
        put(queue, pickle.dumps(shared, 5))
        found = careful.dequeue()
        assert found["array"].tolist() == [0] and found["array"].flags.writeable
        with pytest.raises(BufferError):
            found["raw"].clear()
        found["array"][0] = 1
        assert found["raw"][0] == 1


class _SharedBuffer:
    """Is read as an array in a buffer that is a value of its own, too."""

    def __init__(self, buffer: bytearray) -> None:
        self.buffer = buffer

    def __reduce__(self) -> Any:
        return np.ndarray, ((1,), "<i8", self.buffer)


def test_values_that_are_deep_or_shared_are_harmless() -> None:
    with (
        shmesh.MessageQueue(1 << 21, name="queue") as queue,
        shmesh.MessageQueue.attach("queue", allow_pickle=False) as careful,
    ):
        for program in (b")" + b"\x85" * 200_000 + b".", b"]" + b"]" * 200_000 + b"a" * 200_000 + b".", SHARED + b"."):
            put(queue, program)
            assert len(careful.dequeue()) > 0


def test_no_bytes_of_a_sender_do_harm() -> None:
    """Each byte of some objects replaced, cut off, and random programs of the opcodes: a value of plain types, or None."""
    draw = random.Random(9)
    opcodes = b"NKMJGXCB\x8a\x8c\x96()\x85\x86\x87t]ae}su\x94h\x93R\x97\x98.\x80\x95"
    names = b"\x8c\x05numpy\x8c\x07ndarray\x93"
    with link_of_two() as (here, there):

        def try_it(head: bytes) -> None:
            message = crossed(here, there, head[:ROOMY], b"d" * 100)
            for copy in (True, False):
                found = decode(message, copy)
                assert found is None or len(found) == 1

        made = encode({"a": [1, 2.5, ("x", None)], "b": np.arange(40, dtype=np.int16), "c": np.ones(2)}, ROOMY, 64)
        assert made is not None
        head = made[0]
        try_it(head)
        for at in range(len(head)):
            try_it(head[:at])
            for byte in (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)):
                try_it(head[:at] + bytes([byte]) + head[at + 1 :])
        start = head[:4] + (2).to_bytes(4, "little")
        for length, _ in itertools.product((1, 5, 30, 200), range(300)):
            program = b"".join(
                draw.choice([bytes([draw.choice(opcodes)]), bytes([draw.randrange(4)]), names, b"\x8c\x03<f8", b"K\x02\x85"])
                for _ in range(length)
            )
            lengths = draw.choice([8, 100, 1 << 63]).to_bytes(8, "little") + bytes(8)
            try_it(start + len(program).to_bytes(8, "little") + lengths + program)


@pytest.mark.parametrize("trusted", [False, True])
def test_forged_arrays_are_refused(trusted: bool) -> None:
    """An array that is larger than its buffer, or of pointers."""
    with shmesh.MessageQueue(1 << 16, name="queue") as queue, shmesh.MessageQueue.attach("queue", allow_pickle=trusted) as reader:
        made = encode(np.arange(4), ROOMY, 1 << 14)
        assert made is not None
        for old, new in ((b"K\x04", b"K\x05"), (b"<i8", b"|O8")):
            forged = made[0].replace(old, new)
            assert forged != made[0]
            queue._link.send(forged)
            if trusted and new == b"|O8":
                continue
            with pytest.raises((TypeError, ValueError, shmesh.Error)):
                reader.dequeue()
            queue.enqueue([1])
            assert reader.dequeue() == [1]
        assert pickle.loads(made[0][16:]).tolist() == [0, 1, 2, 3]
