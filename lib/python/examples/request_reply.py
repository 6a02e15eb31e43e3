"""A process asks, another answers: with one reply, or with several.

    python request_reply.py
"""

import multiprocessing

import numpy as np

import shmesh


def serve(name: str) -> None:
    with shmesh.Link.attach(name, "primary", timeout=60, allow_second_primary=True) as link:
        for request in link.requests():
            what = bytes(request)
            if what == b"sum":
                request.reply(str(request.data.view(np.int64).sum()).encode())
            elif what == b"count":
                for number in range(1, 10):
                    request.reply(str(number).encode(), more=True)
                request.reply(b"10")
            else:
                request.reply()
                break


def main() -> None:
    with shmesh.Link.create("numbers", requests=8, pools={"cpu_data": (8_000_000, 4)}) as link:
        server = multiprocessing.Process(target=serve, args=(link.name,))
        server.start()
        with shmesh.Link.attach("numbers") as client:
            reply = client.request(b"sum", np.arange(1_000_000)).wait(60)
            assert reply is not None, "timed out"
            print(f"sum of 1000000 numbers: {bytes(reply).decode()}")
            for reply in client.request(b"count"):
                number = bytes(reply).decode()
            print(f"counted to {number}")
            client.request(b"stop").wait(60)
        server.join()


if __name__ == "__main__":
    main()
