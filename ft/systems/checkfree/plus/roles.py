"""The roles of pipeline stages in CheckFree+: which stages have the embedding, the head, or a copy of one of them.

The head is final norm and output layer. In CheckFree+ (CheckFree, section 4.3), the second stage has a copy of the
embedding and the last but one a copy of the head.
"""

from dataclasses import dataclass

from ft.systems.schedule.routes import LEAST_STAGES


@dataclass(frozen=True)
class Roles:
    """The roles of one stage.

    Attributes:
        stage: number of the stage.
        stages: number of stages of the pipeline, at least ``LEAST_STAGES``.
        embeds: whether the stage has the embedding or its copy.
        heads: whether the stage has the head or its copy.
        holds_copy: whether the stage's embedding or head is the copy; the first and the last stage have the originals.
    """

    stage: int
    stages: int

    @property
    def embeds(self) -> bool:
        return self.stage < 2

    @property
    def heads(self) -> bool:
        return self.stage >= self.stages - 2

    @property
    def holds_copy(self) -> bool:
        return self.stage in (1, self.stages - 2)


def pairs(stages: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the stages (original, copy) of the embedding, and those of the head.

    Raises:
        ValueError: there are too few stages.
    """
    if stages < LEAST_STAGES:
        raise ValueError(f"with {stages} stages, the first two and the last two stages overlap")
    return (0, 1), (stages - 1, stages - 2)
