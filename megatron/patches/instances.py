"""Replacement of methods and callbacks on instances: the only module that does so.

:data:`SEAMS` lists which attributes of which objects are replaced, and by what; ``python -m megatron.patches`` prints
it. Unlike the symbols of the manifest, they are replaced on instances, so that no replacement outlives its object.
"""

from collections.abc import Callable
from typing import Any

SEAMS = {
    "optimizer.step": "layers of protections run before and after the update (ft.protection.stack)",
    "config.finalize_model_grads_func": (
        "planned faults in the gradient reduction (ft.protection.injection), tokens of all replicas, and FSDP2's "
        "gradients (ft.systems.hsdp.components), sums over both copies of embedding and output layer "
        "(ft.systems.checkfree.plus)"
    ),
}
"""Attribute -> what is wrapped around it."""


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``wrapper(original, *args, **kwargs)``.

    Args:
        owner: an optimizer or a model's configuration.
        name: "step" or "finalize_model_grads_func".
        wrapper: gets the original function, which may itself be a wrapper, and its arguments.

    Raises:
        KeyError: :data:`SEAMS` lists no such attribute.
    """
    if not any(seam.endswith(f".{name}") for seam in SEAMS):
        raise KeyError(f"megatron.patches.instances does not list the attribute {name}")
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
