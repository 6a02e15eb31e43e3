"""One process sends objects of any kind to several readers, each of which gets all of them.

    python message_queue.py
"""

import multiprocessing

import numpy as np

import shmesh


def serve(name: str, rank: int) -> None:
    with shmesh.MessageQueue.attach(name, rank, timeout=60) as queue:
        total = 0
        while True:
            try:
                request = queue.dequeue(timeout=60)
            except EOFError:
                break
            total += len(request["prompt"]) + int(request["tokens"].sum())
        print(f"rank {rank}: {total}")


def main() -> None:
    with shmesh.MessageQueue(readers=3) as queue:
        ranks = [multiprocessing.Process(target=serve, args=(queue.name, rank)) for rank in range(3)]
        for process in ranks:
            process.start()
        for step in range(100):
            # Waits for all three at first; `shmesh.PeerDied` says which rank died.
            queue.enqueue({"prompt": "x" * step, "tokens": np.arange(step)}, timeout=60)
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
