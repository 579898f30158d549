"""The samples of several shard types of SPARe as one stream for the data loaders.

SPARe divides a global batch into shard types, and each group (replica of the model) computes several of them, its
stack. The samples of each type are a stream; a position in a stream is the number of samples before it.
"""

from collections.abc import Sequence

from ft.systems.hsdp.samples import SampleAssignment


class StackStream:
    """The samples that a group reads in consecutive steps in which it computes the same types.

    A step consists of one shard (``shard`` samples) of each type, in the order of ``types``. The samples of type i are
    stream i of ``assignment``. The assignment is the same in all groups, so every group can read every type.

    Args:
        assignment: the assignment of the run's samples to streams (:mod:`ft.systems.hsdp.samples`).
        types: types in the order of computation.
        starts: position in the stream of each type at the first of the steps.
        shard: number of samples of one type in a step.
    """

    def __init__(self, assignment: SampleAssignment, types: Sequence[int], starts: Sequence[int], shard: int):
        self._streams, self._starts, self._shard = [assignment.stream(each) for each in types], list(starts), shard

    @property
    def step_samples(self) -> int:
        """Return the number of samples of one step."""
        return len(self._streams) * self._shard

    def index(self, position: int) -> int:
        """Return the index of the sample at ``position`` of this stream, in the run's order of samples."""
        step, rest = divmod(position, self.step_samples)
        place, offset = divmod(rest, self._shard)
        return self._streams[place].index(self._starts[place] + step * self._shard + offset)

    def within(self, samples: int) -> int:
        """Return how many positions of this stream, in whole steps, need only the run's first ``samples`` samples."""
        left = (stream.within(samples) - start for stream, start in zip(self._streams, self._starts, strict=True))
        return max(0, min(left) // self._shard) * self.step_samples

    def position_of_first_type(self, position: int) -> int:
        """Return the position in the stream of the first shard type after ``position`` samples of this stream.

        Samples of a step that is not complete are not counted.
        """
        return self._starts[0] + position // self.step_samples * self._shard
