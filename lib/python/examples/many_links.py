"""Many links in one event loop: a descriptor for each, one thread for all.

    python many_links.py
"""

import multiprocessing
import selectors
import tempfile

import shmesh

NAMES = ["fronthaul", "midhaul", "backhaul"]


def send(directory: str) -> None:
    for name in NAMES:
        with shmesh.Link.attach(name, directory=directory, timeout=60) as link:
            link.send(f"a message on {name}".encode())


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, selectors.DefaultSelector() as selector:  # /dev/shm is the default
        links = [shmesh.Link.create(name, directory=directory) for name in NAMES]
        for link in links:
            selector.register(link, selectors.EVENT_READ)
        peer = multiprocessing.Process(target=send, args=(directory,))
        peer.start()
        received = 0
        while received < len(NAMES):
            for key, _ in selector.select(timeout=60):
                link = key.fileobj
                while link.take_signal():  # before the messages: a later one makes the descriptor readable again
                    pass
                while (message := link.receive()) is not None:
                    print(bytes(message).decode())
                    received += 1
        peer.join()
        for link in links:
            selector.unregister(link)
            link.close()


if __name__ == "__main__":
    main()
