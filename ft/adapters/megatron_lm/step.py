"""Runs one step of a checkout's trainer within the layers of the protections.

Several worlds may compute a step together: each computes a part of the samples. The checkout's ``train_step`` gets its
function for the passes as an argument, ``forward_backward_func``. The functions here are passed to it instead.
Everything else in a step, such as the sample counters and the learning-rate schedule, counts the global batch, as if
one world computed it."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.state import CheckoutRun, EnterLoopAgain, LayerExit
from ft.base.errors import FtError, UserError
from ft.protection import training_state
from megatron.core import parallel_state
from megatron.patches import step_state

Losses = list[dict[str, torch.Tensor]]
"""For each microbatch, name -> [loss sum, number of tokens]; empty on all pipeline stages but the last."""


@dataclass(frozen=True)
class Received:
    """What the exchange of gradients has given to a world that computed none, until the optimizer's step uses it.

    Attributes:
        losses: the losses of the other worlds.
        run: the run whose gradients they are.
        gradients: copies of all gradients in host memory. The trainer clears its gradients when it begins the step in
            which they are used.
    """

    losses: Losses
    run: CheckoutRun
    gradients: list[torch.Tensor]

    def hand_over(self, **_: Any) -> Losses:
        """Restore the gradients and return the losses, in place of forward and backward passes."""
        for live, copy in zip(step_state.gradients(self.run.chunks), self.gradients, strict=True):
            live.copy_(copy)
        return self.losses


def compute_part(run: CheckoutRun, original: Callable[..., Losses], **given: Any) -> Losses:
    """Run the passes of this world's part of the step, and return the losses of all worlds.

    Args:
        original: the checkout's ``forward_backward_func``.
    """
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    samples = get_current_global_batch_size()
    own = run.stack.share(samples)
    given["num_microbatches"] = given["num_microbatches"] * own // samples
    return _of_all_worlds(run, original(**given) if own else _compute_nothing(run))


def catch_up(run: CheckoutRun) -> Received:
    """Take over the state of another world, while zero gradients are exchanged. The trainer's position is set to it."""
    _clear_gradients(run)
    run.stack.catching_up()
    losses = _of_all_worlds(run, _compute_nothing(run))
    gradients = [tensor.to("cpu", copy=True) for tensor in step_state.gradients(run.chunks)]
    run.stack.caught_up()
    return Received(losses, run, gradients)


def rehearse(run: CheckoutRun, samples: int) -> None:
    """Run forward and backward passes before the trainer's loop is entered, and discard the results.

    Args:
        samples: number of samples, over all data-parallel ranks of this world.
    """
    own, config, several = run.args, run.config, len(run.chunks) > 1
    iterators = run.iterators.training
    _clear_gradients(run)
    if own.overlap_grad_reduce:  # as the trainer's loop sets it, and expects to find it unset
        contexts = [chunk.no_sync for chunk in run.chunks]
        config.no_sync_func = contexts if several else contexts[0]
    losses = tree.module("training").get_forward_backward_func()(
        forward_step_func=run.forward_step,
        data_iterator=iterators if several else iterators[0],
        model=run.chunks,
        num_microbatches=samples // (own.micro_batch_size * parallel_state.get_data_parallel_world_size()),
        seq_length=own.seq_length,
        micro_batch_size=own.micro_batch_size,
        decoder_seq_length=own.decoder_seq_length,
        forward_only=False,
    )
    config.no_sync_func = None
    _note_name(run, losses)


def _clear_gradients(run: CheckoutRun) -> None:
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()


def _compute_nothing(run: CheckoutRun) -> Losses:
    """Exchange zero gradients, without a forward or backward pass."""
    step_state.expect_no_backward(run.chunks)
    tokens = torch.zeros([], dtype=torch.int, device=run.device)
    run.config.finalize_model_grads_func(run.chunks, tokens if run.config.calculate_per_token_loss else None)
    return []


def _of_all_worlds(run: CheckoutRun, losses: Losses) -> Losses:
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return losses
    _note_name(run, losses)
    return [{run.loss_name: total} for total in run.stack.reduce([each[run.loss_name] for each in losses])]


def _note_name(run: CheckoutRun, losses: Losses) -> None:
    if losses:
        run.loss_name = loss_name(losses)


def loss_name(reports: Sequence[Any]) -> str:
    """Return the name of the loss that the script's loss function reports.

    Args:
        reports: what it has reported for each microbatch, of at least one.

    Raises:
        UserError: it does not report exactly one loss as a tensor [sum, number of tokens], under the same name for
            every microbatch.
    """
    names = [next(iter(report)) if _is_one_loss(report) else None for report in reports]
    if names[0] is None or set(names) != {names[0]}:
        shown = "; ".join(dict.fromkeys(map(_shown, reports)))
        problem = f"the loss function reports {shown}; replicas add up one loss, a tensor [sum, number of tokens]"
        raise UserError(problem, "report the loss as pretrain_gpt.py does, or train without replicas")
    return names[0]


def _is_one_loss(report: Any) -> bool:
    values = list(report.values()) if isinstance(report, dict) else []
    return len(values) == 1 and torch.is_tensor(values[0]) and values[0].numel() == 2


def _shown(report: Any) -> str:
    values = report if isinstance(report, dict) else {"a value that is no dict": report}
    kinds = (
        f"{value.numel()} numbers" if torch.is_tensor(value) else f"a {type(value).__name__}"
        for value in values.values()
    )
    return ", ".join(f"{name} ({kind})" for name, kind in zip(values, kinds, strict=True)) or "nothing"


_SKIPPED, _GRAD_NORM = 1, 5
_APART = {
    *("rank", "local_rank", "world_size", "iteration", "curr_iteration", "load", "save", "seed", "train_iters"),
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "do_train", "do_valid", "do_test"),
    *("num_floating_point_operations_so_far", "ft_extra", "tensorboard_dir", "wandb_project"),
}
"""Arguments that do not decide which operators a step runs, or that differ between ranks."""


class NonFiniteLossError(FtError):
    """The loss of a step is NaN or infinite, although its operators were verified: training has diverged."""


class StepResult:
    """The result of the checkout's ``train_step``; see :class:`ft.protection.contract.Update`."""

    def __init__(self, result: tuple):
        self.result = result
        loss = result[0].get("lm loss")
        self.loss = math.nan if loss is None else float(loss)
        self.grad_norm = result[_GRAD_NORM]
        self.applied = not result[_SKIPPED]


def take(run: CheckoutRun, original: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
    """Run a step within the layers, which may repeat the step.

    Raises:
        EnterLoopAgain: a layer has set the position at the beginning of the step.
        NonFiniteLossError: operators are verified, and the loss is not finite.
    """
    _begin(run)
    given = named(original, args, kwargs)
    if run.protections.divides_steps:
        whole = given["forward_backward_func"]
        part = functools.partial(compute_part, run, whole)
        given["forward_backward_func"] = part if run.received is None else run.received.hand_over
    started = {name: timer for name, timer in timers().items() if timer._started}
    run.running_timers = {name: (timer._start_time, timer._elapsed) for name, timer in started.items()}
    compute = run.stack.compute if run.computes else _once
    try:
        outcome = compute(lambda: StepResult(original(**given)))
    finally:
        run.running_timers = run.computes = run.received = None
    if run.checks_loss and outcome.result[0] and not math.isfinite(outcome.loss):
        raise NonFiniteLossError(f"the loss of step {run.step + 1} is {outcome.loss}: training has diverged")
    result = list(outcome.result)
    result[_SKIPPED] = int(not outcome.applied)
    return tuple(result)


def _begin(run: CheckoutRun) -> None:
    """Begin a step. If this world does not compute it, take over the state of the worlds that do.

    The trainer's loop is entered again if that has set the position, and the step goes on when the loop has come to it.
    """
    if run.computes is None:
        try:
            run.computes = run.stack.begins()
        except SystemExit as end:
            raise LayerExit(end.code) from end
        if not run.computes:
            run.received = catch_up(run)
        if run.is_moved:
            raise EnterLoopAgain(f"the position is now that after step {run.step}")


def _once(work: Callable[[], StepResult]) -> StepResult:
    return work()


def named(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def timers() -> dict[str, Any]:
    """Return the timers of the trainer by name."""
    return tree.module("global_vars").get_timers()._timers


def leave_checks_to_layers(run: CheckoutRun) -> None:
    """Disable the trainer's check of the loss, and check the loss after the layers that verify operators.

    The trainer would end the run because of a wrong value that a layer is about to compute again.
    """
    if run.protections.intercepts_operators:
        run.checks_loss = run.args.check_for_nan_in_loss_and_grad
        run.args.check_for_nan_in_loss_and_grad = False


def fingerprint(run: CheckoutRun) -> dict[str, str | int]:
    """Return the fingerprint of the run (:func:`ft.protection.training_state.fingerprint`): property -> value."""
    args = run.args
    return training_state.fingerprint(
        {name: str(value) for name, value in vars(args).items() if name not in _APART},
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        dp=args.data_parallel_size,
        ep=args.expert_model_parallel_size,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
    )
