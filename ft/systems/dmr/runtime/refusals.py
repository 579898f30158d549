"""Refuse parts of a model or an optimizer that DMR cannot verify, when they are built.

DMR (dual modular redundancy, SpareTrain) executes every operator twice and compares the results bit for bit. What the
flags alone tell is refused by :mod:`ft.systems.dmr.flags`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ft.base.errors import UserError


def refuse_opaque_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that is not one of torch's own, because its kernels may bypass torch's dispatcher.

    A call that bypasses the dispatcher is executed twice as a whole, for which everything that it changes is copied: of
    an optimizer that would be all of its state.

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


_ORDER = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def refuse_varying_attention(chunks: Sequence[torch.nn.Module], environment: Mapping[str, str]) -> None:
    """Refuse attention that adds up gradients in another order each time.

    Args:
        chunks: model chunks.
        environment: environment variables of this process.

    Raises:
        UserError: the model has attention of Transformer Engine, and its switch for such algorithms is not off.
    """
    if environment.get(_ORDER) == "0":
        return
    for module in (module for chunk in chunks for module in chunk.modules()):
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine")]
        if any(kind.__name__.endswith("DotProductAttention") for kind in kinds):
            raise UserError(
                "attention of Transformer Engine may add up gradients in another order each time, which DMR takes for "
                "an error",
                f"set {_ORDER}=0, or leave its functions out: --ft-dmr-unstable FILE",
            )
