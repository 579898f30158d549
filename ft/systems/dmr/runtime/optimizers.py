"""Refuse optimizers whose kernels bypass torch's dispatcher, because DMR cannot intercept their operators.

DMR (dual modular redundancy, SpareTrain) executes every operator twice. A call that bypasses the dispatcher is executed
twice as a whole, for which everything that it changes is copied: of an optimizer that would be all of its state.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ft.base.errors import UserError


def refuse_opaque_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that is not one of torch's own.

    Args:
        optimizer: optimizer of megatron-core, which wraps one torch optimizer or a chain of optimizers.

    Raises:
        UserError: the optimizer is of such a kind.
    """
    opaque = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in _inner(optimizer) if _is_opaque(kind)})
    if opaque:
        raise UserError(
            f"DMR follows operators through torch's dispatcher, which {', '.join(opaque)} may bypass",
            "build the optimizer after megatron.patches.apply(WITH_DMR), of torch's own optimizers",
        )


def _inner(optimizer: Any) -> Iterator[type]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if inner is not None:
            yield type(inner)


def _is_opaque(kind: type) -> bool:
    return issubclass(kind, torch.optim.Optimizer) and kind.__module__.partition(".")[0] != "torch"
