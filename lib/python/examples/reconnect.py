"""A process that is killed and starts again: its peer keeps its handle, and messages that were sent stay sent.

    python reconnect.py
"""

import multiprocessing
import os
import signal
import tempfile

import shmesh


def serve(directory: str) -> None:
    # The same call at each start. `was_created` says whether the link is new.
    with shmesh.Link.create("jobs", directory=directory) as link:
        for job in link:
            if bytes(job) == b"a job that kills":
                job.release()
                os.kill(os.getpid(), signal.SIGKILL)
            print(f"new link: {link.was_created}; {bytes(job).decode()}", flush=True)
            if bytes(job) == b"the last job":
                break


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:  # /dev/shm unless told otherwise
        server = multiprocessing.Process(target=serve, args=(directory,))
        server.start()
        with shmesh.Link.attach("jobs", directory=directory, timeout=60) as link:
            link.send(b"a job")
            link.send(b"a job that kills")
            link.send(b"the last job")
            for event in link.events():
                if event.kind == "died":
                    print("the server died", flush=True)
                    break
            server.join()
            server = multiprocessing.Process(target=serve, args=(directory,))
            server.start()
            server.join()


if __name__ == "__main__":
    main()
