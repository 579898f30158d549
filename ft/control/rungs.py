"""Which rung of recovery serves: the first, from the top, that gives a state to go on with.

Every rung loses more than the one above it: hot-swap at most a step, CheckFree the exactness of one stage, the
persistent checkpoint all steps since it was written.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

HOT_SWAP, CHECKFREE, CHECKPOINT, GIVE_UP = "hot-swap", "checkfree", "checkpoint", "give up"
RUNGS = (HOT_SWAP, CHECKFREE, CHECKPOINT, GIVE_UP)
"""From the top."""

OFF, MIDDLE, PLUS = "off", "on", "plus"
"""CheckFree not asked for; ``--ft-checkfree``: middle stages; ``--ft-checkfree-plus``: the first and the last too."""


@dataclass(frozen=True)
class Loss:
    """What is left after a failure.

    Args:
        blocks: by pipeline stage, its transformer blocks.
        lost: stages whose state nobody holds at any step, neither its own ranks nor peer copies.
        common_step: the newest step of which all ranks of all other stages have a complete source; None: there is none.
        checkpoint: a persistent checkpoint can be loaded.
        restarts_left: warm restarts from it that are still allowed.
    """

    blocks: tuple[int, ...]
    lost: Collection[int] = field(default_factory=frozenset)
    common_step: int | None = None
    checkpoint: bool = False
    restarts_left: int = 1

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.blocks) - 1


class Choice(NamedTuple):
    """The rung with its reason. ``passed``: the rungs above it, each with why it does not serve."""

    rung: str
    reason: str
    passed: tuple[tuple[str, str], ...]


def choose(loss: Loss, checkfree: str = OFF) -> Choice:
    """The rung that serves.

    Args:
        checkfree: OFF, MIDDLE or PLUS.
    """
    passed: list[tuple[str, str]] = []
    for rung, why_not, reason in (
        (HOT_SWAP, _no_hot_swap(loss), "somebody holds every rank's state of one and the same step"),
        (CHECKFREE, _no_checkfree(loss, checkfree), _rebuilt(loss)),
        (CHECKPOINT, _no_checkpoint(loss), "all workers begin anew from the newest persistent checkpoint"),
    ):
        if why_not is None:
            return Choice(rung, reason, tuple(passed))
        passed.append((rung, why_not))
    return Choice(GIVE_UP, "nothing is left to try", tuple(passed))


def _no_hot_swap(loss: Loss) -> str | None:
    """Why peer copies do not serve; None: they do."""
    if loss.lost:
        return f"nobody holds the state of {_stages(loss.lost)}"
    return "no step is held complete" if loss.common_step is None else None


def _no_checkfree(loss: Loss, checkfree: str) -> str | None:
    """Why the lost stages cannot be rebuilt from their neighbours; None: they can."""
    if checkfree == OFF:
        return "CheckFree is off"
    if not loss.lost:
        return "no stage is lost as a whole"
    if loss.common_step is None:
        return "the other stages hold no common step"
    problems = (_not_rebuilt(loss, stage, checkfree) for stage in sorted(loss.lost))
    return next((problem for problem in problems if problem is not None), None)


def _not_rebuilt(loss: Loss, stage: int, checkfree: str) -> str | None:
    """Why one stage cannot be; None: it can."""
    if stage in (0, loss.last) and checkfree != PLUS:
        which = "first" if stage == 0 else "last"
        return f"stage {stage} is the {which}, which only CheckFree+ can rebuild"
    sources = neighbours(loss, stage)
    if not sources:
        return f"stage {stage} has no neighbour"
    gone = [other for other in sources if other in loss.lost]
    if gone:
        return f"the adjacent stages {min(stage, *gone)} and {max(stage, *gone)} are both lost"
    counts = [loss.blocks[other] for other in (stage, *sources)]
    if len(set(counts)) > 1:
        return f"{_stages((stage, *sources))} have unequal numbers of blocks"
    return None


def neighbours(loss: Loss, stage: int) -> tuple[int, ...]:
    """The stages that a lost one is rebuilt from: both of a middle stage, the only one of the first and the last."""
    return tuple(other for other in (stage - 1, stage + 1) if 0 <= other <= loss.last)


def _rebuilt(loss: Loss) -> str:
    ways = []
    for stage in sorted(loss.lost):
        sources = neighbours(loss, stage)
        how = "copied from stage" if len(sources) == 1 else "averaged from stages"
        ways.append(f"stage {stage} is {how} {' and '.join(map(str, sources))}")
    return ", ".join(ways) + "; the others keep what they have"


def _no_checkpoint(loss: Loss) -> str | None:
    if not loss.checkpoint:
        return "there is no persistent checkpoint"
    return None if loss.restarts_left > 0 else "all warm restarts that are allowed are used up"


def _stages(stages: Collection[int]) -> str:
    """ "stage 3", "stages 2 and 3"."""
    named = [str(stage) for stage in sorted(stages)]
    return f"stage {named[0]}" if len(named) == 1 else f"stages {', '.join(named[:-1])} and {named[-1]}"
