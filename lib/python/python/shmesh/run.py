"""Runs a Python program with `shmesh.shared_memory` in the place of `multiprocessing.shared_memory`.

    python -m shmesh.run app.py [arguments]
    python -m shmesh.run -m module [arguments]

The program is not changed. The Python programs that it starts, including processes of `multiprocessing`, are run in the same way.
"""

import os
import sys
from typing import NoReturn


def _options() -> list[str]:
    """The interpreter's options before ``-m shmesh.run``."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if before[-1:] == ["shmesh.run"]:
        before.pop()
    last = before.pop() if before else ""
    # ``-m``, ``-um``, or ``-mshmesh.run``
    rest = last.removesuffix("shmesh.run").removesuffix("m")
    return before if rest == "-" else [*before, rest]


def main() -> NoReturn:
    """Replaces this process by the program."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shmesh.run app.py [arguments]\n       python -m shmesh.run -m module [arguments]")
    if sys.flags.ignore_environment:
        sys.exit("shmesh.run: children learn of it by PYTHONPATH, which -E and -I ignore; start Python without them")
    here = os.path.dirname(os.path.abspath(__file__))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([os.path.join(here, "_run"), *filter(None, [environment.get("PYTHONPATH")])])
    # Not in PYTHONPATH, where the packages beside it would hide the standard library, also from other interpreters.
    environment["SHMESH_RUN_PACKAGE"] = os.path.dirname(here)
    environment["SHMESH_RUN"] = str(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *_options(), *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
