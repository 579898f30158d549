"""One rank of a run of :mod:`checkfree_convergence`: the real trainer, whose stages lose their state between two steps.

What is lost is filled with what no step survives (not-a-number), so nothing but a rebuild can go on from it.
"""

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

PATIENCE = 40
"""Steps after a rebuild in which it is looked whether the loss is back."""


def train(
    flags: str,
    lost: Sequence[tuple[int, int]],
    *,
    every: int,
    straight: bool = False,
    equal: bool = False,
) -> dict[str, Any]:
    """Trains on this rank, one pipeline stage, and loses and rebuilds stages in between. Collective over all ranks.

    Args:
        lost: (committed step, stage) of each failure, in order; no two adjacent stages at the same step.
        every: steps between two looks at the held-out samples.
        straight: with --ft-checkfree-plus, run megatron-core's 1F1B: embedding and head are kept twice as before, and
            no microbatch takes the ends of the pipeline in the other order.
        equal: all stages begin with the first one's blocks.

    Returns:
        ``train``: loss of every step (on the last stage), ``held_out``: (step, loss), ``rebuilt``: one mapping for each
        failure, with held-out losses ``before`` and ``after`` it and the steps until they were ``good_after``, None
        where the run or another failure came before that or ``PATIENCE`` ended.
    """
    began = time.monotonic()
    life = Life(flags, straight, equal)
    losses, looks, rebuilt = [], [], []
    failures = list(lost)
    last, unmended = life.job.options.training.train_iters, None
    for step in range(1, last + 1):
        losses.append(life.step())
        at_risk = bool(failures) and failures[0][0] == step
        if unmended is not None:
            unmended = look_after(unmended, step, life.look())
        if step % every == 0 or step == last:
            looks.append((step, life.look()))
        if not at_risk:
            continue
        before = life.look()
        while failures and failures[0][0] == step:
            stage = failures.pop(0)[1]
            told = life.lose(stage)
            rebuilt.append({"step": step, "stage": stage, **told, "before": before, "good_after": None})
        after = life.look()
        for each in rebuilt:
            if each["step"] == step:
                each["after"] = after
        unmended = rebuilt[-1]
    return {"train": losses, "held_out": looks, "rebuilt": rebuilt, "took_s": round(time.monotonic() - began, 2)}


def look_after(made: dict[str, Any], step: int, loss: float) -> dict[str, Any] | None:
    """Whether the loss is back at what it was; None once there is no more to wait for."""
    passed = step - made["step"]
    if loss <= made["before"]:
        made["good_after"] = passed
        return None
    return made if passed < PATIENCE else None


class Life:
    """The trainer on this rank, and what ft.systems.hot_swap and ft.job.control do around it at a failure."""

    def __init__(self, flags: str, straight: bool, equal: bool):
        import torch.distributed as dist

        from ft.protection.training_state import TrainingState
        from ft.systems.checkfree.layer import settings_of
        from ft.systems.checkfree.rebuilder import CheckFreeRebuilder, PositionWithNorms
        from megatron.training.position import JobPosition
        from megatron.training.trainer import JobTrainer

        self.job, ends = _assemble(flags, straight)
        trainee = self.job.trainee
        if equal:
            _equalize(trainee)
        self._rank, self._stages = dist.get_rank(), dist.get_world_size()
        self._told: list[dict] = []
        session = SimpleNamespace(rank=self._rank, observe=lambda name, **detail: self._told.append(detail))
        self._subject = TrainingState(trainee.chunks, trainee.optimizer, trainee.scheduler)
        settings = settings_of(self.job.options.fault_tolerance, JobTrainer(self.job), ends)
        self._keeper = CheckFreeRebuilder(session, self._subject, settings)
        self._position = PositionWithNorms(JobPosition(self.job), self._keeper)
        self._held_out = None

    def step(self) -> float:
        """Loss of one committed step; not-a-number on all stages but the last."""
        from megatron.training.step import train_step

        report = train_step(self.job)
        self._keeper.committed(self.job.state.step)
        return report.loss

    def look(self) -> float:
        """Loss on always the same held-out samples, in the pipeline's own order; known to every rank."""
        from megatron.training.evaluate import evaluate

        if self._held_out is None:
            self._held_out = list(_batches(self.job))
        return evaluate(self.job, [iter(self._held_out) if self._held_out else None])

    def lose(self, stage: int) -> dict[str, Any]:
        """Throws the state of ``stage`` away and has it rebuilt; says how, and how long it took on this rank."""
        import torch.distributed as dist

        from ft.job.messages import Neighbours, Repair

        step, began = self.job.state.step, time.monotonic()
        beside = Neighbours(stage - 1 if stage else None, stage + 1 if stage + 1 < self._stages else None)
        order = Repair(1, step, [], [], {}, {}, {str(stage): beside})
        self._subject.abandon_step()
        self._told.clear()
        if self._rank == stage:
            self._destroy()
            position, _ = self._keeper.rebuild(step, beside)
        else:
            position = self._position.get()
            self._keeper.lend(order, self._subject.state(position).envelope)
        self._subject.publish_parameters()
        self._position.set(position)
        self._keeper.learn(order)
        seconds = time.monotonic() - began
        found = [{key: each[key] for key in ("strategy", "weights")} for each in self._told if "weights" in each]
        everybody: list[Any] = [None] * self._stages
        dist.all_gather_object(everybody, found)
        return {**everybody[stage][0], "seconds": round(seconds, 4)}

    def _destroy(self) -> None:
        """A replaced worker has nothing of the old one. Embedding and head have a copy next door, or are none of this
        stage's: without CheckFree+ the ends are never lost."""
        import random

        import numpy
        import torch

        nan, trainee = float("nan"), self.job.trainee
        for param in trainee.chunks[0].parameters():
            param.data.fill_(nan)
        for section in self._subject.state(self._position.get()).sections().values():
            for tensor in section.values():
                tensor.fill_(nan if tensor.is_floating_point() else 0)
        for group in trainee.optimizer.param_groups:
            group["lr"] = 0.0
        trainee.scheduler.num_steps = 0
        self.job.state.step = self.job.state.consumed_train_samples = 0
        self._keeper.keep({"norms": [None] * self._stages})
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)


def _assemble(flags: str, straight: bool):
    import torch.distributed as dist

    from ft.protection.stack import Protections
    from ft.systems.checkfree.layer import SwappedEnds, SwappedModelEnds
    from megatron import patches
    from megatron.patches.manifest import WITH_CHECKFREE, WITH_SWAPPED_ENDS
    from megatron.training import pretrain
    from megatron.training.arguments import check, parse
    from megatron.training.initialize import init_model_parallel

    options = parse(flags)
    plus = options.fault_tolerance.ft_checkfree_plus
    patches.apply(WITH_CHECKFREE, *([WITH_SWAPPED_ENDS] if plus else []))
    layout = check(options, dist.get_world_size(), has_te=False)
    init_model_parallel(options.parallel, layout, ends_are_double=plus)
    if straight:
        SwappedModelEnds.connected = _keep_order
    protections = Protections.of(options.fault_tolerance, {})
    job = pretrain.assemble(options, layout, time.monotonic(), protections)
    return job, next((each.replicated for each in protections if isinstance(each, SwappedEnds)), None)


def _keep_order(ends: Any, chunk: Any) -> None:
    """Runs 1F1B in the place of the schedule with swapped ends."""
    from ft.systems.checkfree.plus.install import install
    from ft.systems.schedule.kinds import one_f_one_b
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    install(chunk, ends.replicated, lambda microbatches: one_f_one_b(stages, microbatches))


def _equalize(trainee: Any) -> None:
    import torch.distributed as dist

    from ft.systems.checkfree.blocks import StageBlocks

    for block in StageBlocks(trainee.chunks, whole=False).get():
        for held in block.values():
            dist.broadcast(held, 0)
    trainee.optimizer.reload_model_params()


def _batches(job: Any) -> Iterator[Any]:
    """The first held-out microbatches, as many as one evaluation takes; none on a stage that sees no tokens."""
    options, loader = job.options, job.valid_loaders[0]
    samples = options.evaluation.eval_iters * options.training.global_batch_size
    if loader is not None:
        for _ in range(job.microbatches(samples)):
            yield next(loader)
