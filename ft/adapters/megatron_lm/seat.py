"""Lets a worker join the run: refuses options that cannot be protected, and obtains the worker's logical rank."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ft.adapters.megatron_lm import refusals, tree
from ft.adapters.megatron_lm.iterators import prepare
from ft.adapters.megatron_lm.state import Run
from ft.base.errors import UserError
from megatron import patches


def take_seat(run: Run, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attach to the run, make the default process group, and let the checkout make the others.

    A standby waits here for a rank. By then it has imported its modules, parsed its arguments and built its tokenizer
    and, because the index of mock datasets is not stored in a file, also mock datasets.
    """
    run.args = own = tree.module("global_vars").get_args()
    is_standby = bool(os.environ.get("FT_STANDBY"))
    with refusing(speaks=own.rank == 0):
        asked = run.protections
        found = refusals.of_arguments(
            own, asked.entries, intercepts_operators=asked.intercepts_operators, divides_steps=asked.divides_steps
        )
        refusals.refuse(found)
    if not run.protections.joins_run:
        run.protections.connected(None)
        return original(*args, **kwargs)
    if is_standby and own.mock_data and own.train_iters:
        prepare(run.provider)
    with refusing():
        from ft.worker.session import attach

        run.session = session = attach(settings={"arguments": run.arguments})
        platform = patches.platform()
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
