"""Wraps the hooks of a checkout (:mod:`ft.adapters.megatron_lm.hooks`) in a process that has imported its modules.

Options that cannot be protected are refused when the worker joins the run and obtains its logical rank.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft.adapters.megatron_lm import refusals, state, step, trainer, tree
from ft.adapters.megatron_lm.hooks import split
from ft.adapters.megatron_lm.iterators import Iterators, prepare
from ft.adapters.megatron_lm.state import CheckoutRun, EnterLoopAgain, LayerExit, StepLog
from ft.base.errors import UserError
from megatron import patches
from megatron.core import parallel_state
from megatron.patches import step_state
from megatron.patches.replace import replace


def take_seat(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attach to the run, make the default process group, and let the checkout make the others.

    A standby waits here for a rank. By then it has imported its modules, parsed its arguments and built its tokenizer
    and, because the index of mock datasets is not stored in a file, also mock datasets.
    """
    run.args = own = tree.module("global_vars").get_args()
    is_standby = bool(os.environ.get("FT_STANDBY"))
    asked = run.protections
    with refusing(speaks=own.rank == 0):
        how = {"intercepts_operators": asked.intercepts_operators, "divides_steps": asked.divides_steps}
        if found := list(refusals.of_arguments(own, asked.entries, **how)):
            raise UserError.of(found)
    if not run.protections.joins_run:
        run.protections.connected(None)
        return original(*args, **kwargs)
    if is_standby and own.mock_data and own.train_iters:
        prepare(run.provider)
    with refusing():
        from ft.worker.session import attach

        platform = patches.platform()
        run.session = session = attach(settings={"arguments": run.arguments}, select=platform.select_device)
        session.take_device(platform.select_device)
        session.init_process_group(platform.choose_backend(None if platform.name == "cpu" else own.distributed_backend))
        own.rank, own.world_size, own.local_rank = session.rank, session.world_size, session.local_rank
        run.protections.connected(session)
    if is_standby:
        _make_writers(own)
    return original(*args, **kwargs)


def _make_writers(own: Any) -> None:
    """Make the log writers (such as TensorBoard's) that only the last rank has. The rank has to be known."""
    global_vars = tree.module("global_vars")
    global_vars._set_tensorboard_writer(own)
    global_vars._set_wandb_writer(own)
    global_vars._set_one_logger(own)


@contextmanager
def refusing(speaks: bool = True) -> Iterator[None]:
    """Return a context that ends the process with exit code 2 on a UserError, and prints the error if ``speaks`` is
    True.
    """
    try:
        yield
    except UserError as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error


_TRAINING = "megatron.training.training"


def install(run: CheckoutRun, metrics: Path | None) -> None:
    """Wrap every hook in a process that trains with the protections ``run.protections``.

    Args:
        metrics: the file that gets a line for each step; None: there is none.
    """
    initialize, training = tree.module("initialize"), tree.module("training")
    split(training.pretrain, "train", functools.partial(_begin, run), functools.partial(_repeat, run, metrics))
    run.iterators = Iterators(training)
    replace(_TRAINING, "build_train_valid_test_datasets", run.iterators.datasets)
    replace(_TRAINING, "build_pretraining_data_loader", run.iterators.loader)
    _around(training, "build_train_valid_test_data_iterators", run, _make_iterators)
    _around(initialize, "_initialize_distributed", run, take_seat)
    _around(tree.module("checkpointing"), "check_checkpoint_args", run, _load_extra)
    for name, wrapper in (
        ("setup_model_and_optimizer", _set_up),
        ("train_step", step.take),
        ("training_log", _logged),
        ("checkpoint_and_decide_exit", _committed),
        ("evaluate_and_print_results", _evaluates),
        ("evaluate", _evaluated),
        ("save_checkpoint", _saves),
    ):
        _around(training, name, run, wrapper)


def _around(module: Any, name: str, run: CheckoutRun, wrapper: Callable[..., Any]) -> None:
    """Replace the function ``module.name`` by one that calls ``wrapper(run, original, ...)`` with its own arguments."""
    original = getattr(module, name)
    replace(module.__name__, name, functools.wraps(original)(functools.partial(wrapper, run, original)))


def _begin(run: CheckoutRun, given: dict[str, Any]) -> None:
    run.provider, run.forward_step = given["train_valid_test_dataset_provider"], given["forward_step_func"]


def _set_up(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build model, optimizer and learning-rate schedule.

    A worker that takes its state from other workers does not load a checkpoint. It initialises its weights like any
    other worker, because otherwise megatron-core would not mark the parameters that are split over tensor-parallel
    ranks.
    """
    own = run.args
    step.leave_checks_to_layers(run)
    own.ft_extra = run.extra  # the checkout writes all of its arguments into its checkpoints
    kept = own.load, own.pretrained_checkpoint
    if run.protections.is_given_state:
        own.load = own.pretrained_checkpoint = None
    run.chunks, run.optimizer, run.scheduler = original(*args, **kwargs)
    own.load, own.pretrained_checkpoint = kept
    context = step.named(original, args, kwargs).get("checkpointing_context")
    run.checkpointing_context = {} if context is None else context
    return run.chunks, run.optimizer, run.scheduler


def _load_extra(run: CheckoutRun, original: Callable[..., Any], checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the values that the layers keep in a checkpoint's arguments, when the checkout checks these arguments."""
    run.extra.clear()
    run.extra.update(getattr(checkpoint_args, "ft_extra", {}))
    return original(checkpoint_args, *args, **kwargs)


def _make_iterators(run: CheckoutRun, original: Callable[..., Any], provider: Any) -> tuple:
    """Make the iterators of a model chunk.

    A worker that takes its state from other workers makes its iterators again when it has the state. Therefore its
    first iterators start no processes.
    """
    if run.protections.divides_steps and not run.iterators.is_divided:
        own, block = run.args, run.args.micro_batch_size * parallel_state.get_data_parallel_world_size()
        share = run.protections.share(run.extra, own.iteration, own.consumed_train_samples, block)
        run.iterators.divide(share, block, Path(os.environ["FT_HSDP_RUN_DIR"]) / ".datasets.lock")
    workers = run.args.num_workers
    run.args.num_workers = 0 if run.protections.is_given_state else workers
    made = run.iterators.make(provider)
    run.args.num_workers = workers
    return made


def _repeat(run: CheckoutRun, metrics: Path | None, rest: Callable[[], None]) -> None:
    """Call ``rest``, and call it again after every recovery, until training is over; then end this worker's session.

    Args:
        rest: the last part of the trainer's main function: training, the last save and the evaluations.

    Raises:
        SystemExit: the trainer ends with an exit code of its own.
    """
    args = run.args
    run.step = run.first_step = args.iteration
    run.flops, run.samples = args.num_floating_point_operations_so_far, args.consumed_train_samples
    run.earlier_samples = run.samples
    writes = dist.get_rank() == dist.get_world_size() - 1
    with refusing():
        first = args.train_iters if run.protections.is_given_state else run.step
        run.log = StepLog(metrics if writes else None, first)
        _stack(run)
    code = run.stack.run_with_recovery(functools.partial(_work, run, rest))
    run.log.close()
    if run.session is not None:
        run.session.close()
    if code is not None:
        raise SystemExit(code)


def _stack(run: CheckoutRun) -> None:
    """Build the layers of the protections, and pass their function for the reduction of gradients to the trainer's
    loop.
    """
    run.config.finalize_model_grads_func = tree.module("training").finalize_model_grads
    run.stack = run.protections.stack(trainer.CheckoutTrainer(run))
    run.protections.ends_as(functools.partial(_outcome, run))
    replace(_TRAINING, "finalize_model_grads", run.config.finalize_model_grads_func)


def _work(run: CheckoutRun, rest: Callable[[], None]) -> int | str | None:
    """Call ``rest``, again if a layer has set the position meanwhile; return the exit code with which the trainer ends,
    None if ``rest`` returns.
    """
    run.computes = run.received = None
    while run.exit_code is None:  # it is known if a failure has followed the step that ends the run
        run.is_moved = False
        try:
            rest()
        except EnterLoopAgain:
            continue
        except LayerExit as end:
            raise SystemExit(end.code) from end
        except SystemExit as end:
            return 0 if end.code is None else end.code
        return None
    return run.exit_code


def _logged(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Log a step of the trainer. The first step after a recovery continues with the sums from before the recovery."""
    given = step.named(original, args, kwargs)
    if not run.is_entered:
        run.is_entered, run.live_sums = True, given["total_loss_dict"]
        run.live_sums.update(state.decode(run.sums, run.device))
    given["report_memory_flag"] = given["report_memory_flag"] and run.reports_memory
    given["is_first_iteration"] = given["iteration"] == run.first_step + 1
    if run.log.writes:
        _log(run, given)
    run.reports_memory = original(**given)
    return run.reports_memory


def _log(run: CheckoutRun, given: dict[str, Any]) -> None:
    """Write the values of a step that the trainer is about to log into the metrics file."""
    losses = {name: value.item() for name, value in given["loss_dict"].items() if value.numel() == 1}
    run.log.add(
        loss=losses.pop("lm loss", None),
        grad_norm=_number(given["grad_norm"]),
        lr=given["learning_rate"],
        consumed_samples=run.args.consumed_train_samples,
        global_batch_size=run.args.consumed_train_samples - run.samples,
        loss_scale=given["loss_scale"],
        skipped=bool(given["skipped_iter"]),
        num_zeros=_number(given["num_zeros_in_grad"]) if run.args.log_num_zeros_in_grad else None,
        params_norm=_number(given["params_norm"]),
        **{name.replace(" ", "_"): value for name, value in losses.items()},
    )


def _number(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value


def _committed(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Do the last work of an iteration, and commit its step.

    Raises:
        EnterLoopAgain: a layer has set the position.
    """
    given, own = step.named(original, args, kwargs), run.args
    ends = original(*args, **kwargs) or run.is_ended
    run.step, run.flops = given["iteration"], given["num_floating_point_operations_so_far"]
    run.samples, run.earlier_samples = own.consumed_train_samples, run.samples
    run.sums, run.counts = state.encode(run.live_sums), trainer.counts()
    run.exit_code = 0 if ends else None
    run.log.commit(run.step, (run.samples - run.earlier_samples) * own.seq_length)
    run.stack.committed()
    if run.is_moved:
        # With --overlap-param-gather the loop's first iteration relies on parameters that are gathered already.
        step_state.publish_parameters(run.chunks, run.optimizer)
        raise EnterLoopAgain(f"the position is now that after step {run.step}")
    return ends


def _evaluates(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run.stack.at("evaluate")
    return original(*args, **kwargs)


def _evaluated(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Evaluate, and log the loss of an evaluation during training."""
    result = original(*args, **kwargs)
    losses = result[0] or {}
    if "lm loss" in losses:
        run.log.add(validation_loss=losses["lm loss"].item())
    return result


def _saves(run: CheckoutRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save, if this rank takes part in the checkpoint; with --async-save, return when the checkpoint is complete."""
    if run.stack is None:
        return original(*args, **kwargs)
    iteration = step.named(original, args, kwargs)["iteration"]
    ends = iteration >= run.args.train_iters
    if not run.stack.saves(iteration, is_due=True, ends=ends):
        return None
    run.stack.at("save")
    with trainer.reported(run, iteration, ends or run.is_ended or bool(trainer.signal_of(run))):
        result = original(*args, **kwargs)
        if run.args.async_save:
            trainer.finish()
    return result


def _outcome(run: CheckoutRun) -> dict[str, str | int]:
    """Return how training has ended: the fields of :class:`ft.job.messages.WorkerDone`, as far as they apply."""
    early = trainer.signal_of(run) if run.step < run.args.train_iters else ""
    return {"early": early, "steps": run.args.train_iters} if early else {}
