"""The protection of SPARe, which divides the work among FT-HSDP's replicas, so that no data are skipped when replicas
are lost; see :mod:`ft.protection.contract`.

The groups take part in the gradient all-reduce after S types of their stacks. When groups are lost, the controller
(SPARe, algorithm 2) reorders the stacks of the survivors such that every type is still trained in every step. A
wipe-out is the loss of all hosts of a type; as every group can read all data, other groups then compute the type. A
step is done by a quorum, the groups that are present; if the gradient exchange fails, another attempt repeats the step.
The samples of each type are a stream for the data loaders; a position in a stream is the number of samples before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from ft.job.quorum import Quorum
from ft.protection.contract import Layer, Protection, Trainer
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.samples import ReplicaPosition, SampleAssignment
from ft.systems.hsdp.work import Reduced, Work
from ft.systems.spare.controller import Controller
from ft.systems.spare.ledger import GradientStore
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler
from ft.systems.spare.shares import Shares, divide, rearrange


class StackStream:
    """The samples that a group reads in consecutive steps in which it computes the same types.

    A step consists of one shard (``shard`` samples) of each type, in the order of ``types``. The samples of type i are
    stream i of ``assignment``. The assignment is the same in all groups, so every group can read every type.

    Args:
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


KEY = "spare"
"""Key of the controller's state in the trainer's extra state."""


class StackLoaders:
    """Positions the data loaders of this rank, so that they read the samples of the types that its group computes.

    Args:
        shard: number of samples of one type in a step.
    """

    def __init__(self, loaders: Sequence[Any], shard: int):
        self._loaders, self.shard = [loader for loader in loaders if loader is not None], shard
        self._stream: StackStream | None = None
        self._due: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __call__(self, assignment: SampleAssignment, position: int) -> None:
        """Forget the present position, because the state has changed; :meth:`read` sets the next one."""
        self.rest()

    def rest(self) -> None:
        """Read nothing in the current step."""
        self._stream = self._due = None

    def read(self, assignment: SampleAssignment, types: Sequence[int], starts: Sequence[int]) -> None:
        """Make the loaders read the samples of ``types`` in the current step and the following ones.

        Args:
            starts: position in the stream of each type.
        """
        if not self._loaders or not types or self._is_next(tuple(types), tuple(starts)):
            return
        self._stream = StackStream(assignment, types, starts, self.shard)
        self._due = tuple(types), tuple(starts)
        for loader in self._loaders:
            loader.dataset.follow(self._stream)
            loader.seek(0)

    @property
    def position(self) -> int | None:
        """Return the position that the streams of the current types have reached; None if this rank reads nothing."""
        return None if self._stream is None else self._stream.position_of_first_type(self._loaders[0].consumed_samples)

    def _is_next(self, types: tuple[int, ...], starts: tuple[int, ...]) -> bool:
        """Return whether the loaders reach these positions anyway, so that their prefetched data is usable."""
        if self._stream is None or self._due is None or self._due[0] != types:
            return False
        steps, rest = divmod(self._loaders[0].consumed_samples, self._stream.step_samples)
        return rest == 0 and starts == tuple(first + steps * self.shard for first in self._due[1])


class StackedWork(Work):
    """Decides what one group computes in each step. All groups take the same decisions, from the state that they share.

    As in SPARe, section 3.2, every group computes the first S types of its stack, and the groups compute a lost type
    again only if no survivor has computed it (:mod:`ft.systems.spare.shares`). Of the groups that compute a type, one
    adds its gradients to the sum. The others compute the type in a pass of its own, whose gradients they only keep
    (:mod:`ft.systems.spare.ledger`).

    Args:
        per_token: whether megatron-core divides gradients by tokens, not by samples.
        reseed: seeds the random generators for a step. Groups compute different numbers of types and so draw different
            numbers of random values, but the generators' state after a step must be equal on all groups.
        position: training position, with the number of samples that were taken of every type.
    """

    def __init__(
        self,
        group: int,
        controller: Controller,
        position: ReplicaPosition,
        extra: Callable[[], dict[str, Any]],
        loaders: StackLoaders,
        per_token: bool,
        reseed: Callable[[int], None],
    ):
        self._group, self._controller, self._position, self._extra = group, controller, position, extra
        self._loaders, self._per_token, self._reseed = loaders, per_token, reseed
        self._ledger = GradientStore()
        self._of: tuple[int, int] | None = None  # the ledger's step, and the quorum of the step before
        self._passes: list[tuple[int, ...]] = []  # the types of this attempt's passes; the last one is exchanged
        self._at = 0  # the present pass
        self._read_from: dict[int, int] = {}
        self._away: tuple[int, ...] = ()  # lost groups that the controller counts as alive, see ``rearrange``
        self._noted: dict[str, Any] | None = None
        self._answers: dict[tuple[int, ...] | None, Shares] = {}  # for the current layout
        self._record: dict[str, Any] = {}
        self.restart()

    def restart(self) -> None:
        """Reset the stacks to their initial order, at the beginning of a run or after a checkpoint was loaded."""
        self._controller.reset()
        self._away = ()
        self._note()

    def plan(self, quorum: Quorum | None) -> None:
        shares = self._divided(quorum)
        of = (self._position.step, self._position.lineage)
        is_first = of != self._of
        if is_first:
            self._ledger.clear()
            self._read_from.clear()
            self._of = of
        adds = shares.adds.get(self._group, ())
        self._ledger.want(adds)
        self._passes, self._at = self._in_passes(shares, adds, is_first), 0
        self._read()
        self.units = float(max(1, shares.most))
        self._begin_pass()

    def again(self) -> None:
        self._read()
        self._begin_pass()

    def next_pass(self) -> None:
        self._ledger.settle()
        self._at += 1
        self._begin_pass()

    def share(self, samples: int) -> int:
        return len(self._passes[self._at]) * (samples // self._controller.groups)

    def problem(self, quorum: Quorum, is_planned: bool) -> str:
        shares, planned = self._divided(quorum), self._divided(None)
        if not is_planned:
            self.units = float(max(1, shares.most))
            return ""
        needed = shares.added_to(planned)
        if not needed:
            self._ledger.want(shares.adds.get(self._group, ()))
            return ""
        said = f"groups are lost, others compute the shard types {_listed(needed)}"
        return f"{said}; no host is left of {_listed(shares.adopted)}" if shares.adopted else said

    def scale(self, quorum: Quorum) -> float:
        return 1.0 / self._controller.groups

    def lr_factor(self, quorum: Quorum) -> float:
        return 1.0

    def streams(self, quorum: Quorum) -> Sequence[int]:
        return range(self._controller.groups)

    def kept(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Reduced:
        return self._ledger.entering(place, parts, reduced)

    def add_kept(self, sums: torch.Tensor) -> torch.Tensor:
        return self._ledger.add_sums(sums)

    def reduced(self, tokens: torch.Tensor | None) -> None:
        self._ledger.take_all()
        if not self.is_apart and (read_to := self._loaders.position) is not None:
            types = (kind for each in self._passes for kind in each)
            self._read_from |= dict.fromkeys(types, read_to - self._loaders.shard)
        if tokens is not None:
            self._ledger.add_tokens(tokens)

    def record(self) -> dict[str, Any]:
        return self._record

    def failed(self) -> None:
        self._ledger.settle()
        self.is_apart = False

    def committed(self, quorum: Quorum) -> None:
        mine = self._ledger.added if self._group in quorum.healthy else ()
        computed = {kind: at for kind, at in self._read_from.items() if kind in mine}
        self._ledger.clear()
        shares, planned = self._divided(quorum), self._divided(None)
        self.adopted = shares.adopted
        self._record = {
            "stack": self._controller.stack,
            "owners": shares.owners,
            "patch": shares.patch,
            "covered": tuple(kind for kind in shares.moved_from(planned) if kind not in shares.patch),
            "adopted": shares.adopted,
            "computed": computed,
        }
        self._away = rearrange(self._controller, quorum.healthy)
        self._note()
        self._reseed(self._position.step + 1)

    def _in_passes(self, shares: Shares, adds: Sequence[int], is_first: bool) -> list[tuple[int, ...]]:
        """Return the types of each pass of an attempt at a step; the last pass is exchanged, and may have no types.

        In the first attempt, this group computes also the types that it does not add to the sum. Each has a pass of its
        own, and so has each type without a host, because the loss of further groups may move it to another group.
        """
        todo = set(adds) - set(self._ledger.usable(adds))
        others = [kind for kind in shares.computes.get(self._group, ()) if is_first and kind not in adds]
        adopted = [kind for kind in adds if kind in todo and kind in shares.adopted]
        last = tuple(kind for kind in adds if kind in todo and kind not in shares.adopted)
        if adopted and not last:
            last = (adopted.pop(),)
        return [*((kind,) for kind in (*others, *adopted)), last]

    def _read(self) -> None:
        """Have the loaders read the samples of the present pass and the following ones."""
        types = [kind for each in self._passes[self._at :] for kind in each]
        if not types:
            self._loaders.rest()
        positions = self._position.positions
        self._loaders.read(self._position.assignment, types, [positions.get(kind, 0) for kind in types])

    def _begin_pass(self) -> None:
        types = self._passes[self._at]
        self.is_apart = self._at < len(self._passes) - 1
        self._ledger.begin(types, 1.0 if self._per_token else float(len(types)), self.is_apart)

    def _divided(self, quorum: Quorum | None) -> Shares:
        """Return the division of the step among the groups of ``quorum`` (None: the planned groups).

        The result is cached, because a step needs it several times, and most steps have the same division.
        """
        self._follow_state()
        healthy = None if quorum is None else quorum.healthy
        if healthy not in self._answers:
            planned = sorted(set(numpy.flatnonzero(self._controller.alive).tolist()) - set(self._away))
            self._answers[healthy] = divide(self._controller, planned, planned if healthy is None else healthy)
        return self._answers[healthy]

    def _follow_state(self) -> None:
        """Adopt the controller's state from the extra state, which may have come from another group or a checkpoint."""
        there = self._extra().get(KEY)
        if there is not None and there != self._noted:
            self._controller, self._noted = Controller.restore(there), there
            self._away = tuple(there.get("away", ()))
            self._answers = {}

    def _note(self) -> None:
        state = {**self._controller.state(), "away": list(self._away)}
        if state != self._noted:
            self._answers = {}
        self._noted = self._extra()[KEY] = state


def _listed(types: Sequence[int]) -> str:
    return ", ".join(map(str, types[:20])) + (" ..." if len(types) > 20 else "")


class StackedShards(Protection):
    """Place each shard type on several replicas; the remaining replicas compute the shards of a lost one (SPARe)."""

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        return DividesByStacks()


class DividesByStacks(Layer):
    """Has the replicas compute stacks of shard types: FT-HSDP's layer around this one divides the work by it."""

    def follow(self, loaders: Sequence[Any], batch: int) -> StackLoaders:
        """Return the object that positions the data loaders at this replica's samples.

        Args:
            batch: number of samples of a replica in a step.
        """
        return StackLoaders(loaders, batch)

    def work(
        self, place: ReplicaContext, position: ReplicaPosition, trainer: Trainer, follow: StackLoaders
    ) -> StackedWork:
        """Return the object that decides what the replica at ``place`` computes in each step.

        Raises:
            UserError: shard types cannot be placed with the given redundancy.
        """
        controller = Controller(Placement(place.replicas, ruler(place.replicas, place.redundancy)))
        per_token = trainer.chunks[0].config.calculate_per_token_loss
        return StackedWork(
            place.replica, controller, position, lambda: trainer.extra, follow, per_token, trainer.reseed
        )
