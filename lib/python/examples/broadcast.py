"""One process sends messages, and each reader gets all of them, in order. The slowest reader sets the pace.

    python broadcast.py
"""

import multiprocessing
import tempfile
import time

import shmesh

PRICES = 500
READERS = 3


def follow(directory: str, rank: int) -> None:
    with shmesh.Link.attach("prices", directory=directory, timeout=60) as link:
        total = 0
        for _ in range(PRICES):
            message = link.receive(timeout=60)
            assert message is not None, "the market is closed"
            total += int.from_bytes(bytes(message), "little")
    print(f"reader {rank}: {total}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:  # /dev/shm unless told otherwise
        with shmesh.Link.create("prices", ring_mode="broadcast", slow="wait", directory=directory) as link:
            readers = [multiprocessing.Process(target=follow, args=(directory, rank)) for rank in range(READERS)]
            for process in readers:
                process.start()
            # A reader gets what is sent after it attached.
            if not link.wait_for_readers(READERS, timeout=60):
                raise TimeoutError("not all readers have attached")
            for price in range(PRICES):
                send(link, price.to_bytes(8, "little"))
            for process in readers:
                process.join()


def send(link: shmesh.Link, price: bytes) -> None:
    while True:
        try:
            return link.send(price)
        except shmesh.Exhausted:  # the slowest reader is a whole ring behind
            time.sleep(0.001)


if __name__ == "__main__":
    main()
