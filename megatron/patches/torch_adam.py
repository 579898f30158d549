"""Lets core's distributed optimizer resume with torch's Adam, its choice where there is no Apex or Transformer Engine.

Those two count an optimizer's steps per parameter group, torch per parameter. Around an optimizer of torch's, core's
distributed optimizer

* expects the state of a first step, which a fresh optimizer does not have (an assertion without a message);
* loads one and the same step tensor into all parameters: torch adds 1 to this tensor once for each parameter, so that
  the step count of the bias correction is too high after a resume;
* expects a step among the tensors of ``fully_reshardable`` checkpoints, which contain none (a ``KeyError``), and
  overwrites the step loaded from ``dp_reshardable`` checkpoints by that of the fresh optimizer.

So a fresh optimizer gets moments and step counts of zero before core asks for its state. The step counts are removed
while core loads the tensors, and then set from the loaded parameter groups.
"""

from collections.abc import Callable
from typing import Any

import torch

from ft.state.snapshot import optimizers
from megatron.patches.manifest import Patch

_TENSORS = "param_state"
_LOADERS = {"dp_zero_gather_scatter": "dp_zero", "fully_sharded_model_space": "fs_model_space"}
"""Names of forms of a stored state that differ from the ends of the names of the methods that load them."""


def _state_dict(run: Callable, self: Any) -> dict:
    if optimizers.wraps_torch_optimizer(self) and not self.optimizer.state:
        optimizers.allocate(self.optimizer)
    return run(self)


@torch.no_grad()
def _load_state_dict(run: Callable, self: Any, state_dict: dict) -> None:
    if not optimizers.wraps_torch_optimizer(self) or _TENSORS not in state_dict:
        run(self, state_dict)
        return
    run(self, {key: value for key, value in state_dict.items() if key != _TENSORS})
    inner = self.optimizer
    for of_parameter in inner.state.values():
        of_parameter.pop("step", None)
    form = state_dict["param_state_sharding_type"]
    getattr(self, f"load_parameter_state_from_{_LOADERS.get(form, form)}")(state_dict[_TENSORS])
    for group in inner.param_groups:
        step = float(group.pop("step"))
        for parameter in group["params"]:
            inner.state[parameter]["step"] = torch.tensor(step)


_MODULE = "megatron.core.optimizer.distrib_optimizer"
_BECAUSE = "because torch counts steps per parameter, and Apex and Transformer Engine per group"
PATCHES = (
    Patch(
        _MODULE,
        "DistributedOptimizer.state_dict",
        f"core fails to resume with torch's Adam before its first step, {_BECAUSE}",
        _state_dict,
        ("(self)",),
    ),
    Patch(
        _MODULE,
        "DistributedOptimizer.load_state_dict",
        f"core gives all parameters of torch's Adam one step count in common, {_BECAUSE}",
        _load_state_dict,
        ("(self, state_dict)",),
    ),
)
