"""`SharedMemoryManager` over blocks of `shmesh.shared_memory`."""

from collections.abc import Iterable
from multiprocessing import managers
from typing import Any

from . import shared_memory


class _Tracker(managers._SharedMemoryTracker):  # type: ignore[name-defined, misc]
    def destroy_segment(self, segment_name: str) -> None:
        self.segment_names.remove(segment_name)
        segment = shared_memory.SharedMemory(segment_name)
        segment.close()
        segment.unlink()


class _Server(managers.SharedMemoryServer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = self.shared_memory_context  # type: ignore[has-type]
        self.shared_memory_context = _Tracker(context.shared_memory_context_name, [])


class SharedMemoryManager(managers.SharedMemoryManager):
    """A manager that unlinks the blocks that it made, as `multiprocessing.managers.SharedMemoryManager`."""

    _Server = _Server

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # That of the standard library starts a resource tracker before.
        managers.BaseManager.__init__(self, *args, **kwargs)

    def SharedMemory(self, size: int) -> shared_memory.SharedMemory:  # type: ignore[override]
        """A new block, which the manager unlinks."""
        block = shared_memory.SharedMemory(create=True, size=size)
        self._track(block)
        return block

    def ShareableList(self, sequence: Iterable[Any]) -> shared_memory.ShareableList:  # type: ignore[override]
        """A new list, which the manager unlinks."""
        shareable = shared_memory.ShareableList(sequence)
        self._track(shareable.shm)
        return shareable

    def _track(self, block: Any) -> None:
        try:
            with self._Client(self._address, authkey=self._authkey) as connection:  # type: ignore[attr-defined]
                managers.dispatch(connection, None, "track_segment", (block.name,))  # type: ignore[attr-defined]
        except BaseException:
            block.unlink()
            raise
