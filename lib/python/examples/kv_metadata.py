"""A scheduler tells its ranks in each step which blocks of the key-value cache a request has.

    python kv_metadata.py
"""

import multiprocessing

import numpy as np

import shmesh

STEPS = 200
RANKS = 2


def run(name: str, rank: int) -> None:
    blocks = 0
    with shmesh.MessageQueue.attach(name, rank, timeout=60) as queue:
        for _ in range(STEPS):
            step = queue.dequeue(timeout=60)
            for table in step["block_tables"].values():
                blocks += len(table)
    print(f"rank {rank}: {blocks} blocks", flush=True)


def main() -> None:
    with shmesh.MessageQueue(nbytes=1 << 16, depth=16, readers=RANKS) as queue:
        ranks = [multiprocessing.Process(target=run, args=(queue.name, rank)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for step in range(STEPS):
            requests = range(step % 8 + 1)
            # Arrays travel beside the pickle, without a copy in between. A rank that died is named: `shmesh.PeerDied`.
            tables = {request: np.arange(request + 1, dtype=np.int32) for request in requests}
            queue.enqueue({"step": step, "block_tables": tables}, timeout=60)
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
