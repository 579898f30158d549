"""The protection of FT-HSDP (see :mod:`ft.protection.contract`): a replica's share of the training data, and the
assignment of samples when it starts.

Each replica reads its own stream of samples: position p of its loaders is the p-th sample of the stream, and its
data-parallel ranks divide each microbatch as usual. With blocks of micro batch x data-parallel size, data-parallel rank
d of replica r reads in each microbatch what data-parallel rank r * size + d of a single world of all replicas would
read, as long as no replica has been absent.

Validation and test data are not divided: every replica reads the same samples, so that no replica waits for another.

The assignment says which replica gets which samples, and the positions are the numbers of samples that the replicas
have taken (:mod:`ft.systems.hsdp.samples`). The replica may begin a run, resume from a checkpoint, or return to a run
that continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft.job.quorum import QuorumClient
from ft.protection.contract import Asked, Layer, Protection, Trainer
from ft.systems.hsdp import commits
from ft.systems.hsdp.components import Components
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.protocol import LastSave
from ft.systems.hsdp.replica_manager import ReplicaManager
from ft.systems.hsdp.samples import KEY, ReplicaPosition, SampleAssignment, SampleStream, parse
from ft.systems.hsdp.work import Work
from ft.worker.session import Session
from megatron.patches.manifest import WITH_REPLICAS


@dataclass(frozen=True)
class Share:
    """One replica's part of the training data (``ft.protection.contract.DataShare``)."""

    replica: int
    assignment: SampleAssignment
    positions: Mapping[int, int]

    @property
    def position(self) -> int:
        """Return the number of samples that this replica has taken."""
        return self.positions.get(self.replica, 0)

    @property
    def stream(self) -> SampleStream:
        """Return the stream of this replica's samples."""
        return self.assignment.stream(self.replica)

    def needed(self, steps: int, batch: int) -> int:
        """Return how many samples the dataset needs for ``steps`` steps of ``batch`` samples over all replicas."""
        return self.assignment.needed(steps, batch // self.assignment.replicas)


class Follower:
    """Makes the loaders of one rank read its replica's samples.

    Args:
        loaders: one for each model chunk, None for chunks that read no tokens; their datasets can ``follow`` a stream.
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


def initial_assignment(
    place: ReplicaContext, extra: dict[str, Any], step: int, consumed: int, block: int
) -> tuple[SampleAssignment, dict[int, int]]:
    """Return which replica gets which samples from now on, and the position of each replica in its stream: the number
    of samples that it has taken.

    Args:
        extra: the trainer's extra state from the checkpoint; it contains an assignment if the checkpoint was written by
            a run with replicas.
        consumed: samples that all replicas together have taken in these steps.
    """
    if KEY in extra:
        assignment, positions = parse(extra[KEY])
    elif consumed:
        # The checkpoint was written by a run without replicas, in which a single stream contained all samples.
        assignment, positions = SampleAssignment(1, 1), {0: consumed}
    elif place.comes_back and (stored := commits.newest(place.run_dir)) is not None:
        # This determines only how many samples the dataset needs; the assignment and the positions that are used for
        # training come with the state that this replica fetches from the others.
        assignment, positions = stored.assignment, dict(stored.positions)
    else:
        assignment, positions = SampleAssignment(place.replicas, block), {}
    return assignment.after(positions, step, place.replicas, block)


class Replicas(Protection):
    """Train the model by several replicas, each with its own world; if one fails, the others continue (FT-HSDP)."""

    features = frozenset({WITH_REPLICAS})
    joins_run = draws_weights = divides_steps = True

    def __init__(self, asked: Asked):
        super().__init__(asked)
        self._place = ReplicaContext.from_environment(asked.environment)
        self.is_given_state = self._place.comes_back
        self._client: QuorumClient | None = None
        self._block = 1

    def connected(self, session: Session | None) -> None:
        self._session = session
        if session.rank == 0 and not self.asked.flags.ft_hot_swap:
            self._client = self._place.announce()

    def share(self, extra: dict[str, Any], step: int, samples: int, block: int) -> Share:
        self._block = block
        return self._share(self._place, extra, step, samples)

    def _share(self, place: ReplicaContext, extra: dict[str, Any], step: int, samples: int) -> Share:
        assignment, positions = initial_assignment(place, extra, step, samples, self._block)
        if place.redundancy is not None:
            assignment, positions = assignment.leveled(positions, step)
        return Share(place.replica, assignment, positions)

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        place, batch = self._place, trainer.batch // self._place.replicas
        # SPARe divides a step's samples among the replicas in another way.
        divides = next((layer for layer in inner if hasattr(layer, "work") and hasattr(layer, "follow")), None)
        share = self._share(place, trainer.extra, trainer.step, trainer.samples)
        follow = Follower(trainer.loaders, place.replica) if divides is None else divides.follow(trainer.loaders, batch)
        position = ReplicaPosition(
            trainer.position, lambda: trainer.extra, place.replica, follow, share.assignment, dict(share.positions)
        )
        work = Work(place) if divides is None else divides.work(place, position, trainer, follow)
        components = Components(
            self._session,
            place,
            trainer.chunks,
            trainer.optimizer,
            trainer.scheduler,
            position,
            work=work,
            batch=batch,
            client=self._client,
            save_interval=trainer.save_interval,
            verifier=next((layer for layer in inner if layer.verifies), None),
        )

        def load_last() -> bool:
            """Load the newest checkpoint, if there is one, after every replica has lost its state."""
            trainer.extra.pop(KEY, None)  # the positions of the lost state
            is_loaded = trainer.load()
            begins = self._share(replace(place, comes_back=False), trainer.extra, trainer.step, trainer.samples)
            position.restart(begins.assignment, dict(begins.positions))
            work.restart()
            trainer.rewind()
            return is_loaded

        last_save = LastSave(trainer.is_saved, trainer.save) if trainer.saves else None
        is_inside = bool(self.asked.flags.ft_hot_swap)
        return ReplicaManager(components, load_last, lambda: trainer.rehearse(batch), last_save, is_inside)
