"""Build a failure as the control plane sees it: one rank on each stage, with peer copies in a ring."""

from collections.abc import Collection, Sequence

from ft.job.control.recovery_plan import Memory, Stages
from ft.job.control.state import Place
from ft.job.messages import Holdings

STEP = 0


def failure(blocks: Sequence[int], lost: Collection[int], checkfree: str) -> tuple[Memory, Stages]:
    """Return the arguments of ``ft.job.control.recovery_plan.decide`` if no rank holds the state of the ``lost``
    stages.

    Args:
        blocks: number of transformer blocks of each stage.
        lost: the stages without any copy of their state.
        checkfree: as in ``Stages``.
    """
    stages = range(len(blocks))
    holdings = {stage: Holdings([STEP], {}) for stage in stages if stage not in lost}
    places = {stage: Place(stage, 0, 0, 0, blocks[stage]) for stage in stages}
    return Memory(stages, holdings, {stage: [stage] for stage in stages}), Stages(checkfree, places)
