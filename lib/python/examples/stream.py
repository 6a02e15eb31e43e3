"""A stream of frames from one process to another: written where they are read, with back-pressure.

    python stream.py
"""

import multiprocessing
import tempfile
import time

import numpy as np

import shmesh

FRAMES = 200
BYTES = 65_536


def display(directory: str) -> None:
    total = 0.0
    with shmesh.Link.attach("camera", directory=directory, timeout=60) as link:
        for _ in range(FRAMES):
            frame = link.receive(timeout=60)
            assert frame is not None, "the camera is slow"
            with frame:  # after this block the camera has the buffer again
                total += float(frame.data.view(np.float32).mean())
    print(f"{FRAMES} frames, mean {total / FRAMES}")


def loan(link: shmesh.Link) -> shmesh.Loan:
    while True:
        try:
            return link.loan(data=BYTES)
        except shmesh.Exhausted:  # the display has all eight
            time.sleep(0.001)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:  # /dev/shm unless told otherwise
        pools = {"cpu_data": (BYTES, 8)}
        with shmesh.Link.create("camera", ring_mode="spsc", pools=pools, directory=directory) as link:
            reader = multiprocessing.Process(target=display, args=(directory,))
            reader.start()
            for number in range(FRAMES):
                frame = loan(link)
                frame.data.view(np.float32)[:] = number
                frame.send(msg_id=number)
            reader.join()


if __name__ == "__main__":
    main()
