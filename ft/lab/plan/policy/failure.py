"""A failure as the control plane would see it: one rank on each stage, peer copies in a ring."""

from collections.abc import Collection, Sequence

from ft.job.control.recovery_plan import Memory, Stages
from ft.job.control.state import Place
from ft.job.messages import Holdings

STEP = 0


def failure(blocks: Sequence[int], lost: Collection[int], checkfree: str) -> tuple[Memory, Stages]:
    """What ``ft.job.control.recovery_plan.decide`` is told when nobody holds the state of the stages ``lost`` any more.

    Args:
        blocks: by stage, its transformer blocks. checkfree: as of ``Stages``.
    """
    stages = range(len(blocks))
    holdings = {stage: Holdings([STEP], {}) for stage in stages if stage not in lost}
    places = {stage: Place(stage, 0, 0, 0, blocks[stage]) for stage in stages}
    return Memory(stages, holdings, {stage: [stage] for stage in stages}), Stages(checkfree, places)
