"""CheckFree on one rank: what it records during training, and both sides (lender and rebuilt stage) of a rebuild.

A rebuilt stage consists of these parts (CheckFree, section 4.2; what the paper leaves open follows its authors' code):

parameters          average of the neighbours' blocks (:mod:`ft.systems.checkfree.rebuild`), copied to main parameters
moments, steps      fresh
learning rate       scaled by a factor, through max_lr and min_lr: core's schedule reads no lr_mult
schedule, scaler    the neighbour's: they are the same on all stages
position            the neighbour's
random numbers      seeded anew for this place in the grid and this step

The mean is weighted by gradient norms. For gradient clipping, megatron-core computes each rank's part of the norm;
``megatron.patches.stage_norms`` intercepts it. The only additional cost is one all-reduce of one number per stage,
which overlaps the optimizer update. The norm of a stage is taken over all parameters of the stage, embedding and output
layer included, and over its tensor- and data-parallel ranks.

A rank sends to the rank with the same tensor- and data-parallel coordinates in the neighbour stage. It sends its
transformer blocks and an envelope: the other values, such as schedule and position, that the lost stage takes over.
There are three rounds of point-to-point messages in the pipeline's process group: the length of the head, the head
(JSON: envelope, names, shapes and dtypes), and the parameters.

With data parallelism, a lost rank has peers whose model has the same weights. Until the optimizer of the next step
runs, these are the weights of the last committed step. The lost rank takes them over, and begins with new moments for
the optimizer shard that only it had. Optimizer state that is not sharded and the states of the random number generators
come from the peer, too, because they have to be the same on both.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base import bounded_json, events
from ft.base.errors import FallbackError, UserError
from ft.job.messages import Repair
from ft.job.parts import Neighbours
from ft.protection.training_state import learnt_buffers
from ft.state.snapshot import rng
from ft.systems.checkfree import rebuild
from ft.systems.checkfree.plus import refuse_common_steps, reset_moments
from ft.systems.checkfree.rebuild import Boost
from megatron.core import parallel_state
from megatron.patches import stage_norms

if TYPE_CHECKING:
    from ft.protection.training_state import TrainingState
    from ft.systems.checkfree.plus import ReplicatedEnds
    from ft.systems.checkfree.rebuild import Rebuilt
    from ft.worker.session import Session


@dataclass(frozen=True)
class Settings:
    """The settings of one rank for the rebuild of lost stages.

    Attributes:
        norm_limit: upper bound of the gradient norms by which the neighbours are weighted; a larger norm is replaced by
            it. None for raw norms.
        reseed: seeds this rank's random number generators for its position in the process grid and the given step.
        rebuilt_at: returns a mutable mapping from pipeline stage, as text, to the step at which it was last rebuilt.
            The trainer stores it with its position and in checkpoints.
        replicated_ends: the replicas of embedding and output layer (CheckFree+), with which the first and the last
            stage can be rebuilt; None without CheckFree+.
    """

    strategy: str
    boost: Boost
    norm_limit: float | None
    reseed: Callable[[int], None]
    rebuilt_at: Callable[[], dict[str, int]]
    replicated_ends: "ReplicatedEnds | None"
    draws_apart: bool


Blocks = list[dict[str, torch.Tensor]]
"""The parameters of each transformer block of a stage, by their names within the block."""


def lend(to: Sequence[int], group: dist.ProcessGroup, blocks: Blocks, envelope: dict[str, Any]) -> None:
    """Send ``blocks``, and ``envelope`` as JSON, to the logical ranks ``to``, which are the ranks of ``group``."""
    described = [[[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in b.items()] for b in blocks]
    tensors = [held.contiguous() for block in blocks for held in block.values()]
    device = tensors[0].device if tensors else torch.device("cpu")
    text = json.dumps({"envelope": envelope, "blocks": described}, separators=(",", ":")).encode()
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    size = torch.tensor([head.numel()], dtype=torch.int64, device=device)
    for parts in ([size], [head], _as_bytes(tensors)):
        _exchange([dist.P2POp(dist.isend, part, rank, group) for rank in to for part in parts])


def borrow(lenders: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[tuple[Blocks, dict]]:
    """Receive (blocks on ``device``, envelope) from each of the logical ranks ``lenders``.

    Raises:
        FallbackError: what was received describes no parameters.
    """

    def receive(parts: Sequence[Sequence[torch.Tensor]]) -> None:
        given = zip(lenders, parts, strict=True)
        _exchange([dist.P2POp(dist.irecv, part, rank, group) for rank, own in given for part in own])

    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in lenders]
    receive([[size] for size in sizes])
    heads = [torch.empty(int(size), dtype=torch.uint8, device=device) for size in sizes]
    receive([[head] for head in heads])
    found = [_read(head) for head in heads]
    receive([_as_bytes([held for block in blocks for held in block.values()]) for blocks, _ in found])
    return found


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [held.view(-1).view(torch.uint8) for held in tensors if held.numel()]


def _read(head: torch.Tensor) -> tuple[Blocks, dict]:
    """Return the blocks that a head describes, not filled yet, and its envelope."""
    try:
        header = bounded_json.loads(head.cpu().numpy().tobytes())
        blocks = [
            {name: torch.empty(shape, dtype=getattr(torch, kind), device=head.device) for name, shape, kind in named}
            for named in header["blocks"]
        ]
        return blocks, header["envelope"]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise FallbackError(
            f"the received parameters of a neighbour stage cannot be decoded ({type(error).__name__}: {error})"
        ) from error


_OF_BLOCK = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.(.+)$")


class StageBlocks:
    """The transformer blocks of one rank.

    Args:
        chunks: the model chunks of the stage: one, or several with the interleaved schedule. In the middle of the
            pipeline, the layers of each chunk lie between those of the same chunk of the two neighbour stages.
        whole: whether the stage must consist of blocks only, as a stage in the middle of the pipeline does.

    Raises:
        UserError: a middle stage has parameters that belong to no block.
    """

    def __init__(self, chunks: Sequence, *, whole: bool):
        found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        others = []
        for number, chunk in enumerate(chunks):
            for name, held in (*chunk.named_parameters(), *learnt_buffers(chunk)):
                place = _OF_BLOCK.search(name)
                if place is not None:
                    found.setdefault((number, int(place[1])), {})[place[2]] = held
                elif isinstance(held, torch.nn.Parameter):
                    others.append(name)
        if whole and others:
            raise UserError(
                f"a stage in the middle holds parameters of no transformer block: {', '.join(others[:3])}",
                "remove --ft-checkfree, because nothing could rebuild these parameters",
            )
        self._blocks = [found[place] for place in sorted(found)]

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self) -> list[dict[str, torch.Tensor]]:
        """Return the live parameters and learnt buffers (such as a router's expert bias) of each block.

        They are keyed by their names within the block.
        """
        return [{name: held.detach() for name, held in block.items()} for block in self._blocks]

    @torch.no_grad()
    def put(self, blocks: Sequence[dict[str, torch.Tensor]]) -> None:
        """Write tensors of the same names and shapes into the model.

        Raises:
            UserError: the names or shapes differ from those of the model.
        """
        given, own = [_shapes(block) for block in blocks], [_shapes(block) for block in self._blocks]
        if given != own:
            raise UserError(
                f"the {len(given)} blocks of the neighbours differ from the {len(own)} blocks of the lost stage",
                "give all stages the same number of layers of the same kind",
            )
        for block, new in zip(self._blocks, blocks, strict=True):
            for name, held in block.items():
                held.data.copy_(new[name])


def _shapes(block: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: held.shape for name, held in block.items()}


class StageNorms:
    """Collects the gradient norms of all pipeline stages on one rank.

    Args:
        limit: upper bound; a larger norm is replaced by it, as if each stage's gradients were clipped separately. The
            code of CheckFree's authors uses such clipped norms as weights. None for raw norms.

    Attributes:
        values: norm of each stage in the last step for which :meth:`settle` was called; None before the first step.
    """

    def __init__(self, stages: int, own: int, limit: float | None = None):
        self.values: list[float | None] = [None] * stages
        self._own, self._limit = own, limit
        self._under_way: list[tuple[torch.Tensor, dist.Work]] = []

    def begins(self) -> None:
        """Begin an attempt at an optimizer step, and drop the reductions that an aborted attempt has started."""
        self._under_way = []

    def heard(self, part: torch.Tensor | None, group: dist.ProcessGroup | None) -> None:
        """Start the reduction of a norm that megatron-core has computed.

        The method may be called several times in a step: dense and expert gradients may have one norm each.

        Args:
            part: norm of this rank's part of the gradients; None if this rank has no part.
        """
        device = torch.cuda.current_device() if part is None else part.device
        squares = torch.zeros(len(self.values), dtype=torch.float32, device=device)
        if part is not None:
            squares[self._own] = part.reshape(()).float() ** 2
        self._under_way.append((squares, dist.all_reduce(squares, group=group, async_op=True)))

    def settle(self) -> Sequence[float | None]:
        """Return the norms of the step that was just done.

        If megatron-core computed no norm in it (gradient overflow), return the previous norms.
        """
        if self._under_way:
            total = [0.0] * len(self.values)
            for squares, work in self._under_way:
                work.wait()
                total = [a + b for a, b in zip(total, squares.tolist(), strict=True)]
            self._under_way = []
            norms = [math.sqrt(square) for square in total]
            self.values = norms if self._limit is None else [min(norm, self._limit) for norm in norms]
        return self.values


class PeerWeights:
    """Lends and takes weights on one rank.

    Attributes:
        may_lend: whether a peer can go on with this rank's weights. With ``--overlap-param-gather`` some weights of a
            step arrive in the next one only. With several distributed optimizer instances, ranks of different instances
            have the same shard, and one with new moments would differ from its twin. With
            ``--data-parallel-random-init``, peers draw different random numbers.
    """

    def __init__(self, session: "Session", subject: "TrainingState", settings: Settings):
        self._session, self._subject, self._settings = session, subject, settings
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._device = next(subject.chunks[0].parameters()).device
        configured = [chunk.ddp_config for chunk in subject.chunks]
        self.may_lend = not settings.draws_apart and not any(
            each.overlap_param_gather or each.num_distributed_optimizer_instances > 1 for each in configured
        )

    def lend(self, order: Repair, envelope: dict[str, Any]) -> None:
        """Send this rank's weights to the ranks that take them; these have to call :meth:`take` at the same time."""
        to = [rank for rank, peer in order.lent.items() if peer == self._session.rank]
        if to:
            lend(sorted(to), self._group, self._state(), envelope)

    def take(self, step: int, peer: int) -> dict[str, Any]:
        """Take the weights of ``step`` from logical rank ``peer``; return the peer's envelope.

        Raises:
            FallbackError: the peer's model or optimizer differs from this rank's.
        """
        began = time.monotonic()
        ((blocks, envelope),) = borrow([peer], self._group, self._device)
        own = self._state()
        if [_weight_shapes(block) for block in blocks] != [_weight_shapes(block) for block in own]:
            raise FallbackError(f"the weights of data-parallel peer {peer} are not those of this rank's model")
        with torch.no_grad():
            for name, held in own[0].items():
                held.copy_(blocks[0][name])
        self._subject.optimizer.reload_model_params()
        self._subject.take_over(envelope, blocks[1])
        rng.restore({name: held.cpu().numpy().tobytes() for name, held in blocks[2].items()})
        self._session.observe(
            events.STAGE_REBUILT,
            step=step,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            strategy=f"weights of rank {peer}",
            weights=[],
            neighbours=[peer],
            note="",
            seconds=round(time.monotonic() - began, 4),
        )
        return envelope

    def _state(self) -> Blocks:
        """Return the model's weights, the optimizer state that is not sharded, and the generators' states as bytes."""
        states = {name: torch.frombuffer(bytearray(blob), dtype=torch.uint8) for name, blob in rng.blobs().items()}
        on_device = {name: held.to(self._device) for name, held in states.items()}
        return [self._subject.weights(), self._subject.unsharded(), on_device]


def _weight_shapes(block: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (held.shape, held.dtype) for name, held in block.items()}


class CheckFreeRebuilder:
    """The stage rebuilder of one rank, as hot-swap calls it.

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
            refuse_common_steps(subject.optimizer)
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
        reset_moments(self._subject.optimizer, begin_anew)
        to = [rank for rank, beside in order.rebuilt.items() if own in beside.there]
        if to:
            blocks = self._blocks.get()
            if self._replicated_ends is not None:
                blocks.append(self._ends())
            lend(sorted(to), self._group(), blocks, envelope)
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
        lent = dict(zip(beside.there, borrow(beside.there, self._group(), self._device), strict=True))
        envelope = lent[beside.there[0]][1]
        if self._replicated_ends is not None:
            self._take_ends({rank: blocks.pop() for rank, (blocks, _) in lent.items()})
        norms = dict(enumerate(envelope["extra"]["checkfree"]["norms"]))
        before, after = norms.get(self._stage - 1), norms.get(self._stage + 1)
        blocks = [None if rank is None else lent[rank][0] for rank in (beside.previous, beside.following)]
        try:
            made = rebuild.rebuild(*blocks, before, after, self._strategy(blocks))
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
        return rebuild.COPY if None in blocks else self._settings.strategy

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
        rebuild.scale(groups, schedule.max_lr, schedule.min_lr, factor)
        schedule.step(increment=0)

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
