"""Replacing a method of one object, or a callback of its configuration: the only place where that is done.

Which attributes of which objects are replaced, and by what, is listed in :data:`SEAMS`; ``python -m megatron.patches``
prints it. Unlike the symbols of the manifest they are replaced on instances, so nothing of it outlives them.
"""

from collections.abc import Callable
from typing import Any

SEAMS = {
    "optimizer.step": "layers of protections run before and after the update (ft.protection.stack)",
    "config.finalize_model_grads_func": (
        "planned faults in the gradient reduction (ft.protection.injection), tokens of all replicas "
        "(ft.systems.hsdp.components), sums over both copies of embedding and output layer "
        "(ft.systems.checkfree.plus.install)"
    ),
}
"""Attribute -> what goes around it."""


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``wrapper(original, *args, **kwargs)``.

    Args:
        owner: an optimizer or a model's configuration.
        name: "step" or "finalize_model_grads_func".
        wrapper: gets the function that was there, which may itself be a replaced one.

    Raises:
        KeyError: no such seam is listed.
    """
    if not any(seam.endswith(f".{name}") for seam in SEAMS):
        raise KeyError(f"{name} is no seam that megatron.patches.instances lists")
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
