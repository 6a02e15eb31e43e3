"""Puts `shmesh.shared_memory` in the place of `multiprocessing.shared_memory`, in a program that `shmesh.run` starts and its children.

Python imports a module of this name at start, from the folder that `shmesh.run` puts into ``PYTHONPATH``.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_NAME = "multiprocessing.shared_memory"


class _Replacement(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the module when the program imports it, so that other children do not pay for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == _NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        from multiprocessing import resource_tracker

        import shmesh.shared_memory

        tracker: Any = resource_tracker.ResourceTracker
        send = tracker._send

        def ignoring(self: Any, command: str, name: str, kind: str) -> None:
            # Programs take blocks from the tracker by hand, which has none of them.
            if kind != "shared_memory":
                send(self, command, name, kind)

        tracker._send = ignoring
        sys.modules[_NAME] = shmesh.shared_memory


sys.meta_path.insert(0, _Replacement())
if os.environ.get("SHMESH_RUN") == str(os.getpid()):
    # The program itself, whose children may create blocks before it does.
    importlib.import_module(_NAME)

# The module that this one hides.
_here = os.path.dirname(os.path.abspath(__file__))
_found = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != _here]
)
if _found is not None and _found.loader is not None:
    _module = importlib.util.module_from_spec(_found)
    sys.modules["sitecustomize"] = _module
    _found.loader.exec_module(_module)
