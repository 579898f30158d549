"""Reset the optimizer state of single parameters, for CheckFree+.

In CheckFree+ the embedding is on the first two pipeline stages, and the output layer on the last two. If one stage of
such a pair is lost, it gets the weights of its embedding or output layer from the other one, but not their optimizer
state (Adam's moments and step counts). The other stage then has to reset its own optimizer state of these parameters,
because otherwise the two copies would be updated differently.

An optimizer of megatron-core consists of parts, and keeps a main parameter (usually in fp32) for each model parameter.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ft.base.errors import UserError
from ft.state.snapshot import optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def refuse_common_steps(optimizer: Any) -> None:
    """Refuse an optimizer that counts steps for all parameters together: single parameters cannot be reset in it.

    Raises:
        UserError: the optimizer counts steps for all parameters together.
    """
    for part in optimizers.parts(optimizer):
        if not optimizers.wraps_torch_optimizer(part):
            kind = type(part.optimizer).__name__
            raise UserError(
                f"{kind} counts steps for all parameters together: after a stage is rebuilt, the copies of embedding "
                "and output layer of --ft-checkfree-plus would diverge",
                "use --ft-checkfree, or an optimizer of torch's own (without Apex and Transformer Engine)",
            )


@torch.no_grad()
def reset(optimizer: Any, params: Iterable[torch.nn.Parameter]) -> None:
    """Reset this rank's part of the optimizer state of ``params``.

    Afterwards, moments and step counts are 0, and the main parameters have the (rounded) values of the model's weights,
    as on a rank that has received only the weights. The model's weights are unchanged.

    Args:
        optimizer: megatron-core's optimizer.
        params: parameters of the model; those that this rank's optimizer does not update are skipped.
    """
    params = list(params)
    for part in optimizers.parts(optimizer):
        for param in params:
            main = _main(part, param)
            if main is None:
                continue
            _copy_weights(part, param, main)
            state = part.optimizer.state.get(main, {})
            for key, value in state.items():
                state[key] = value.zero_() if isinstance(value, torch.Tensor) else type(value)(0)


def _copy_weights(part: Any, param: torch.nn.Parameter, main: torch.nn.Parameter) -> None:
    """Set the main parameter to the (rounded) value of the model parameter."""
    whole = param.detach().reshape(-1)
    if isinstance(part, DistributedOptimizer):
        mine = part._get_model_param_range_map(param)["param"]
        whole = whole[mine.start : mine.end]
    main.data.view(-1).copy_(whole)


def _main(part: Any, param: torch.nn.Parameter) -> torch.nn.Parameter | None:
    """Return the main parameter that ``part`` of the optimizer updates for ``param``; None if this rank has none."""
    if isinstance(part, DistributedOptimizer):
        if param not in part.model_param_group_index_map:
            return None
        group, order = part.model_param_group_index_map[param]
        return part.optimizer.param_groups[group]["params"][order]
    return getattr(param, "main_param", param)
