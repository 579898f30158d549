"""Assignment of training samples to FT-HSDP replicas, and the training position of a replica: every sample is trained
exactly once, although replicas can be absent for some steps (FT-HSDP, section 5, "Train each batch exactly once").

The *order* of a run is the sequence of samples that ordinary data parallelism reads. It is cut into blocks, which are
assigned to the replicas in turn: block k of replica r of R is block k * R + r of the order. The blocks of a replica
form its *stream*, and the number of samples that it has taken from its stream is its *position*. The assignment and the
positions of all replicas determine which samples were taken. A replica that was absent continues at its own position.

A step takes the same number of blocks from every replica that takes part. As long as no replica is absent, the samples
of a step therefore form one contiguous global batch. With ``block`` = micro batch x data-parallel size of a replica,
every rank moreover gets in each of its microbatches the samples that ordinary data parallelism would give it (see
``ft.protection.contract``).

When the number of replicas or the block size changes, a new assignment begins. Its order contains the remaining
samples: first, in order, those below the furthest sample taken (the *leftovers*), then all samples after it.

All functions are pure and vectorised: a range of a million steps takes a few numpy calls.

The position is part of the state that replicas transfer and save.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy

from ft.job.quorum.values import estimated
from ft.protection.position import Position

_END = numpy.iinfo(numpy.int64).max
Count, Size = Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=1)]


class Order:
    """The order in which one assignment assigns the samples: the leftovers, then all from ``begin`` on.

    A *place* is an index into this order. A higher place always holds a higher sample.

    Args:
        leftovers: samples that an earlier assignment left out, as (n, 2) ranges [first, end), ascending and disjoint,
            all below ``begin``.
        begin: the first sample after the leftovers.
    """

    def __init__(self, leftovers: numpy.ndarray | None = None, begin: int = 0):
        self.leftovers = numpy.empty((0, 2), numpy.int64) if leftovers is None else leftovers
        self.begin = begin
        lengths = self.leftovers[:, 1] - self.leftovers[:, 0]
        # The last piece has no end.
        self._first_places = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)
        self._shifts = numpy.append(self.leftovers[:, 0], begin) - self._first_places

    @property
    def left_over(self) -> int:
        """Return the number of samples in the leftovers."""
        return int(self._first_places[-1])

    def samples(self, places: numpy.ndarray) -> numpy.ndarray:
        """Return the samples at ``places``, an int64 array of any shape."""
        return places + self._shifts[self._pieces(places)]

    def ranges(self, places: numpy.ndarray) -> numpy.ndarray:
        """Convert (n, 2) ranges of places to (m, 2) ranges of samples, cut where the order jumps."""
        first, last = self._pieces(places[:, 0]), self._pieces(places[:, 1] - 1)
        counts = last - first + 1
        owner = numpy.repeat(numpy.arange(len(places)), counts)
        piece = first[owner] + numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        ends = numpy.append(self._first_places[1:], _END)
        begin = numpy.maximum(places[owner, 0], self._first_places[piece])
        end = numpy.minimum(places[owner, 1], ends[piece])
        return numpy.stack([begin, end], axis=1) + self._shifts[piece, None]

    def places_below(self, sample: int) -> int:
        """Return how many places hold samples below ``sample``."""
        if sample >= self.begin:
            return self.left_over + sample - self.begin
        return int(numpy.clip(sample - self.leftovers[:, 0], 0, self.leftovers[:, 1] - self.leftovers[:, 0]).sum())

    def without(self, replicas: int, block: int, positions: Sequence[int]) -> "Order":
        """Return the order of the samples that are not taken yet."""
        places = [_left_places(r, replicas, block, count, max(positions)) for r, count in enumerate(positions)]
        far = max((_place(r, replicas, block, count - 1) + 1 for r, count in enumerate(positions) if count), default=0)
        left = numpy.concatenate(places)
        left[:, 1] = numpy.minimum(left[:, 1], far)
        left = left[left[:, 0] < left[:, 1]]
        if far < self.left_over:
            left = numpy.concatenate([left, [[far, self.left_over]]])
        return Order(merged(self.ranges(merged(left))), self.begin + max(0, far - self.left_over))

    def _pieces(self, places: numpy.ndarray) -> numpy.ndarray:
        return numpy.searchsorted(self._first_places, places, side="right") - 1


@dataclass(frozen=True)
class SampleStream:
    """The samples of one replica."""

    replica: int
    replicas: int
    block: int
    order: Order = field(default_factory=Order)

    def index(self, position):
        """Return the sample of the run's order at ``position`` of the stream: an int, or an array for an array.

        Raises:
            ValueError: a position is negative.
        """
        positions = numpy.asarray(position, numpy.int64)
        if positions.size and positions.min() < 0:
            raise ValueError(f"position {positions.min()} of a stream of samples")
        found = self.order.samples(_place(self.replica, self.replicas, self.block, positions))
        return int(found) if found.ndim == 0 else found

    def ranges(self, begin: int, end: int) -> numpy.ndarray:
        """Return (n, 2) ranges [first, end) of the samples at positions [begin, end), ascending."""
        if end <= begin:
            return numpy.empty((0, 2), numpy.int64)
        lap = numpy.arange(begin // self.block, -(-end // self.block), dtype=numpy.int64)
        first = numpy.maximum(lap * self.block, begin)
        last = numpy.minimum((lap + 1) * self.block, end) - 1
        places = [_place(self.replica, self.replicas, self.block, each) for each in (first, last)]
        return merged(self.order.ranges(numpy.stack([places[0], places[1] + 1], axis=1)))

    def within(self, samples: int) -> int:
        """Return how many positions of the stream lie in the first ``samples`` of the run's order."""
        rounds, rest = divmod(self.order.places_below(samples), self.replicas * self.block)
        return rounds * self.block + min(max(rest - self.replica * self.block, 0), self.block)


class Past(NamedTuple):
    """An earlier assignment of samples to replicas, which later ones start from.

    Attributes:
        replicas: number of replicas among which the samples were divided.
        block: number of samples in a block.
        positions: number of samples that each replica had taken when the assignment ended.
        step: number of committed steps when the assignment ended.
    """

    replicas: Size
    block: Size
    positions: tuple[Count, ...]
    step: Count


@dataclass(frozen=True)
class SampleAssignment:
    """The rule that says which replica gets which samples. All replicas share this rule and the positions as a part of
    the training state.
    """

    replicas: int
    block: int
    past: tuple[Past, ...] = ()

    def __post_init__(self):
        if self.replicas < 1 or self.block < 1:
            raise ValueError(f"samples assigned to {self.replicas} replicas in blocks of {self.block}")
        for past in self.past:
            if len(past.positions) != past.replicas:
                raise ValueError(f"{len(past.positions)} positions of {past.replicas} replicas")

    @property
    def order(self) -> Order:
        """Return the samples that were left when this assignment began."""
        return _order_after(self.past)

    def stream(self, replica: int) -> SampleStream:
        """Return the stream of ``replica``.

        Raises:
            ValueError: the assignment has no such replica.
        """
        if not 0 <= replica < self.replicas:
            raise ValueError(f"there is no replica {replica}: the samples are assigned to {self.replicas} replicas")
        return SampleStream(replica, self.replicas, self.block, self.order)

    def streams(self) -> list[SampleStream]:
        return [self.stream(replica) for replica in range(self.replicas)]

    def after(
        self, positions: Mapping[int, int], step: int, replicas: int, block: int
    ) -> tuple["SampleAssignment", dict[int, int]]:
        """Return the assignment and the positions with which training continues after ``step``.

        The present assignment and positions are returned unless the number of replicas or the block size changes. The
        function is pure, so all replicas that commit the same step get the same result.

        Args:
            positions: position of every replica of this assignment; a replica that is missing has taken nothing.
        """
        counts = tuple(positions.get(replica, 0) for replica in range(self.replicas))
        if (replicas, block) == (self.replicas, self.block):
            return self, dict(enumerate(counts))
        past = (*self.past, Past(self.replicas, self.block, counts, step)) if any(counts) else self.past
        return SampleAssignment(replicas, block, past), dict.fromkeys(range(replicas), 0)

    def leveled(self, positions: Mapping[int, int], step: int) -> tuple["SampleAssignment", dict[int, int]]:
        """Return an assignment and positions that are equal for all replicas.

        If the positions differ, this is a new assignment of the remaining samples, with all positions 0.

        SPARe needs this, because its steps take equally many samples from every stream.
        """
        counts = tuple(positions.get(replica, 0) for replica in range(self.replicas))
        if len(set(counts)) == 1:
            return self, dict(enumerate(counts))
        past = (*self.past, Past(self.replicas, self.block, counts, step))
        return SampleAssignment(self.replicas, self.block, past), dict.fromkeys(range(self.replicas), 0)

    def needed(self, steps: int, batch: int) -> int:
        """Return how many samples the dataset must have, so that no stream exceeds it in a run of ``steps`` steps.

        Args:
            batch: samples that a replica takes in a step.
        """
        since = self.past[-1].step if self.past else 0
        count = (steps - since) * batch
        return max(stream.index(count - 1) + 1 for stream in self.streams()) if count > 0 else 0

    def taken(self, positions: Mapping[int, int]) -> numpy.ndarray:
        """Return (n, 2) ranges of all samples taken so far, in this assignment and the former ones.

        The ranges are sorted, and ranges that touch are merged.
        """
        now = (Past(self.replicas, self.block, tuple(positions.get(r, 0) for r in range(self.replicas)), 0),)
        ranges = [numpy.empty((0, 2), numpy.int64)]
        for number, past in enumerate((*self.past, *now)):
            streams = SampleAssignment(past.replicas, past.block, self.past[:number]).streams()
            ranges += [stream.ranges(0, count) for stream, count in zip(streams, past.positions, strict=True)]
        return merged(numpy.concatenate(ranges))

    def as_values(self) -> dict[str, Any]:
        """Return the assignment as JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "SampleAssignment":
        """Return the assignment from the JSON values that ``as_values`` has returned.

        Raises:
            ValueError: the values do not describe an assignment.
        """
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an assignment of samples: {error}") from error


@lru_cache(maxsize=64)
def _order_after(assignments: tuple[Past, ...]) -> Order:
    order = Order()
    for past in assignments:
        order = order.without(past.replicas, past.block, past.positions)
    return order


def merged(ranges: numpy.ndarray) -> numpy.ndarray:
    """Return the same ranges sorted, (m, 2), with ranges that touch or overlap merged."""
    if not len(ranges):
        return ranges
    ranges = ranges[numpy.argsort(ranges[:, 0], kind="stable")]
    reach = numpy.maximum.accumulate(ranges[:, 1])
    begins = numpy.flatnonzero(numpy.append(True, ranges[1:, 0] > reach[:-1]))
    return numpy.stack([ranges[begins, 0], reach[numpy.append(begins[1:], len(ranges)) - 1]], axis=1)


def _place(replica: int, replicas: int, block: int, position):
    return (position // block * replicas + replica) * block + position % block


def _left_places(replica: int, replicas: int, block: int, count: int, most: int) -> numpy.ndarray:
    """Return the (n, 2) ranges of places that a replica at position ``count`` has not taken, up to the furthest
    position ``most``.
    """
    lap = numpy.arange(count // block, -(-most // block), dtype=numpy.int64)
    first = _place(replica, replicas, block, lap * block)
    ranges = numpy.stack([first, first + block], axis=1)
    if len(ranges):
        ranges[0, 0] += count % block
    return ranges


KEY = "replicas"
_OWN = ("lineage", "has_state")


class Follow(Protocol):
    """Interface to the data loaders of this rank, which read the stream of its replica."""

    def __call__(self, assignment: SampleAssignment, position: int) -> None:
        """Make the loaders read the replica's stream of ``assignment`` from ``position`` on."""

    @property
    def position(self) -> int | None:
        """Return the present position of the loaders in the stream, None if this rank reads no samples."""


class ReplicaPosition:
    """The training position, equal on all replicas that have committed the same steps.

    The commit of a step advances the sample positions of the replicas that contributed gradients.

    Args:
        extra: returns the mutable mapping that the trainer saves together with its position.

    Attributes:
        lineage: number of the quorum (set of participating replicas) that committed the last step, 0 before the first.
            States with equal step and lineage are equal. Negative if a part of the state was estimated, see
            :func:`ft.job.quorum.values.estimated`.
        has_state: whether the position belongs to a training state, and not to the start of a process that fetches it.
    """

    def __init__(
        self,
        trainer: Position,
        extra: Callable[[], dict[str, Any]],
        replica: int,
        follow: Follow,
        assignment: SampleAssignment,
        positions: dict[int, int],
    ):
        self._trainer, self._extra, self._replica, self._follow = trainer, extra, replica, follow
        self.assignment, self.positions, self.lineage = assignment, dict(positions), 0
        self.has_state = True
        self._note()

    @property
    def step(self) -> int:
        """Return the number of committed steps."""
        return self._trainer.get()["step"]

    @property
    def mine(self) -> int:
        """Return the number of samples that this replica has taken of its own stream."""
        return self.positions.get(self._replica, 0)

    def began_at(self, batch: int) -> int:
        """Return the position in this replica's stream at which the present step began to read its ``batch`` samples.

        On a rank with loaders, the result is computed from what the loaders have really read.
        """
        read_to = self._follow.position
        return self.mine if read_to is None else read_to - batch

    def advance(self, healthy: Sequence[int], batch: int, quorum: int) -> None:
        """Commit a step of the quorum with number ``quorum``: each of ``healthy`` has taken ``batch`` samples."""
        for replica in healthy:
            self.positions[replica] = self.positions.get(replica, 0) + batch
        self.lineage = quorum
        self._note()

    def get(self) -> dict[str, Any]:
        return {**self._trainer.get(), "lineage": self.lineage, "has_state": self.has_state}

    def set(self, position: dict[str, Any]) -> None:
        self._trainer.set({name: value for name, value in position.items() if name not in _OWN})
        self.lineage, self.has_state = position["lineage"], position["has_state"]
        self.follow()

    def without_state(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return ``position`` with the note that it comes without a state, which another replica is to give."""
        return {**position, "lineage": 0, "has_state": False}

    def estimate(self, life: int) -> None:
        """Note that a part of the state was estimated (CheckFree): every exact state of this step goes before it.

        Before the first step, there is nothing that an estimate could save.

        Args:
            life: the life of the replica that begins with this state.
        """
        self.lineage = estimated(self.lineage, self._replica, life)
        self.has_state = self.has_state and self.step > 0

    def follow(self) -> None:
        """Follow the trainer's position, which was set: adopt its extra state, and have the loaders read on there."""
        self.assignment, self.positions = parse(self._extra()[KEY])
        self._follow(self.assignment, self.mine)

    def restart(self, assignment: SampleAssignment, positions: dict[int, int]) -> None:
        """Set the position to that of a checkpoint that was loaded."""
        self.assignment, self.positions, self.lineage = assignment, dict(positions), 0
        self._note()
        self._follow(assignment, self.mine)

    def _note(self) -> None:
        positions = {str(replica): count for replica, count in sorted(self.positions.items())}
        self._extra()[KEY] = {"positions": positions, **self.assignment.as_values()}


def parse(values: dict[str, Any]) -> tuple[SampleAssignment, dict[int, int]]:
    """Return the assignment and the positions that a state holds.

    Raises:
        ValueError: the values do not describe an assignment.
    """
    return SampleAssignment.from_values(values), {int(replica): count for replica, count in values["positions"].items()}
