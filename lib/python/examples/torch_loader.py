"""A drop-in for the workers of `torch.utils.data.DataLoader`: the same datasets, batches in shared memory.

torch's own workers make a new segment for each tensor of each batch and send its descriptor through a queue. These fill one
pool again and again.

    for image, label in ShmeshLoader(dataset, batch_size=64, num_workers=4, nbytes=64 << 20):
        ...

The tensors of a batch are read-only memory that the loaders use again when they are gone: train on them, or copy them to a
device, and do not write to them.
"""

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

import shmesh


def work(queue: shmesh.BatchQueue, dataset: Dataset[Any], batches: Sequence[Sequence[int]]) -> None:
    # One whose dataset fails at the first item is noticed, too.
    with queue.as_producer():
        for indices in batches:
            columns = default_collate([dataset[index] for index in indices])
            queue.put({str(place): column.numpy() for place, column in enumerate(columns)})


class ShmeshLoader:
    """Batches of tensors, in the order in which the workers have them ready."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, num_workers: int, nbytes: int, shuffle: bool = True):
        self.dataset, self.batch_size, self.workers = dataset, batch_size, num_workers
        self.nbytes, self.shuffle = nbytes, shuffle

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        length = len(self.dataset)  # type: ignore[arg-type]
        order = np.random.permutation(length) if self.shuffle else np.arange(length)
        batches = [order[first : first + self.batch_size].tolist() for first in range(0, length, self.batch_size)]
        queue = shmesh.BatchQueue(self.nbytes, depth=2 + self.workers, producers=self.workers)
        processes = [
            multiprocessing.Process(target=work, args=(queue, self.dataset, batches[first :: self.workers]), daemon=True)
            for first in range(self.workers)
        ]
        for process in processes:
            process.start()
        try:
            with queue, warnings.catch_warnings():
                # The tensors are read-only, and torch cannot say so.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                for batch in queue:
                    yield [torch.from_numpy(array) for array in batch.values()]
        finally:
            # Who leaves the loop early wants no more of them.
            for process in processes:
                process.terminate()
                process.join()


def main() -> None:
    dataset = TensorDataset(torch.arange(1000, dtype=torch.float32).reshape(1000, 1), torch.arange(1000))
    total = 0
    for value, label in ShmeshLoader(dataset, batch_size=64, num_workers=2, nbytes=1 << 16):
        assert torch.equal(value[:, 0].long(), label)
        total += int(label.sum())
    assert total == 499_500
    print("all 1000 rows came once")


if __name__ == "__main__":
    main()
