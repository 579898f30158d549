"""A worker's way into the run: what cannot be protected is refused, and the worker takes its logical rank."""

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

    A standby waits here for a rank: its modules are imported, its arguments parsed and its tokenizer built. Mock
    data sets, whose index is stored nowhere, are built, too.
    """
    run.args = own = tree.module("global_vars").get_args()
    is_standby = bool(os.environ.get("FT_STANDBY"))
    with refusing(speaks=own.rank == 0):
        refusals.refuse(refusals.of_arguments(own, run.protections.follows_operators))
    if not run.protections.joins_run:
        run.protections.connected(None)
        return original(*args, **kwargs)
    if is_standby and own.mock_data and own.train_iters:
        prepare(run.provider)
    with refusing():
        from ft.worker.session import attach

        run.session = session = attach(settings={"arguments": run.arguments})
        platform = patches.platform()
        platform.select_device(session.local_rank)
        session.init_process_group(platform.choose_backend(None if platform.name == "cpu" else own.distributed_backend))
        own.rank, own.world_size, own.local_rank = session.rank, session.world_size, session.local_rank
        run.protections.connected(session)
    if is_standby:
        _make_writers(own)
    return original(*args, **kwargs)


def _make_writers(own: Any) -> None:
    """Make the writers that only the last rank has, now that the rank is known."""
    global_vars = tree.module("global_vars")
    global_vars._set_tensorboard_writer(own)
    global_vars._set_wandb_writer(own)
    global_vars._set_one_logger(own)


@contextmanager
def refusing(speaks: bool = True) -> Iterator[None]:
    """End the process with exit code 2 on an error in the user's input, and print it if this rank ``speaks``."""
    try:
        yield
    except UserError as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
