"""A replica's share of the training data, as the trainer's loaders read it (see :mod:`ft.systems.hsdp.samples`).

Each replica reads its own stream of samples: position p of its loaders is the p-th sample of the stream, and its
data-parallel ranks divide each microbatch as usual. With blocks of micro batch x data-parallel size, data-parallel rank
d of replica r reads in each microbatch what data-parallel rank r * size + d of a single world of all replicas would
read, as long as no replica has been absent.

Validation and test data are not divided: every replica reads the same samples, so that no replica waits for another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft.systems.hsdp.samples import SampleAssignment, Stream


@dataclass(frozen=True)
class Share:
    """One replica's part of the training data (``ft.protection.contract.DataShare``).

    Attributes:
        replica: number of the replica.
        assignment: the assignment of samples to replicas.
        positions: replica -> number of samples that it has taken from its stream.
    """

    replica: int
    assignment: SampleAssignment
    positions: Mapping[int, int]

    @property
    def position(self) -> int:
        """Return the number of samples that this replica has taken."""
        return self.positions.get(self.replica, 0)

    @property
    def stream(self) -> Stream:
        """Return the stream of this replica's samples."""
        return self.assignment.stream(self.replica)

    def needed(self, steps: int, batch: int) -> int:
        """Return how many samples the dataset needs for ``steps`` steps of ``batch`` samples over all replicas."""
        return self.assignment.needed(steps, batch // self.assignment.replicas)


class Follower:
    """Makes the loaders of one rank read its replica's samples.

    Args:
        loaders: one for each model chunk, None for chunks that read no tokens; their datasets can ``follow`` a stream.
        replica: number of the replica whose stream they read.
    """

    def __init__(self, loaders: Sequence[Any], replica: int):
        self._loaders, self._replica = [loader for loader in loaders if loader is not None], replica

    def __call__(self, assignment: SampleAssignment, position: int) -> None:
        """Make the loaders read the replica's stream of ``assignment`` from ``position`` on."""
        stream = assignment.stream(self._replica)
        for loader in self._loaders:
            loader.dataset.follow(stream)
            loader.seek(position)

    @property
    def position(self) -> int | None:
        """Return the stream position of the next microbatch, from a loader; None if this rank has no loader."""
        return self._loaders[0].consumed_samples if self._loaders else None
