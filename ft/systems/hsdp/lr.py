"""The learning rate of a step in which not all replicas took part (paper, section 6.2)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ft.base.errors import UserError

NONE, LINEAR, SQRT = "none", "linear", "sqrt"
MODES = (NONE, LINEAR, SQRT)
DEFAULT = SQRT
"""The paper's baseline is none; what it recommends is sqrt: the rate stays in proportion to the gradient noise's
standard deviation."""


def factor(healthy: int, total: int, mode: str = DEFAULT) -> float:
    """What the schedule's learning rate is multiplied by where ``healthy`` of ``total`` replicas gave gradients.

    Raises:
        UserError: there is no such mode.
        ValueError: these are no numbers of replicas.
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
    """The optimizer steps inside with every ``lr`` multiplied; afterwards each is the very object that it was.

    So the schedule, which sets or reads them between steps, knows nothing of it, and with a factor of 1 nothing is
    touched. Groups without ``lr`` are left alone; a group that is there twice is scaled once.
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
