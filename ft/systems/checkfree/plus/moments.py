"""Reset the optimizer state of single parameters of the model."""

from collections.abc import Iterable
from typing import Any

import torch

from ft.base.errors import UserError
from ft.state.snapshot import optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def refuse_common_steps(optimizer: Any) -> None:
    """Refuse an optimizer that counts steps for all parameters together, because the count of a few could not be reset.

    Raises:
        UserError: the optimizer is such a one.
    """
    for part in optimizers.parts(optimizer):
        if not optimizers.is_torchs(part):
            kind = type(part.optimizer).__name__
            raise UserError(
                f"{kind} counts steps for all parameters together: after a rebuild CheckFree+'s copies would part",
                "use --ft-checkfree, or an optimizer of torch's own (without Apex and Transformer Engine)",
            )


@torch.no_grad()
def forget(optimizer: Any, params: Iterable[torch.nn.Parameter]) -> None:
    """Reset this rank's part of the optimizer state of ``params`` to that before a first step from the current weights:
    the model's weights stay, and main parameters are set to them, as on a rank that receives only the weights."""
    params = list(params)
    for part in optimizers.parts(optimizer):
        for param in params:
            main = _main(part, param)
            if main is None:
                continue
            _follow(part, param, main)
            state = part.optimizer.state.get(main, {})
            for key, value in state.items():
                state[key] = value.zero_() if isinstance(value, torch.Tensor) else type(value)(0)


def _follow(part: Any, param: torch.nn.Parameter, main: torch.nn.Parameter) -> None:
    """Set the main parameter to the (rounded) value in the model."""
    whole = param.detach().reshape(-1)
    if isinstance(part, DistributedOptimizer):
        mine = part._get_model_param_range_map(param)["param"]
        whole = whole[mine.start : mine.end]
    main.data.view(-1).copy_(whole)


def _main(part: Any, param: torch.nn.Parameter) -> torch.nn.Parameter | None:
    """Return the parameter that ``part`` of core's optimizer updates for ``param``; None if not on this rank."""
    if isinstance(part, DistributedOptimizer):
        if param not in part.model_param_group_index_map:
            return None
        group, order = part.model_param_group_index_map[param]
        return part.optimizer.param_groups[group]["params"][order]
    return getattr(param, "main_param", param)
