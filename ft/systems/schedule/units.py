"""The unit of work in a pipeline schedule."""

from typing import NamedTuple


class Unit(NamedTuple):
    """One stage's forward or backward of one microbatch through one model chunk."""

    stage: int
    microbatch: int
    chunk: int
    backward: bool
