"""One rank of a run of :mod:`checkfree_convergence`: the real trainer, whose stages lose their state between two steps.

Lost state is filled with NaN, which no step survives, so that only a rebuild allows training to continue.
"""

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

PATIENCE = 40
"""Number of steps after a rebuild during which the script checks whether the loss has recovered."""


def train(
    flags: str,
    lost: Sequence[tuple[int, int]],
    *,
    every: int,
    straight: bool = False,
    equal: bool = False,
) -> dict[str, Any]:
    """Train on this rank, one pipeline stage, and lose and rebuild stages in between. Collective over all ranks.

    Args:
        flags: flags of the trainer.
        lost: (committed step, stage) of each failure, in order; no two adjacent stages at the same step.
        every: steps between two evaluations on the held-out samples.
        straight: with --ft-checkfree-plus, run megatron-core's 1F1B: embedding and head are still replicated, but no
            microbatch takes the ends of the pipeline in swapped order.
        equal: whether all stages start with the first stage's blocks.

    Returns:
        ``train``: loss of every step (on the last stage); ``held_out``: (step, loss); ``rebuilt``: one mapping for each
        failure, with the held-out losses ``before`` and ``after`` it, and ``good_after``: the number of steps until the
        loss had recovered, None if the end of the run, another failure or the end of ``PATIENCE`` came before.
    """
    began = time.monotonic()
    life = InProcessTrainer(flags, straight, equal)
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
            found = life.lose(stage)
            rebuilt.append({"step": step, "stage": stage, **found, "before": before, "good_after": None})
        after = life.look()
        for each in rebuilt:
            if each["step"] == step:
                each["after"] = after
        unmended = rebuilt[-1]
    return {"train": losses, "held_out": looks, "rebuilt": rebuilt, "took_s": round(time.monotonic() - began, 2)}


def look_after(made: dict[str, Any], step: int, loss: float) -> dict[str, Any] | None:
    """Check whether the loss has recovered; return ``made``, or None once there is nothing more to wait for."""
    passed = step - made["step"]
    if loss <= made["before"]:
        made["good_after"] = passed
        return None
    return made if passed < PATIENCE else None


class InProcessTrainer:
    """The trainer on this rank, with what ft.systems.hot_swap and ft.job.control would do around it at a failure."""

    def __init__(self, flags: str, straight: bool, equal: bool):
        import torch.distributed as dist

        from ft.protection.training_state import TrainingState
        from ft.systems.checkfree.layer import settings_of
        from ft.systems.checkfree.rebuilder import CheckFreeRebuilder, PositionWithNorms
        from megatron.ft_trainer.trainer import JobPosition, JobTrainer

        self.job, ends = _assemble(flags, straight)
        trainee = self.job.trainee
        if equal:
            _equalize(trainee)
        self._rank, self._stages = dist.get_rank(), dist.get_world_size()
        self._observed: list[dict] = []
        session = SimpleNamespace(rank=self._rank, observe=lambda name, **detail: self._observed.append(detail))
        self._subject = TrainingState(trainee.chunks, trainee.optimizer, trainee.scheduler)
        settings = settings_of(self.job.options.fault_tolerance, JobTrainer(self.job), ends)
        self._keeper = CheckFreeRebuilder(session, self._subject, settings)
        self._position = PositionWithNorms(JobPosition(self.job), self._keeper)
        self._held_out = None

    def step(self) -> float:
        """Run one committed step and return its loss; NaN on all stages but the last."""
        from megatron.ft_trainer.step import train_step

        report = train_step(self.job)
        self._keeper.committed(self.job.state.step)
        return report.loss

    def look(self) -> float:
        """Return the loss on a fixed set of held-out samples, in the pipeline's normal order, on every rank."""
        from megatron.ft_trainer.loop import evaluate

        if self._held_out is None:
            self._held_out = list(_batches(self.job))
        return evaluate(self.job, [iter(self._held_out) if self._held_out else None])

    def lose(self, stage: int) -> dict[str, Any]:
        """Destroy the state of ``stage`` and have it rebuilt; return how, and how long it took on this rank."""
        import torch.distributed as dist

        from ft.job.messages import Neighbours, Repair

        step, began = self.job.state.step, time.monotonic()
        beside = Neighbours(stage - 1 if stage else None, stage + 1 if stage + 1 < self._stages else None)
        order = Repair(1, step, [], [], {}, {}, {str(stage): beside})
        self._subject.abandon_step()
        self._observed.clear()
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
        found = [{key: each[key] for key in ("strategy", "weights")} for each in self._observed if "weights" in each]
        everybody: list[Any] = [None] * self._stages
        dist.all_gather_object(everybody, found)
        return {**everybody[stage][0], "seconds": round(seconds, 4)}

    def _destroy(self) -> None:
        """Destroy all state of this rank, as in a replaced worker. Embedding and head have a copy on a neighbour stage,
        or are not on this stage: without CheckFree+ the ends are never lost."""
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
    from megatron.ft_trainer import pretrain
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel
    from megatron.patches.manifest import WITH_CHECKFREE, WITH_SWAPPED_ENDS

    options = parse(flags)
    plus = options.fault_tolerance.ft_checkfree_plus
    patches.apply(WITH_CHECKFREE, *([WITH_SWAPPED_ENDS] if plus else []))
    layout = check(options, dist.get_world_size(), has_te=False)
    init_model_parallel(options.core, layout, replicates_ends=plus)
    if straight:
        SwappedModelEnds.connected = _keep_order
    protections = Protections.of(options.fault_tolerance, {})
    job = pretrain.assemble(options, layout, time.monotonic(), protections)
    return job, next((each.replicated for each in protections if isinstance(each, SwappedEnds)), None)


def _keep_order(ends: Any, chunk: Any) -> None:
    """Run 1F1B instead of the schedule with swapped ends."""
    from ft.systems.checkfree.plus.pipeline import install
    from ft.systems.schedule.kinds import one_f_one_b
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    install(chunk, ends.replicated, lambda microbatches: one_f_one_b(stages, microbatches))


def _equalize(trainee: Any) -> None:
    import torch.distributed as dist

    from ft.systems.checkfree.rebuilder import StageBlocks

    for block in StageBlocks(trainee.chunks, whole=False).get():
        for held in block.values():
            dist.broadcast(held, 0)
    trainee.optimizer.reload_model_params()


def _batches(job: Any) -> Iterator[Any]:
    """Yield the held-out microbatches of one evaluation; none on a stage that reads no tokens."""
    options, loader = job.options, job.valid_loaders[0]
    samples = options.evaluation.eval_iters * options.training.global_batch_size
    if loader is not None:
        for _ in range(job.microbatches(samples)):
            yield next(loader)
