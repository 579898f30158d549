"""Runs one step of a checkout's trainer within the layers of the protections."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from ft.adapters.megatron_lm import passes, tree
from ft.adapters.megatron_lm.state import EnterLoopAgain, LayerExit, Run
from ft.base.errors import FtError
from ft.protection import fingerprint as fingerprints

_SKIPPED, _GRAD_NORM = 1, 5
_APART = {
    *("rank", "local_rank", "world_size", "iteration", "curr_iteration", "load", "save", "seed", "train_iters"),
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "do_train", "do_valid", "do_test"),
    *("num_floating_point_operations_so_far", "ft_extra", "tensorboard_dir", "wandb_project"),
}
"""Arguments that do not decide which operators a step runs, or that differ between ranks."""


class NonFiniteLossError(FtError):
    """The loss of a step is NaN or infinite, although its operators were verified: training has diverged."""


class Outcome:
    """The result of the checkout's ``train_step``; see :class:`ft.protection.contract.Update`."""

    def __init__(self, result: tuple):
        self.result = result
        loss = result[0].get("lm loss")
        self.loss = math.nan if loss is None else float(loss)
        self.grad_norm = result[_GRAD_NORM]
        self.applied = not result[_SKIPPED]


def take(run: Run, original: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
    """Run a step within the layers, which may repeat the step.

    Raises:
        EnterLoopAgain: a layer has set the position at the beginning of the step.
        NonFiniteLossError: operators are verified, and the loss is not finite.
    """
    _begin(run)
    given = named(original, args, kwargs)
    if run.protections.divides_steps:
        whole = given["forward_backward_func"]
        part = functools.partial(passes.compute_part, run, whole)
        given["forward_backward_func"] = part if run.received is None else run.received.hand_over
    started = {name: timer for name, timer in timers().items() if timer._started}
    run.running_timers = {name: (timer._start_time, timer._elapsed) for name, timer in started.items()}
    compute = run.stack.compute if run.computes else _once
    try:
        outcome = compute(lambda: Outcome(original(**given)))
    finally:
        run.running_timers = run.computes = run.received = None
    if run.checks_loss and outcome.result[0] and not math.isfinite(outcome.loss):
        raise NonFiniteLossError(f"the loss of step {run.step + 1} is {outcome.loss}: training has diverged")
    result = list(outcome.result)
    result[_SKIPPED] = int(not outcome.applied)
    return tuple(result)


def _begin(run: Run) -> None:
    """Begin a step. If this world does not compute it, take over the state of the worlds that do.

    The trainer's loop is entered again if that has set the position, and the step goes on when the loop has come to it.
    """
    if run.computes is None:
        try:
            run.computes = run.stack.begins()
        except SystemExit as end:
            raise LayerExit(end.code) from end
        if not run.computes:
            run.received = passes.catch_up(run)
        if run.is_moved:
            raise EnterLoopAgain(f"the position is now that after step {run.step}")


def _once(work: Callable[[], Outcome]) -> Outcome:
    return work()


def named(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def timers() -> dict[str, Any]:
    """Return the timers of the trainer by name."""
    return tree.module("global_vars").get_timers()._timers


def leave_checks_to_layers(run: Run) -> None:
    """Disable the trainer's check of the loss, and check the loss after the layers that verify operators.

    The trainer would end the run because of a wrong value that a layer is about to compute again.
    """
    if run.protections.intercepts_operators:
        run.checks_loss = run.args.check_for_nan_in_loss_and_grad
        run.args.check_for_nan_in_loss_and_grad = False


def fingerprint(run: Run) -> dict[str, str | int]:
    """Return the fingerprint of the run (:mod:`ft.protection.fingerprint`): property -> value."""
    args = run.args
    return fingerprints.fingerprint(
        {name: str(value) for name, value in vars(args).items() if name not in _APART},
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        dp=args.data_parallel_size,
        ep=args.expert_model_parallel_size,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
    )
