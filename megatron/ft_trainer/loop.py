"""The training loop, its steps and their metrics, and evaluation by forward passes only.

The forward step of one microbatch is as megatron-core's schedules call it.
"""

import math
import time
from functools import partial

import torch
import torch.distributed as dist

from ft.base.errors import FtError
from ft.base.step_clock import CLOCK, DATA
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.ft_trainer.arguments import Options
from megatron.ft_trainer.data.loader import Loaders
from megatron.ft_trainer.job import Job, save
from megatron.ft_trainer.logging.runlog import StepReport
from megatron.patches import step_state
from megatron.patches.releases import batch_of_this_context_rank


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


def train_step(job: Job) -> StepReport:
    """Run forward and backward of every microbatch and the optimizer step; advance schedule and ``job.state``."""
    started = time.perf_counter()
    report = _computed(job) if job.protection.begins() else _catch_up(job)
    job.state.step, job.state.consumed_train_samples = report.step, report.consumed_samples
    report.step_time_s = time.perf_counter() - started
    report.tokens_per_s = report.global_batch_size * job.options.data.seq_length / report.step_time_s
    report.grad_norm = None if report.grad_norm is None else float(report.grad_norm)
    report.loss_scale = job.trainee.optimizer.get_loss_scale().item()
    report.of_protections = job.protection.metrics()
    return report


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


def _computed(job: Job) -> StepReport:
    """Compute a step on this rank.

    If operators are verified, the loss is checked for NaN and infinity only after the verification, because before that
    a non-finite loss may be the result of a hardware error.
    """
    report = job.protection.compute(lambda: _update(job))
    if job.verified and job.options.training.check_for_nan_in_loss_and_grad:
        refuse_non_finite(report.loss if parallel_state.is_pipeline_last_stage() else 0.0)
    return report


def _update(job: Job) -> StepReport:
    samples = job.options.training.global_batch_size
    _zero_gradients(job)
    own = job.protection.share(samples)
    reported = run_schedule(job, job.train_loaders, own, forward_only=False) if own else _give_nothing(job)
    return _apply(job, samples, job.protection.reduce(reported))


def _catch_up(job: Job) -> StepReport:
    """Run a step on a rank that has no current state and fetches it from another replica meanwhile.

    The rank contributes zero gradients to the step, and runs the same optimizer update as the other ranks when its
    state has arrived.
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


def _apply(job: Job, samples: int, reported: list[torch.Tensor]) -> StepReport:
    """Run the optimizer step. ``reported``: [loss sum, tokens] of all microbatches, on the last stage."""
    optimizer = job.trainee.optimizer
    job.exits.ask()
    lr = get_canonical_lr_for_logging(optimizer.param_groups) or 0.0
    applied, grad_norm, num_zeros = optimizer.step()
    if applied:
        job.trainee.scheduler.step(increment=samples)
    return StepReport(
        step=job.state.step + 1,
        loss=mean_loss(reported),
        grad_norm=grad_norm,
        lr=lr,
        consumed_samples=job.state.consumed_train_samples + samples,
        global_batch_size=samples,
        applied=applied,
        num_zeros=num_zeros,
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
