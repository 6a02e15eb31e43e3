"""`torch.utils.data.DataLoader` with batches of its workers in shared memory: the same datasets, arguments and order.

    python torch_loader.py
"""

import torch
from torch.utils.data import TensorDataset

from shmesh.torch import DataLoader


def main() -> None:
    dataset = TensorDataset(torch.arange(1000, dtype=torch.float32).reshape(1000, 1), torch.arange(1000))
    total = 0
    # A buffer holds the largest batch; there are as many as batches are on the way.
    for value, label in DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2, nbytes=1 << 16):
        assert torch.equal(value[:, 0].long(), label)
        total += int(label.sum())
    assert total == 499_500
    print("all 1000 rows came once")


if __name__ == "__main__":
    main()
