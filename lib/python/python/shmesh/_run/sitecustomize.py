"""Puts `shmesh.shared_memory` in the place of `multiprocessing.shared_memory`, in a program that `shmesh.run` starts and its children.

Python imports a module of this name at start, from the folder that `shmesh.run` puts into ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_NAME = "multiprocessing.shared_memory"
_IS_PROGRAM = os.environ.get("SHMESH_RUN") == str(os.getpid())


def _imported() -> Any:
    """`shmesh.shared_memory`; None in an interpreter that cannot import it, as one of another version without numpy."""
    package = os.environ.get("SHMESH_RUN_PACKAGE")
    # At the end and only here: shmesh and what it needs come from there if this interpreter has none.
    is_added = bool(package) and package not in sys.path
    if is_added:
        sys.path.append(str(package))
    try:
        import shmesh.shared_memory

        return shmesh.shared_memory
    except Exception:
        if _IS_PROGRAM:
            raise
        return None
    finally:
        if is_added and package in sys.path:
            sys.path.remove(package)


class _Replacement(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the module when the program imports it, so that other children do not pay for it."""

    is_tried = False
    module: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        if not self.is_tried:
            self.is_tried = True
            self.module = _imported()
        # Without it, the standard library's module is found.
        return importlib.machinery.ModuleSpec(name, self) if self.module else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        from multiprocessing import resource_tracker

        tracker: Any = resource_tracker.ResourceTracker
        send = tracker._send

        def ignoring(self: Any, command: str, name: str, kind: str) -> None:
            # Programs take blocks from the tracker by hand, which has none of them.
            if kind != "shared_memory":
                send(self, command, name, kind)

        tracker._send = ignoring
        sys.modules[_NAME] = self.module


sys.meta_path.insert(0, _Replacement())

# The module that this one hides.
_here = os.path.dirname(os.path.abspath(__file__))
_found = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != _here]
)
if _found is not None and _found.loader is not None:
    _module = importlib.util.module_from_spec(_found)
    sys.modules["sitecustomize"] = _module
    _found.loader.exec_module(_module)

if _IS_PROGRAM:
    # The program itself, whose children may create blocks before it does.
    importlib.import_module(_NAME)
