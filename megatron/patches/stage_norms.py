"""Hook that reports this rank's part of each gradient norm that megatron-core (core) computes.

CheckFree needs a gradient norm per pipeline stage to weight the neighbours of a lost stage (CheckFree, section 4.2).
Core's global norm is the root of the sum of all ranks' squared norms. Its computation is not changed. A listener is
additionally given this rank's norm and the process group over which core has summed.

Core computes a rank's norm with ``multi_tensor_applier(l2_norm_impl, ...)`` in ``get_grad_norm_fp32``. Therefore both
functions are replaced: the first one stores its result, and the second one passes it to the listener.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.core.optimizer import clip_grads
from megatron.patches.manifest import Patch

Listener = Callable[[torch.Tensor | None, dist.ProcessGroup | None], None]
"""Function that is called with two arguments: the 2-norm of this rank's gradients (tensor of one element; None if the
rank has no gradients), and the process group that core summed over."""

_listener: Listener | None = None
_own_norm: torch.Tensor | None = None


def listen(listener: Listener | None) -> None:
    """Call ``listener`` from now on; None: no listener."""
    global _listener
    _listener = listener


def _apply_to_many(run, operation, *args):
    global _own_norm
    result = run(operation, *args)
    if operation is clip_grads.l2_norm_impl:
        _own_norm = result[0]
    return result


def _get_grad_norm(run, grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    global _own_norm
    _own_norm = None
    total = run(grads_for_norm, norm_type=norm_type, grad_stats_parallel_group=grad_stats_parallel_group)
    if _listener is not None and norm_type == 2:
        _listener(_own_norm, grad_stats_parallel_group)
    _own_norm = None
    return total


PATCHES = (
    Patch(
        "megatron.core.optimizer.clip_grads",
        "multi_tensor_applier",
        "CheckFree records this rank's part of a gradient norm, because it weights the neighbours of a lost stage by "
        "their norms",
        _apply_to_many,
    ),
    Patch(
        "megatron.core.optimizer.optimizer",
        "get_grad_norm_fp32",
        "after core computes the global gradient norm, CheckFree sums the norms of the pipeline stages from the same "
        "parts",
        _get_grad_norm,
    ),
)
