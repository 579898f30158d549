"""All-reduces: everybody in a group must have come to the same result."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ft.dmr.runtime.course import At
from ft.dmr.runtime.findings import REDUCTION, Findings, Rows


class Reductions:
    """Results of one rank's all-reduces in one iteration, by group.

    Args:
        falsify: changes a result, in experiments.
    """

    def __init__(self, findings: Findings, falsify: Callable[[torch.Tensor], None] | None = None):
        self._findings, self._falsify = findings, falsify
        self.restart()

    def restart(self) -> None:
        """An iteration begins."""
        self._rows: dict[str, tuple[dist.ProcessGroup, Rows, list[At]]] = {}
        self._unfinished: list[tuple[dist.ProcessGroup, torch.Tensor, At]] = []

    def done(self, group: dist.ProcessGroup, tensor: torch.Tensor, at: At) -> None:
        """``tensor`` is the result of an all-reduce in ``group``."""
        if dist.get_world_size(group) == 1:
            return
        if self._falsify is not None:
            self._falsify(tensor)
        _, rows, places = self._rows.setdefault(group.group_name, (group, self._findings.rows(), []))
        rows.add(tensor.detach())
        places.append(at)

    def begun(self, group: dist.ProcessGroup, tensor: torch.Tensor, at: At) -> None:
        """The same, of one whose end is not told: it is over at the next ``finish``."""
        self._unfinished.append((group, tensor, at))

    def finish(self) -> None:
        """All that was begun is over."""
        for group, tensor, at in self._unfinished:
            self.done(group, tensor, at)
        self._unfinished = []

    def compare(self) -> None:
        """Collective in every group with results: compares them. The names of groups give all ranks one order."""
        self.finish()
        for name in sorted(self._rows):
            group, rows, places = self._rows[name]
            found = rows.table()
            both = torch.stack((found, ~found))
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
            largest, smallest = both[0], ~both[1]
            self._findings.tables(_of(places), smallest, largest)


def _of(places: Sequence[At]) -> list[tuple[At, str]]:
    return [(at, REDUCTION) for at in places]
