"""The loader for torch. Without torch, these tests are skipped."""

import dataclasses
import os
import signal
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info  # noqa: E402

from shmesh.torch import DataLoader  # noqa: E402

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Note:
    text: str
    weights: np.ndarray


class Everything(Dataset):  # type: ignore[type-arg]
    """Items with all that a collate function takes."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.full((3, 20, 20), index, dtype=torch.float32),
            "half": torch.full((500,), index, dtype=torch.bfloat16),
            "flag": torch.tensor(index % 2 == 0),
            "name": f"item {index}",
            "nested": {"array": np.full(600, index, np.int16), "pair": (index, float(index))},
            "point": Point(index, torch.arange(index, index + 3)),
        }


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 20, info.num_workers))


class Wrong(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ZeroDivisionError(f"item {index} is broken")


class Killed(Wrong):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


class Squares(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((4096,), index * index, dtype=torch.int64)


def keep_notes(items: list[Any]) -> list[Note]:
    return [Note(item["name"], item["nested"]["array"]) for item in items]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_same_batches_as_torch_gives(method: str) -> None:
    arguments: Any = {"batch_size": 5, "num_workers": 2, "multiprocessing_context": method}
    expected = torch.utils.data.DataLoader(Everything(), batch_size=5)
    found = DataLoader(Everything(), nbytes=1 << 20, **arguments)
    assert len(found) == len(expected) == 8
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and ours["name"] == theirs["name"]
        for key in ("image", "half", "flag"):
            assert ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key])
        assert torch.equal(ours["nested"]["array"], theirs["nested"]["array"])
        assert all(torch.equal(one, other) for one, other in zip(ours["nested"]["pair"], theirs["nested"]["pair"], strict=True))
        assert type(ours["point"]) is Point and torch.equal(ours["point"].y, theirs["point"].y)


def test_any_result_of_a_collate_function() -> None:
    notes = [note for batch in DataLoader(Everything(), 5, num_workers=2, collate_fn=keep_notes) for note in batch]
    assert [note.text for note in notes] == [f"item {index}" for index in range(37)]
    assert all((note.weights == index).all() for index, note in enumerate(notes))


def test_batches_that_are_kept_and_batches_that_are_too_large() -> None:
    for nbytes in (1 << 20, 1000):
        batches = list(DataLoader(Squares(), 4, num_workers=2, nbytes=nbytes))
        assert [int(batch[row, 0]) for batch in batches for row in range(4)] == [index * index for index in range(64)]
        # Only the receiver has them.
        for batch in batches:
            batch += 1
        assert int(batches[0][0, 0]) == 1 and int(batches[-1][3, 4095]) == 63 * 63 + 1


def test_iterable_dataset_and_workers_that_stay() -> None:
    loader = DataLoader(Numbers(), batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert sorted(loader) == list(range(20))


def test_traceback_of_a_worker() -> None:
    with pytest.raises(ZeroDivisionError, match="item 0 is broken") as error:
        list(DataLoader(Wrong(), num_workers=1))
    assert "Original Traceback" in str(error.value) and "__getitem__" in str(error.value)


def test_killed_worker() -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        list(DataLoader(Killed(), num_workers=1))


def test_loop_that_is_left_early() -> None:
    dataset = TensorDataset(torch.arange(10_000))
    for (first,) in DataLoader(dataset, batch_size=10, num_workers=2):
        assert first.tolist() == list(range(10))
        break
