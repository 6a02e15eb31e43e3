"""The latest value: a writer that never waits, and readers that only need the current value.

    python latest_value.py
"""

import tempfile

import shmesh


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:  # /dev/shm unless told otherwise
        latest = {"ring_mode": "broadcast", "ring_len": 2, "slow": "skip", "history": 1}
        with shmesh.Link.create("position", **latest, directory=directory) as sensor:
            with shmesh.Link.attach("position", directory=directory) as display:  # usually in another process
                for position in range(1000):
                    sensor.send(position.to_bytes(4, "little"))
                message = display.receive()
                assert message is not None
                print(f"position {int.from_bytes(bytes(message), 'little')}; {display.lost} were skipped")
            # A reader that attaches later has the value at once.
            with shmesh.Link.attach("position", directory=directory) as late:
                message = late.receive()
                assert message is not None
                print(f"position {int.from_bytes(bytes(message), 'little')}")


if __name__ == "__main__":
    main()
