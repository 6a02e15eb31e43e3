"""A service in asyncio that reads batches of a worker process while it does other things.

    python batches_asyncio.py
"""

import asyncio
import multiprocessing

import numpy as np

import shmesh


def produce(queue: shmesh.BatchQueue) -> None:
    with queue.as_producer():
        for step in range(100):
            queue.put({"x": np.full(1000, step)})


async def total_of(queue: shmesh.BatchQueue) -> int:
    total = 0
    async for batch in queue:
        total += int(batch["x"][0])
    return total


async def serve(queue: shmesh.BatchQueue) -> None:
    ticks = 0
    task = asyncio.create_task(total_of(queue))
    while not task.done():
        ticks += 1
        await asyncio.sleep(0.01)
    print(f"total {await task}; {'the loop went on meanwhile' if ticks else 'nothing else was done'}")


def main() -> None:
    queue = shmesh.BatchQueue(nbytes=1 << 16, depth=4)
    producer = multiprocessing.Process(target=produce, args=(queue,))
    producer.start()
    asyncio.run(serve(queue))
    producer.join()
    queue.close()


if __name__ == "__main__":
    main()
