"""Runs CPython's own tests of shared memory, by one start method of `multiprocessing`. Not imported, but run by `shmesh.run`."""

import signal
import sys
import unittest
from typing import Any

import test._test_multiprocessing as tests

if __name__ == "__main__":
    method, *others = sys.argv[1:]
    # A shell starts programs in the background without it, and one test needs it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    everything: dict[str, Any] = {"__name__": __name__}
    tests.install_tests_in_module_dict(everything, method)
    # Importable by children, too.
    globals().update({name: value for name, value in everything.items() if name.endswith("TestSharedMemory")})
    for name in ("tracking", "untracking"):
        # They test the resource tracker, in a Python that ignores `PYTHONPATH` and so has the standard library's.
        setattr(everything["WithProcessesTestSharedMemory"], f"test_shared_memory_{name}", None)
    globals().update({name: everything[name] for name in ("setUpModule", "tearDownModule")})
    unittest.main(argv=[sys.argv[0], *others])
