"""Evaluation of the model on the validation or test data, by forward passes only."""

import torch
import torch.distributed as dist

from megatron.ft_trainer.job import Job
from megatron.ft_trainer.loaders import Loaders
from megatron.ft_trainer.step import mean_loss, run_schedule


def evaluate(job: Job, loaders: Loaders) -> float:
    """Return the mean loss per token over --eval-iters batches from ``loaders``, on every rank."""
    batch = batch_size(job)
    reported = []
    _set_training(job, False)
    try:
        with torch.no_grad(), job.trainee.whole_params():
            for _ in range(job.options.evaluation.eval_iters):
                reported += run_schedule(job, loaders, batch, forward_only=True)
    finally:
        _set_training(job, True)
    return _known_to_all(mean_loss(reported), job)


def batch_size(job: Job) -> int:
    """Return the number of samples in a batch of an evaluation."""
    return job.options.evaluation.eval_global_batch_size or job.options.training.global_batch_size


def validate(job: Job) -> float:
    """Evaluate on the next samples of the validation set, log the loss, and advance ``job.state``."""
    loss = evaluate(job, job.valid_loaders)
    samples = job.options.evaluation.eval_iters * batch_size(job)
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
