"""One process fills batches in shared memory, another reads them where they are.

    python batches.py
"""

import multiprocessing

import numpy as np

import shmesh

COUNT = 100


def produce(queue: shmesh.BatchQueue) -> None:
    with queue.as_producer():
        for step in range(COUNT):
            with queue.batch({"image": ((8, 64, 64), np.float32), "label": (8, np.int64)}, meta={"step": step}) as batch:
                batch["image"][...] = step
                batch["label"][...] = step % 10


def main() -> None:
    queue = shmesh.BatchQueue(nbytes=1 << 20, depth=4)
    producer = multiprocessing.Process(target=produce, args=(queue,))
    producer.start()
    mean = sum(float(batch["image"].mean()) for batch in queue) / COUNT
    producer.join()
    queue.close()
    print(f"{COUNT} batches, mean {mean}")


if __name__ == "__main__":
    main()
