"""The roles of stages at the ends of the pipeline: which stages have the embedding, the head, or a copy of one."""

from dataclasses import dataclass

from ft.systems.schedule.routes import LEAST_STAGES


@dataclass(frozen=True)
class Roles:
    """The roles of one stage in a pipeline of ``stages`` stages, at least ``LEAST_STAGES``.

    Attributes:
        stage: the stage.
        stages: number of stages.
        embeds: the stage has the embedding.
        heads: the stage has final norm and output layer.
        is_double: what the stage has is the copy; the first and the last stage have the originals.
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
    def is_double(self) -> bool:
        return self.stage in (1, self.stages - 2)


def pairs(stages: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (original, copy) of the embedding and of the head, by stage.

    Raises:
        ValueError: there are too few stages.
    """
    if stages < LEAST_STAGES:
        raise ValueError(f"{stages} stages have no first two and last two that are apart")
    return (0, 1), (stages - 1, stages - 2)
