"""The samples of several shard types as one stream, as the loaders read it."""

from collections.abc import Sequence

from ft.systems.hsdp.samples import Deal


class StackStream:
    """What a group reads in a row of steps with one stack: in each step the shards of its types, one after another.

    Type i of step s is the samples that FT-HSDP's stream i has at step s: a pure function of the run's order of samples
    (and so of its seed), s and i, which every group can read.

    Args:
        types: in the order of computation. starts: position of each type's stream in the first of the steps.
        shard: samples of a type in a step.
    """

    def __init__(self, deal: Deal, types: Sequence[int], starts: Sequence[int], shard: int):
        self.replica = "/".join(map(str, types))  # what messages of the loaders call it
        self._streams, self._starts, self._shard = [deal.stream(each) for each in types], list(starts), shard

    @property
    def step_samples(self) -> int:
        """Samples of one step."""
        return len(self._streams) * self._shard

    def index(self, position: int) -> int:
        """The sample of the run's order at ``position``, counted from the first step on."""
        step, rest = divmod(position, self.step_samples)
        place, offset = divmod(rest, self._shard)
        return self._streams[place].index(self._starts[place] + step * self._shard + offset)

    def within(self, samples: int) -> int:
        """How many positions lie in whole steps that the first ``samples`` of the run's order suffice for."""
        left = (stream.within(samples) - start for stream, start in zip(self._streams, self._starts, strict=True))
        return max(0, min(left) // self._shard) * self.step_samples

    def level(self, position: int) -> int:
        """Where the first type's stream stands when ``position`` is reached."""
        return self._starts[0] + position // self.step_samples * self._shard
