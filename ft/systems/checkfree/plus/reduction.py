"""Start gradient reductions during the backward passes of CheckFree+ (``--overlap-grad-reduce``).

In CheckFree+ (CheckFree, section 4.3), only some microbatches use a stage's embedding or head, so the last microbatch
that uses a parameter differs between parameters. The reduction of a bucket group, megatron-core's unit of gradient
reduction, starts in the last backward pass of this stage that uses any of its parameters. All data-parallel ranks of a
stage have the same schedule and the same bucket groups, so they start their reductions in the same order.
"""

from collections.abc import Sequence

import torch

from ft.systems.checkfree.plus.replicated_ends import end_parameters
from ft.systems.schedule.routes import Routes
from ft.systems.schedule.units import Unit
from megatron.patches import early_reduction, step_state


class EarlyReduction:
    """The gradient reductions of one stage in one iteration. Create it before the iteration's first backward pass.

    Args:
        chunk: the stage's model, in megatron-core's ``DistributedDataParallel``.
        routes: routes of the microbatches.
        order: the stage's units in their order.
    """

    def __init__(self, chunk: torch.nn.Module, routes: Routes, order: Sequence[Unit]):
        self._ends = {param for _, param in end_parameters(chunk)}
        self._due: dict[Unit, list] = {}
        backwards = [unit for unit in order if unit.backward]
        at_ends = [unit for unit in backwards if _is_at_end(routes, unit)]
        self._at_ends = set(at_ends)
        for group in step_state.bucket_groups(chunk):
            early_reduction.hold_back(group)
            users = at_ends if group.params <= self._ends else backwards
            if users:
                self._due.setdefault(users[-1], []).append(group)
            else:
                early_reduction.start_at_end(group)

    def before(self, unit: Unit) -> None:
        """Allow the reductions that start in ``unit``, a backward pass that is about to run."""
        unused = set() if unit in self._at_ends else self._ends
        for group in self._due.get(unit, ()):
            early_reduction.start_when_ready(group, group.params & unused)


def _is_at_end(routes: Routes, unit: Unit) -> bool:
    """Return whether the route of a unit's microbatch begins or ends on the unit's stage."""
    return routes.position(unit) in (0, len(routes.ways[unit.microbatch]) - 1)
