"""The samples of several shard types as one stream that the data loaders read."""

from collections.abc import Sequence

from ft.systems.hsdp.samples import Deal


class StackStream:
    """The samples that a group reads in consecutive steps with one stack: in each step the shards of its types, in
    order.

    The samples of type i in step s are those that FT-HSDP's stream i has at step s: a pure function of the run's order
    of samples (and so of its seed), s and i, which every group can read.

    Args:
        deal: the distribution of samples to streams.
        types: types in the order of computation.
        starts: position of each type's stream in the first of the steps.
        shard: number of samples of a type in a step.
    """

    def __init__(self, deal: Deal, types: Sequence[int], starts: Sequence[int], shard: int):
        self.replica = "/".join(map(str, types))  # the name of the stream in messages of the loaders
        self._streams, self._starts, self._shard = [deal.stream(each) for each in types], list(starts), shard

    @property
    def step_samples(self) -> int:
        """Return the number of samples of one step."""
        return len(self._streams) * self._shard

    def index(self, position: int) -> int:
        """Return the sample of the run's order at ``position``, counted from the first step."""
        step, rest = divmod(position, self.step_samples)
        place, offset = divmod(rest, self._shard)
        return self._streams[place].index(self._starts[place] + step * self._shard + offset)

    def within(self, samples: int) -> int:
        """Return how many positions, in whole steps, need only the run's first ``samples`` samples."""
        left = (stream.within(samples) - start for stream, start in zip(self._streams, self._starts, strict=True))
        return max(0, min(left) // self._shard) * self.step_samples

    def level(self, position: int) -> int:
        """Return the position of the first type's stream when ``position`` is reached."""
        return self._starts[0] + position // self.step_samples * self._shard
