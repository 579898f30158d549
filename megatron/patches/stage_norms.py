"""Hook that reports this rank's part of each gradient norm that megatron-core (core) computes.

CheckFree needs a gradient norm per pipeline stage to weight the neighbours of a lost stage (CheckFree, section 4.2).
Core's global norm is the root of the sum of all ranks' squared norms. That does not change: a listener additionally
gets this rank's norm, which core has computed anyway, and the process group over which core has summed.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.core.optimizer import clip_grads
from megatron.patches.replace import original, replace

_PARTS, _NORMS = "megatron.core.optimizer.clip_grads", "megatron.core.optimizer.optimizer"
_APPLIER, _NORM = "multi_tensor_applier", "get_grad_norm_fp32"

Listener = Callable[[torch.Tensor | None, dist.ProcessGroup | None], None]
"""Function that is called with two arguments: the 2-norm of this rank's gradients (tensor of one element; None if the
rank has no gradients), and the process group that core summed over."""

_listener: Listener | None = None
_part: torch.Tensor | None = None


def apply() -> None:
    replace(_PARTS, _APPLIER, _apply_to_many)
    replace(_NORMS, _NORM, _get_grad_norm)


def listen(listener: Listener | None) -> None:
    """Call ``listener`` from now on; None: no listener."""
    global _listener
    _listener = listener


def listener() -> Listener | None:
    """Return the current listener."""
    return _listener


def _apply_to_many(operation, *args):
    global _part
    result = original(f"{_PARTS}.{_APPLIER}")(operation, *args)
    if operation is clip_grads.l2_norm_impl:
        _part = result[0]
    return result


def _get_grad_norm(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    global _part
    _part = None
    total = original(f"{_NORMS}.{_NORM}")(
        grads_for_norm, norm_type=norm_type, grad_stats_parallel_group=grad_stats_parallel_group
    )
    if _listener is not None and norm_type == 2:
        _listener(_part, grad_stats_parallel_group)
    _part = None
    return total
