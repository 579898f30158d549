"""Starts the reduction of each gradient bucket at a chosen microbatch, for schedules with a last use per parameter.

megatron-core (core) has one last microbatch for all parameters: a bucket group with ``is_last_microbatch`` counts the
gradients of its parameters in that microbatch's backward, and starts its reduction when all of them are complete. In
schedules where a microbatch does not use all parameters, each bucket group has its own last microbatch, and some of its
parameters may be complete before. This module replaces no symbol; it writes the attributes of core's bucket groups.
"""

from collections.abc import Iterable
from typing import Any

import torch

from megatron.patches.step_state import set_known


def hold_back(group: Any) -> None:
    """Make the bucket group ``group`` ignore the gradients of the next backward passes."""
    set_known(group, is_last_microbatch=False)


def start_when_ready(group: Any, complete: Iterable[torch.nn.Parameter]) -> None:
    """Make ``group`` start its reduction in the next backward pass, when its last gradient is complete.

    As in core, the reduction starts after the backward passes if this is the first batch of the group.

    Args:
        group: a bucket group of core.
        complete: those of its parameters that the next backward pass does not use; at least one other is used. Each
            is counted once, as a parameter is that one backward pass uses once.
    """
    set_known(group, is_last_microbatch=True, per_param_grad_ready_counts=dict.fromkeys(complete, 1))


def start_at_end(group: Any) -> None:
    """Make ``group``, which no backward pass of this step uses, start its reduction after the backward passes."""
    set_known(group, is_first_batch=True, golden_per_param_grad_ready_counts={})
