"""Refuse layers and optimizers whose kernels bypass torch's dispatcher, because DMR cannot intercept their operators.

DMR (dual modular redundancy, SpareTrain) executes every operator twice, by a mode of torch's dispatcher.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ft.base.errors import UserError

_PACKAGES = ("transformer_engine", "apex")
_WRAPPED_IN = ("megatron.core.extensions.transformer_engine", "megatron.core.fusions.fused_layer_norm")


def refuse_opaque(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Refuse a model with layers of Transformer Engine or Apex, and an optimizer that is not one of torch's own.

    Args:
        chunks: model chunks of this rank.
        optimizer: optimizer of megatron-core, which wraps one torch optimizer or a chain of optimizers.

    Raises:
        UserError: the model has such a layer or the optimizer is of such a kind.
    """
    layers = {type(module) for chunk in chunks for module in chunk.modules()}
    opaque = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in (*layers, *_inner(optimizer)) if _is(kind)})
    if opaque:
        raise UserError(
            f"DMR follows operators through torch's dispatcher, which {', '.join(opaque)} may bypass",
            "build model and optimizer after megatron.patches.apply(WITH_DMR), of torch's own layers and optimizers",
        )


def _inner(optimizer: Any) -> Iterator[type]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if inner is not None:
            yield type(inner)


def _is(kind: type) -> bool:
    if issubclass(kind, torch.optim.Optimizer):
        return kind.__module__.partition(".")[0] != "torch"
    origins = [base.__module__ for base in kind.__mro__]
    return any(origin in _WRAPPED_IN or origin.partition(".")[0] in _PACKAGES for origin in origins)
