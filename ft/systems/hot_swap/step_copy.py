"""Lets a layer inside hot-swap undo a step from the snapshot that hot-swap has taken of the state before it."""

from collections.abc import Mapping

import torch

from ft.state.snapshot import Snapshots
from ft.systems.hot_swap.recovery import Recovery


class StepCopy:
    """The last snapshot of this worker, as a :class:`ft.protection.undo.SharedCopy`."""

    def __init__(self, snapshots: Snapshots, recovery: Recovery):
        self._snapshots, self._recovery = snapshots, recovery

    def is_current(self) -> bool:
        return self._recovery.is_untouched

    def wait(self) -> None:
        self._snapshots.wait_for_own()

    def write_back(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._snapshots.write_back(sections)
        self._recovery.undoes_step()
