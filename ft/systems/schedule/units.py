"""What a pipeline's schedule is made of."""

from typing import NamedTuple


class Unit(NamedTuple):
    """One stage's work on one microbatch in one model chunk, in one direction."""

    stage: int
    microbatch: int
    chunk: int
    backward: bool
