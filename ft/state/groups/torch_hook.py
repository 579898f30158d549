"""Makes ``torch.distributed`` create its process groups through this project.

The default group is of the backend ``ft``, which ``take_over`` registers. torch hands some later groups to a method of
the default group, but only from release 2.13 on, and there without the backend that the program asked for. So
``take_over`` wraps the function through which every release creates every group, ``_new_process_group_helper``: if the
default group has a ``maker`` (:class:`ft.state.groups.registry.Groups`), the maker creates the later groups too, and
torch keeps its own records of them.

It wraps ``batch_isend_irecv`` too. Before release 2.14, torch launches messages together only in a group whose type is
exactly its own; from then on it asks the group for its backend, which a group without connections does not have.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base.errors import UserError

if TYPE_CHECKING:
    from ft.state.groups.registry import Groups

BACKEND = "ft"
_HELPER = "_new_process_group_helper"
_NEEDED = ("global_ranks_in_group", "backend", "group_name", "backend_options", "timeout", "group_desc")


def take_over() -> None:
    """Register the backend ``ft``, and wrap torch's function for process groups. Further calls do nothing.

    ``pg_options`` of ``init_process_group`` is then a function that creates the default group from torch's description
    of it (size, rank, timeout and name).

    Raises:
        UserError: this release of torch creates process groups in another way.
    """
    check_torch()
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(
        BACKEND, lambda options, make: make(options), extended_api=True, devices=["cpu", "cuda"]
    )
    # torch's flight recorder (2.15) must leave the recording to the gloo and NCCL backends below a group: it would
    # attach itself to the group, and ask for the name of a backend that is registered on the group; none is.
    recorded = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorded is not None:
        recorded.add(BACKEND)
    setattr(dist.distributed_c10d, _HELPER, _through_maker(getattr(dist.distributed_c10d, _HELPER)))
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = together(dist.batch_isend_irecv)


def together(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``batch_isend_irecv`` such that a group of this project starts its messages itself."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group: Any = p2p_op_list[0].group or dist.group.WORLD
        works: list[dist.Work] = (group.exchange if hasattr(group, "maker") else original)(p2p_op_list)
        return works

    return batch_isend_irecv


def check_torch() -> None:
    """Check that this release of torch creates process groups in the way that ``take_over`` changes.

    Raises:
        UserError: it does not.
    """
    helper = getattr(dist.distributed_c10d, _HELPER, None)
    known = inspect.signature(helper).parameters if helper is not None else {}
    missing = [name for name in _NEEDED if name not in known]
    if missing:
        raise UserError(
            f"torch {torch.__version__} has no {_HELPER} with {', '.join(missing)}: hot-swap needs it",
            "install torch 2.8 or newer, or leave --ft-hot-swap out",
        )


def _through_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        world = dist.distributed_c10d._world
        given = signature.bind(*args, **kwargs).arguments
        maker: Groups | None = getattr(world.default_pg, "maker", None)
        ranks = given["global_ranks_in_group"]
        if maker is None or not ranks:  # torch gives no ranks for the default group
            return original(*args, **kwargs)
        backend = given["backend"]
        about = given.get("timeout"), given["group_name"], given.get("group_desc"), str(backend)
        group = maker.new_group(list(ranks), *about, given.get("backend_options"))
        given["backend"], given["backend_options"] = dist.Backend(BACKEND), lambda options: group
        made, store = original(**given)
        if group is not None:
            # Programs query a group's backend, and pass its name to ``new_group``.
            world.pg_map[made] = (backend, world.pg_map[made][1])
        return made, store

    return helper
