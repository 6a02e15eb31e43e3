"""A trainer hands its weights to inference ranks, again and again, without a file and without a copy for each rank.

    python weights.py
"""

import multiprocessing

import numpy as np

import shmesh

LAYERS = {"embedding": (256, 64), "attention": (64, 64), "head": (64, 256)}


def infer(name: str, rank: int) -> None:
    with shmesh.MessageQueue.attach(name, rank, timeout=60) as queue:
        for _ in range(5):
            # Read where they are; the trainer does not use this memory again before they are gone.
            weights = queue.dequeue(timeout=60, copy=False)
            result = np.ones(256) @ weights["embedding"] @ weights["attention"] @ weights["head"]
            version = weights["version"]
            del weights
        print(f"rank {rank}: version {version}, {result.sum():.0f}")


def main() -> None:
    with shmesh.MessageQueue(nbytes=1 << 20, depth=2, readers=2) as queue:
        ranks = [multiprocessing.Process(target=infer, args=(queue.name, rank)) for rank in range(2)]
        for process in ranks:
            process.start()
        for version in range(5):
            weights = {name: np.full(shape, version / 64) for name, shape in LAYERS.items()}
            queue.enqueue({"version": version, **weights}, timeout=60)
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
