"""Loaders that fill batches, and a trainer that reads them where they are, with a progress bar.

    python train.py --loaders 2 --batches 100 --batch-mib 16
"""

import argparse
import multiprocessing
import sys
import time

import numpy as np

import shmesh

SIDE = 64


def load(queue: shmesh.BatchQueue, seed: int, batches: int, images: int) -> None:
    """One loader: images that it would read from somewhere, and their labels."""
    random = np.random.default_rng(seed)
    with queue.as_producer():
        for step in range(batches):
            spec = {"image": ((images, 3, SIDE, SIDE), np.float32), "label": (images, np.int64)}
            with queue.batch(spec, meta={"loader": seed, "step": step}) as batch:
                batch["image"][...] = random.random()
                batch["label"][...] = random.integers(0, 10, images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaders", type=int, default=2)
    parser.add_argument("--batches", type=int, default=100, help="of each loader")
    parser.add_argument("--batch-mib", type=int, default=16)
    args = parser.parse_args()

    images = max(1, (args.batch_mib << 20) // (3 * SIDE * SIDE * 4))
    queue = shmesh.BatchQueue(nbytes=(args.batch_mib << 20) + (1 << 16), depth=4, producers=args.loaders)
    loaders = [
        multiprocessing.Process(target=load, args=(queue, seed, args.batches, images)) for seed in range(args.loaders)
    ]
    for loader in loaders:
        loader.start()

    total, mean, start = args.loaders * args.batches, 0.0, time.monotonic()
    done = 0
    for batch in queue:
        mean += float(batch["image"].mean())
        done += 1
        progress(done, total, start)
    for loader in loaders:
        loader.join()
    queue.close()
    print(f"\n{done} batches of {args.batch_mib} MiB, mean {mean / done:.3f}")


def progress(done: int, total: int, start: float) -> None:
    """A progress bar, if standard error is a terminal."""
    if sys.stderr.isatty():
        filled = 40 * done // total
        rate = done / (time.monotonic() - start)
        print(f"\r[{'#' * filled:<40}] {done}/{total}  {rate:6.1f} batches/s", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
