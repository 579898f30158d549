"""The training loop, and evaluation by forward passes only."""

import torch
import torch.distributed as dist

from megatron.ft_trainer.arguments import Options
from megatron.ft_trainer.job import Job, save
from megatron.ft_trainer.loaders import Loaders
from megatron.ft_trainer.step import mean_loss, run_schedule, train_step


def train(job: Job) -> None:
    """Train to the end of the run, or until ``job.ending`` is a reason to end earlier."""
    options, state, last = job.options, job.state, job.options.training.train_iters
    while state.step < last and job.ending is None:
        report = train_step(job)
        job.ending = job.exits.answer(state.step)
        evaluates = job.ending is None and job.valid_loaders and evaluation_is_due(options, state.step, last)
        if evaluates:
            job.protection.at("evaluate")
            report.validation_loss = validate(job)
        job.log.step(report)
        ends = job.ending is not None or state.step == last
        due = save_is_due(options, state.step, ends=ends)
        if job.protection.saves(state.step, is_due=due, ends=ends) or job.checkpointer.owes_a_save:
            job.protection.at("save")
            save(job)
        job.protection.committed()


def evaluation_is_due(options: Options, step: int, last: int) -> bool:
    """Return whether to evaluate after ``step``; ``last`` is the last step of the run."""
    e = options.evaluation
    return e.eval_iters > 0 and (step == last or (e.eval_interval is not None and step % e.eval_interval == 0))


def save_is_due(options: Options, step: int, *, ends: bool) -> bool:
    """Return whether to save a checkpoint after ``step``; ``ends``: whether the run ends with this step."""
    c = options.checkpoint
    return c.save is not None and (ends or (c.save_interval is not None and step % c.save_interval == 0))


def evaluate(job: Job, loaders: Loaders) -> float:
    """Return the mean loss per token over --eval-iters batches from ``loaders``, on every rank."""
    batch = job.options.training.global_batch_size
    reported = []
    _set_training(job, False)
    try:
        with torch.no_grad(), job.trainee.whole_params():
            for _ in range(job.options.evaluation.eval_iters):
                reported += run_schedule(job, loaders, batch, forward_only=True)
    finally:
        _set_training(job, True)
    return _known_to_all(mean_loss(reported), job)


def validate(job: Job) -> float:
    """Evaluate on the next samples of the validation set, log the loss, and advance ``job.state``."""
    loss = evaluate(job, job.valid_loaders)
    samples = job.options.evaluation.eval_iters * job.options.training.global_batch_size
    job.state.consumed_valid_samples += samples
    job.log.evaluation(job.state.step, "validation", loss)
    return loss


def _set_training(job: Job, on: bool) -> None:
    for chunk in job.trainee.chunks:
        chunk.train(on)


def _known_to_all(loss: float, job: Job) -> float:
    """Broadcast a value from the last rank, which is on the last pipeline stage in every order of the grid."""
    value = torch.tensor([loss], dtype=torch.float64, device=torch.cuda.current_device())
    dist.broadcast(value, src=job.layout.world_size - 1)
    return value.item()
