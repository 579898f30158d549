"""The unit of work in a pipeline schedule: one forward or backward."""

from typing import NamedTuple


class Unit(NamedTuple):
    """One stage's forward or backward of one microbatch through one model chunk.

    Attributes:
        stage: number of the pipeline stage.
        microbatch: number of the microbatch.
        chunk: number of the model chunk on the stage; 0 without interleaving.
        backward: whether it is the backward.
    """

    stage: int
    microbatch: int
    chunk: int
    backward: bool
