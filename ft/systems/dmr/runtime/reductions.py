"""Verify for DMR that all members of a process group have received the same result of an all-reduce or all-gather.

DMR (dual modular redundancy, SpareTrain) finds computation errors by executing operators twice; this module finds
errors of collectives by comparing *digests* (128-bit hashes) of their results among the members of the group.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import DISPUTED, REDUCTION, Findings, Mismatch, Rows


class Reductions:
    """Results of one rank in one iteration, by process group.

    Args:
        findings: receives the mismatches.
    """

    def __init__(self, findings: Findings):
        self._findings = findings
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self._rows: dict[str, tuple[dist.ProcessGroup, Rows, list[OperatorCall]]] = {}
        self._compared: list[tuple[dist.ProcessGroup, list[OperatorCall], torch.Tensor, torch.Tensor]] = []

    def done(self, group: dist.ProcessGroup, tensor: torch.Tensor, at: OperatorCall) -> None:
        """Record the result ``tensor`` of a collective in ``group``."""
        _, rows, places = self._rows.setdefault(group.group_name, (group, self._findings.rows(), []))
        rows.add(tensor.detach())
        places.append(at)

    def compare(self) -> None:
        """Compare the results within each group, for the flag of ``Findings``. All ranks of every group that has
        results have to call it; the groups are sorted by name so that all ranks have the same order.
        """
        for name in sorted(self._rows):
            group, rows, places = self._rows[name]
            found = rows.table()
            both = torch.stack((found, ~found))
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
            largest, smallest = both[0], ~both[1]
            self._findings.hint(smallest, largest)
            self._compared.append((group, places, found, (smallest != largest).any(dim=1)))

    def settle(self) -> None:
        """Note the mismatches that ``compare`` has found. A member whose result differs from that of the majority notes
        a REDUCTION mismatch; if there is no majority, all members note a DISPUTED mismatch. Collective in every group
        whose members have different results. Synchronises with the device."""
        for group, places, found, differs in self._compared:
            rows = differs.nonzero().flatten()
            if not len(rows):
                continue
            ours = found[rows].contiguous()
            all_ranks = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
            dist.all_gather(all_ranks, ours, group=group)
            judged = verdicts(dist.get_rank(group), [each.tolist() for each in all_ranks])
            for row, how in zip(rows.tolist(), judged, strict=True):
                if how is not None:
                    self._findings.note(Mismatch(places[row], how))
        self._compared = []


def verdicts(member: int, results: Sequence[Sequence[Sequence[int]]]) -> list[str | None]:
    """Return, for each collective, whether the result of ``member`` is right: None if the majority of the group has the
    same result, REDUCTION if the majority has another result, DISPUTED if there is no majority.

    Args:
        member: rank of the member in the group.
        results: ``results[m][i]`` is the digest of the result of collective i on member m.
    """
    found: list[str | None] = []
    for digests in zip(*results, strict=True):
        counts = Counter(map(tuple, digests))
        most, count = counts.most_common(1)[0]
        if 2 * count <= len(digests):
            found.append(DISPUTED)
        else:
            found.append(None if tuple(digests[member]) == most else REDUCTION)
    return found
