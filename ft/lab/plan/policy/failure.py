"""Build the input of the control plane's recovery decision for a hypothetical failure, for ``ft plan policy``.

The hypothetical run has one rank on each pipeline stage. Each rank holds a snapshot (a copy in host memory) of its own
stage's state, except for the stages whose state is lost.
"""

from collections.abc import Collection, Sequence

from ft.job.control.recovery import Memory, Seats, Situation, Stages
from ft.job.control.state import GridPosition
from ft.job.messages import Holdings

STEP = 0


def failure(blocks: Sequence[int], lost: Collection[int], checkfree: str) -> Situation:
    """Return the situation in which the workers of some stages are lost with all copies of their state.

    Args:
        blocks: number of transformer blocks of each stage.
        lost: the stages of whose state no rank holds a copy.
        checkfree: mode of CheckFree, which rebuilds a lost stage from its neighbours: MIDDLE (middle stages only), PLUS
            (CheckFree+, also the first and the last stage), or "" for a run without CheckFree.
    """
    stages = range(len(blocks))
    holdings = {stage: Holdings([STEP], {}) for stage in stages if stage not in lost}
    places = {stage: GridPosition(stage, 0, 0, 0, blocks[stage]) for stage in stages}
    memory = Memory(stages, holdings, {stage: [stage] for stage in stages})
    return Situation(STEP, memory, Stages(checkfree, places), Seats(sorted(lost), standbys=len(lost)))
