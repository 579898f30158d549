"""Number the storages of tensors and observe when training frees them, for the DMR profiler.

The planner of DMR (dual modular redundancy, SpareTrain) needs these times, because a verification that is executed
later keeps the tensors of an operator in memory until then.
"""

from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ft.systems.dmr.profile.events import Memory


class Storages:
    """The storages of one iteration.

    Args:
        state: tensors that exist before the iteration and outlive it.
        in_use: returns the bytes in use on the device; None to add up the storages that were numbered.

    Attributes:
        memory: size of each storage and when it was freed, by number.
    """

    def __init__(self, state: Iterable[torch.Tensor], in_use: Callable[[], int] | None = None):
        self.memory: list[Memory] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lasting: dict[int, int] = {}
        self._state = {storage._cdata: storage.nbytes() for storage in map(_storage, state) if storage is not None}
        self._in_use, self._bytes = in_use, sum(self._state.values())

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage of ``tensor``; None if it has none."""
        storage = _storage(tensor)
        if storage is None:
            return None
        key = storage._cdata
        if key in self._live:
            return self._live[key][1]
        if key in self._lasting:
            return self._lasting[key]
        number = len(self.memory)
        self.memory.append(Memory(storage.nbytes()))
        if key in self._state:
            self._lasting[key] = number
        else:
            # The weak reference prevents the address, which is the key, from being reused for another storage.
            self._live[key] = StorageWeakRef(storage), number
            self._bytes += storage.nbytes()
        return number

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of ``tensor`` already has a number."""
        storage = _storage(tensor)
        return storage is not None and (storage._cdata in self._live or storage._cdata in self._lasting)

    def sweep(self, event: int) -> None:
        """Record which storages have been freed since the last call. ``event``: number of the event that begins now."""
        gone = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in gone:
            _, number = self._live.pop(key)
            self.memory[number].freed = event
            self._bytes -= self.memory[number].bytes

    def in_use(self) -> int:
        """Return the bytes in use now."""
        return self._bytes if self._in_use is None else self._in_use()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse tensors, for example, have none
        return None
