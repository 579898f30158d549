"""CheckFree on one rank: what it records during training, and both sides (lender and rebuilt stage) of a rebuild.

A rebuilt stage consists of these parts (CheckFree, section 4.2; what the paper leaves open follows its authors' code):

parameters          average of the neighbours' blocks (:mod:`ft.systems.checkfree.rebuild`), copied to main parameters
moments, steps      fresh
learning rate       scaled by a factor, through max_lr and min_lr: core's schedule reads no lr_mult (:mod:`.rate`)
schedule, scaler    the neighbour's: they are the same on all stages
position            the neighbour's
random numbers      seeded anew for this place in the grid and this step
"""

import math
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import FallbackError, UserError
from ft.job.messages import Neighbours, Repair
from ft.systems.checkfree import rate, rebuild
from ft.systems.checkfree import transfer as lending
from ft.systems.checkfree.blocks import StageBlocks
from ft.systems.checkfree.norms import StageNorms
from ft.systems.checkfree.peer_weights import PeerWeights
from ft.systems.checkfree.plus import moments
from ft.systems.checkfree.settings import Settings
from megatron.core import parallel_state
from megatron.patches import stage_norms

if TYPE_CHECKING:
    from ft.protection.training_state import TrainingState
    from ft.systems.checkfree.rebuild import Rebuilt
    from ft.worker.session import Session

_NARROW = ("linear_proj.weight", "linear_fc2.weight")
"""Output projections, which Megatron initializes with a deviation that shrinks with the number of layers."""


class CheckFreeRebuilder:
    """The stage rebuilder of one rank (``ft.systems.hot_swap.rebuilder.StageRebuilder``).

    Create it on all ranks, after model and optimizer are built and core is patched (WITH_CHECKFREE).

    Raises:
        UserError: the model cannot be rebuilt stage by stage.
    """

    def __init__(self, session: "Session", subject: "TrainingState", settings: Settings):
        self._session, self._subject, self._settings = session, subject, settings
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._replicated_ends = settings.replicated_ends
        has_end = self._stage in (0, stages - 1) or (
            self._replicated_ends is not None and self._replicated_ends.group is not None
        )
        self._blocks = StageBlocks(subject.chunks, whole=not has_end)
        self._pipeline = dist.get_process_group_ranks(self._group())
        self._peer_weights = PeerWeights(session, subject, settings)
        self._norms = StageNorms(stages, self._stage, settings.norm_limit)
        self._device = next(subject.chunks[0].parameters()).device
        stage_norms.listen(self._norms.heard)
        subject.before_update(self._norms.begins)
        if self._replicated_ends is not None:
            moments.refuse_common_steps(subject.optimizer)
        kind = "middle" if self._replicated_ends is None else "plus"
        session.observe("layout", places={str(session.rank): self._place()}, checkfree=kind)

    @property
    def kept(self) -> dict[str, Any]:
        """Return what a snapshot's envelope stores of this object, as JSON values."""
        return {"norms": list(self._norms.values)}

    def keep(self, kept: dict[str, Any]) -> None:
        """Restore what :attr:`kept` has returned."""
        self._norms.begins()
        self._norms.values = list(kept["norms"])

    @property
    def rebuilt_at(self) -> int | None:
        """Return the step at which this rank's stage was last rebuilt; None if it never was."""
        return self._settings.rebuilt_at().get(str(self._stage))

    def extended(self, position: Any) -> "PositionWithNorms":
        """Return a position that combines the trainer's with :attr:`kept`."""
        return PositionWithNorms(position, self)

    def begins(self, step: int) -> None:
        """Resume a run after ``step``: a stage that was rebuilt before its checkpoint has its own learning rate."""
        if self.rebuilt_at is not None:
            self._set_rate(step, self.rebuilt_at)

    def learn(self, order: Repair) -> None:
        """Record which stages were rebuilt, after a recovery. Runs on every rank, once the position is set."""
        for stage, rank in enumerate(self._pipeline):
            if rank in order.rebuilt:
                self._settings.rebuilt_at()[str(stage)] = order.step

    def committed(self, step: int) -> None:
        """Handle the end of ``step``: publish its norms, and lower a boosted learning rate as the settings say."""
        self._norms.settle()
        if self.rebuilt_at is not None and self._settings.boost.decay_steps and not self._has_twin:
            self._set_rate(step, self.rebuilt_at)

    def lend(self, order: Repair, envelope: dict[str, Any]) -> bool:
        """Send this rank's blocks to those neighbour ranks that are rebuilt. These ranks have to call ``rebuild`` at
        the same time.

        Returns:
            whether this rank's own state is still that of the step; with CheckFree+ some of its moments may be reset.
        """
        own = self._session.rank
        begin_anew = self._begin_anew(order)
        moments.reset(self._subject.optimizer, begin_anew)
        to = [rank for rank, beside in order.rebuilt.items() if own in beside.there]
        if to:
            blocks = self._blocks.get()
            if self._replicated_ends is not None:
                blocks.append(self._ends())
            lending.lend(sorted(to), self._group(), blocks, envelope)
        return not begin_anew

    def _begin_anew(self, order: Repair) -> list[torch.nn.Parameter]:
        """Return the parameters that this rank shares with a rebuilt rank.

        The rebuilt rank has new optimizer moments for these parameters, so this rank must reset its own moments, too;
        otherwise the copies would diverge. All four end stages share a tied weight.
        """
        if not self._has_twin:
            return []
        chunk = self._subject.chunks[0]
        if self._replicated_ends.twin in order.rebuilt:
            return [param for _, param in self._replicated_ends.params(chunk)]
        ends = (*self._pipeline[:2], *self._pipeline[-2:])
        return self._replicated_ends.tied(chunk) if any(rank in order.rebuilt for rank in ends) else []

    def rebuild(self, step: int, beside: Neighbours) -> tuple[dict[str, Any], dict[str, str]]:
        """Rebuild this rank's part of the stage from its neighbours, as of ``step``.

        Returns:
            (the trainer's position, description of the sources).

        Raises:
            FallbackError: the neighbours' blocks cannot be used.
        """
        began = time.monotonic()
        lent = dict(zip(beside.there, lending.borrow(beside.there, self._group(), self._device), strict=True))
        envelope = lent[beside.there[0]][1]
        if self._replicated_ends is not None:
            self._take_ends({rank: blocks.pop() for rank, (blocks, _) in lent.items()})
        norms = dict(enumerate(envelope["extra"]["checkfree"]["norms"]))
        before, after = norms.get(self._stage - 1), norms.get(self._stage + 1)
        blocks = [None if rank is None else lent[rank][0] for rank in (beside.previous, beside.following)]
        try:
            made = rebuild.rebuild(*blocks, before, after, self._strategy(blocks), None, self._initialise(step))
            self._blocks.put(made.blocks)
        except UserError as error:
            raise FallbackError(str(error)) from error
        self._subject.optimizer.reload_model_params()
        position = self._subject.adopt(envelope)
        self._set_rate(step, step)
        self._settings.reseed(step)
        self._tell(step, beside, made, [before, after], time.monotonic() - began)
        how = f"rebuilt:{'+'.join(map(str, beside.there))}"
        return {**position, "checkfree": self.kept | {"norms": list(norms.values())}}, {"owned": how, "replicated": how}

    def lend_weights(self, order: Repair, envelope: dict[str, Any]) -> None:
        """Send this rank's weights to data-parallel peers whose state is lost, see :class:`PeerWeights`."""
        self._peer_weights.lend(order, envelope)

    def take_weights(self, step: int, peer: int) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Take the weights of ``step`` from the data-parallel peer with logical rank ``peer``.

        Returns:
            (the trainer's position, description of the sources, the peer's envelope).

        Raises:
            FallbackError: the peer's weights cannot be used.
        """
        envelope = self._peer_weights.take(step, peer)
        how = f"rebuilt:{peer}"
        return envelope["extra"], {"owned": how, "replicated": how}, envelope

    def _strategy(self, blocks: list) -> str:
        """Return the strategy of the rebuild.

        An end stage has a single neighbour, which CheckFree+ has trained to do the same work; therefore it is copied.
        """
        asked = self._settings.strategy
        return rebuild.COPY if None in blocks and asked != rebuild.RANDOM else asked

    @property
    def _has_twin(self) -> bool:
        """Return whether a neighbour stage has a copy of this stage's embedding or head.

        Both copies must have the same learning rate.
        """
        return self._replicated_ends is not None and self._replicated_ends.twin is not None

    def _ends(self) -> dict[str, torch.Tensor]:
        """Return this stage's parameters of embedding and head."""
        return {name: param.detach() for name, param in self._replicated_ends.params(self._subject.chunks[0])}

    @torch.no_grad()
    def _take_ends(self, lent: dict[int, dict[str, torch.Tensor]]) -> None:
        """Copy embedding and head from the stage that has the other copy of them."""
        if not self._has_twin:
            return
        given = lent.get(self._replicated_ends.twin, {})
        own = dict(self._replicated_ends.params(self._subject.chunks[0]))
        if {name: held.shape for name, held in given.items()} != {name: param.shape for name, param in own.items()}:
            raise FallbackError("the neighbour stage has no copy of this stage's embedding or head")
        for name, param in own.items():
            param.data.copy_(given[name])

    def _place(self) -> dict[str, int]:
        return {
            "pp": self._stage,
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "blocks": len(self._blocks),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "lends": self._peer_weights.may_lend,
        }

    def _group(self):
        return parallel_state.get_pipeline_model_parallel_group()

    def _set_rate(self, step: int, rebuilt_at: int) -> None:
        """Scale the learning rate from the schedule's own unscaled rates, so that repeated failures do not compound.

        If another stage has a copy of this stage's embedding or head, the factor is 1. The rates are set in this case,
        too, because a new worker still has those of the first step.
        """
        schedule = self._subject.scheduler
        factor = 1.0 if self._has_twin else self._settings.boost.at(step, rebuilt_at)
        groups = [g for g in self._subject.optimizer.param_groups if not g.get("is_decoupled_lr", False)]
        rate.scale(groups, schedule.max_lr, schedule.min_lr, factor)
        schedule.step(increment=0)

    def _initialise(self, step: int):
        """Return the initializer of the strategy "random": core's deviations; replicated weights are drawn equally."""
        config = self._subject.chunks[0].config
        narrow = config.init_method_std / math.sqrt(2.0 * config.num_layers)
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        generators = {}
        for is_sharded in (False, True):
            words = (self._settings.seed, step, self._stage, 1 + tensor_rank if is_sharded else 0)
            generators[is_sharded] = torch.Generator().manual_seed(hash(words) % 2**63)

        def initialise(name: str, like: torch.Tensor, _generator) -> torch.Tensor:
            if like.dim() < 2 or not like.is_floating_point():
                return rebuild.fresh(name, like, None)
            drawn = torch.randn(like.shape, generator=generators[self._blocks.is_sharded(name)])
            deviation = narrow if name.endswith(_NARROW) else config.init_method_std
            return (deviation * drawn).to(device=like.device, dtype=like.dtype)

        return initialise

    def _tell(self, step: int, beside: Neighbours, made: "Rebuilt", norms: list, seconds: float) -> None:
        place = self._place()
        if place["tp"] or place["dp"] or place["cp"]:
            return
        self._session.observe(
            events.STAGE_REBUILT,
            step=step,
            stage=self._stage,
            strategy=made.strategy,
            weights=list(made.shares),
            norms=norms,
            neighbours=beside.there,
            note=made.note,
            seconds=round(seconds, 4),
        )


class PositionWithNorms:
    """A trainer's position (``ft.protection.position.Position``) combined with what a rebuilder stores beside it."""

    def __init__(self, position: Any, keeper: CheckFreeRebuilder):
        self._position, self._keeper = position, keeper

    def get(self) -> dict[str, Any]:
        return {**self._position.get(), "checkfree": self._keeper.kept}

    def set(self, position: dict[str, Any]) -> None:
        self._keeper.keep(position["checkfree"])
        self._position.set({key: value for key, value in position.items() if key != "checkfree"})
