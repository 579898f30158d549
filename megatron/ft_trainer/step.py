"""One training step and its metrics; the forward step of one microbatch, as megatron-core's schedules call it."""

import math
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ft.base.errors import FtError
from ft.base.step_clock import CLOCK, DATA
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.ft_trainer.job import Job
from megatron.ft_trainer.loaders import Loaders
from megatron.ft_trainer.logging.runlog import StepReport
from megatron.patches import step_state
from megatron.patches.releases import batch_of_this_context_rank


@dataclass
class Update:
    """The outcome of one training step's optimizer update. ``loss`` is NaN on all but the last pipeline stage."""

    samples: int
    lr: float
    loss: float
    applied: bool
    grad_norm: float | None
    num_zeros: int | None


def train_step(job: Job) -> StepReport:
    """Run forward and backward of every microbatch and the optimizer step; advance schedule and ``job.state``."""
    started = time.perf_counter()
    update = _computed(job) if job.protection.begins() else _catch_up(job)
    job.state.step += 1
    job.state.consumed_train_samples += update.samples
    return _report(job, update, time.perf_counter() - started)


def run_schedule(job: Job, loaders: Loaders, samples: int, *, forward_only: bool) -> list[torch.Tensor]:
    """Run ``samples`` samples, over all data-parallel ranks, through megatron-core's pipeline schedule.

    Returns:
        on the last stage [loss sum, tokens] for each microbatch, on other stages an empty list.
    """
    chunks, interleaved = job.trainee.chunks, job.layout.vpp is not None
    return get_forward_backward_func()(
        forward_step_func=make_forward_step(job.options.training.check_for_nan_in_loss_and_grad and not job.verified),
        data_iterator=loaders if interleaved else loaders[0],
        model=chunks if interleaved else chunks[0],
        num_microbatches=job.microbatches(samples),
        seq_length=job.options.data.seq_length,
        micro_batch_size=job.options.training.micro_batch_size,
        forward_only=forward_only,
    )


def mean_loss(reported: list[torch.Tensor]) -> float:
    """Return the mean over the tokens of all data-parallel ranks; NaN on all but the last pipeline stage."""
    if not reported:
        return float("nan")
    total = torch.stack(reported).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return (total[0] / total[1]).item()


def _computed(job: Job) -> Update:
    """Compute a step on this rank.

    If operators are verified, the loss is checked for NaN and infinity only after the verification, because before that
    a non-finite loss may be the result of a hardware error.
    """
    update = job.protection.compute(lambda: _update(job))
    if job.verified and job.options.training.check_for_nan_in_loss_and_grad:
        refuse_non_finite(update.loss if parallel_state.is_pipeline_last_stage() else 0.0)
    return update


def _update(job: Job) -> Update:
    samples = job.options.training.global_batch_size
    _zero_gradients(job)
    own = job.protection.share(samples)
    reported = run_schedule(job, job.train_loaders, own, forward_only=False) if own else _give_nothing(job)
    return _apply(job, samples, job.protection.reduce(reported))


def _catch_up(job: Job) -> Update:
    """Run the step of a rank that takes its state from other ranks.

    The rank contributes zero gradients while the state is fetched, and then runs the same optimizer update as the other
    ranks.
    """
    _zero_gradients(job)
    job.protection.catching_up()
    reported = job.protection.reduce(_give_nothing(job))
    job.protection.caught_up()
    return _apply(job, job.options.training.global_batch_size, reported)


def _give_nothing(job: Job) -> list[torch.Tensor]:
    """Take part in the gradient exchange with zero gradients, without a forward or backward pass."""
    config = job.trainee.config
    step_state.expect_no_backward(job.trainee.chunks)
    tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
    config.finalize_model_grads_func(job.trainee.chunks, tokens if config.calculate_per_token_loss else None)
    return []


def rehearse(job: Job, samples: int) -> None:
    """Run forward and backward passes and discard the results, so that the first real step has no one-time costs."""
    _zero_gradients(job)
    run_schedule(job, job.train_loaders, samples, forward_only=False)


def _zero_gradients(job: Job) -> None:
    for chunk in job.trainee.chunks:
        chunk.zero_grad_buffer()
    job.trainee.optimizer.zero_grad()


def _apply(job: Job, samples: int, reported: list[torch.Tensor]) -> Update:
    """Run the optimizer step. ``reported``: [loss sum, tokens] of all microbatches, on the last stage."""
    trainee = job.trainee
    job.exits.ask()
    lr = get_canonical_lr_for_logging(trainee.optimizer.param_groups) or 0.0
    applied, grad_norm, num_zeros = trainee.optimizer.step()
    if applied:
        trainee.scheduler.step(increment=samples)
    return Update(samples, lr, mean_loss(reported), applied, grad_norm, num_zeros)


def _report(job: Job, update: Update, seconds: float) -> StepReport:
    tokens = update.samples * job.options.data.seq_length
    return StepReport(
        step=job.state.step,
        loss=update.loss,
        grad_norm=None if update.grad_norm is None else float(update.grad_norm),
        lr=update.lr,
        consumed_samples=job.state.consumed_train_samples,
        global_batch_size=update.samples,
        step_time_s=seconds,
        tokens_per_s=tokens / seconds,
        loss_scale=job.trainee.optimizer.get_loss_scale().item(),
        skipped=not update.applied,
        num_zeros=update.num_zeros,
        of_protections=job.protection.metrics(),
    )


class NonFiniteLossError(FtError):
    """The loss of a microbatch is NaN or infinite: the run has diverged, or a device computes wrong results."""


def make_forward_step(check_finite: bool):
    """Return the forward step for megatron-core's ``forward_backward_func``.

    Args:
        check_finite: whether to raise ``NonFiniteLossError`` on the last stage if a loss is NaN or infinite, before its
            backward pass.
    """

    def forward_step(loader, chunk):
        """Run ``chunk`` on the loader's next microbatch. Stages between the first and the last have no loader.

        Returns:
            (output, loss function): per-token losses [micro batch, sequence] on the last stage, activations before it.
        """
        batch = _on_device(CLOCK.during(DATA, next, loader)) if loader is not None else {}
        output = chunk(
            batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels")
        )
        return output, partial(masked_loss, batch.get("loss_mask"), check_finite=check_finite)

    return forward_step


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor, *, check_finite: bool):
    """Return the sum of the losses of unmasked tokens.

    Args:
        loss_mask: 1 for tokens that count and 0 for others, [micro batch, sequence].
        losses: loss of each token, [micro batch, sequence].
        check_finite: whether to raise ``NonFiniteLossError`` if the sum is NaN or infinite.

    Returns:
        (sum with gradient, number of tokens as int tensor, values to report: [sum, number] as fp32).
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum()
    if check_finite:
        refuse_non_finite(loss.item())
    return loss, tokens.detach().to(torch.int), torch.stack([loss.detach(), tokens])


def refuse_non_finite(loss: float) -> None:
    """Raise NonFiniteLossError for NaN and infinity."""
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the loss of a microbatch is {loss}: training has diverged")


def _on_device(batch: dict) -> dict:
    moved = {name: None if value is None else value.cuda(non_blocking=True) for name, value in batch.items()}
    return batch_of_this_context_rank(moved)
