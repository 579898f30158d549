"""Learning-rate scaling of FT-HSDP for steps in which not all replicas (copies of the model) contributed gradients
(FT-HSDP, section 6.2).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ft.base.errors import UserError

NONE, LINEAR, SQRT = "none", "linear", "sqrt"
MODES = (NONE, LINEAR, SQRT)
DEFAULT = SQRT
"""FT-HSDP, section 6.2, recommends sqrt, which keeps the rate proportional to the standard deviation of the gradient
noise; its baseline is none.
"""


def factor(healthy: int, total: int, mode: str = DEFAULT) -> float:
    """Return the factor of the scheduled learning rate when ``healthy`` of ``total`` replicas contributed gradients.

    Raises:
        UserError: there is no such mode.
        ValueError: ``healthy`` is not in 1..``total``.
    """
    if not 1 <= healthy <= total:
        raise ValueError(f"{healthy} healthy replicas of {total}")
    if mode == NONE:
        return 1.0
    if mode == LINEAR:
        return healthy / total
    if mode == SQRT:
        return math.sqrt(healthy / total)
    raise UserError(f"--ft-hsdp-lr-scaling {mode!r} is unknown", f"give one of {', '.join(MODES)}")


@contextmanager
def scaled(param_groups: Sequence[dict[str, Any]], by: float) -> Iterator[None]:
    """Multiply the ``lr`` of every parameter group by ``by`` inside the context, and restore the original objects.

    The scheduler, which sets or reads the rates between steps, is therefore not affected. A factor of 1 changes
    nothing. Groups without ``lr`` are left alone; a group that occurs twice is scaled once.
    """
    if by == 1.0:
        yield
        return
    kept = {id(group): (group, group["lr"]) for group in param_groups if "lr" in group}
    try:
        for group, lr in kept.values():
            group["lr"] = lr * by
        yield
    finally:
        for group, lr in kept.values():
            group["lr"] = lr
