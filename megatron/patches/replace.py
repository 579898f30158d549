"""Replaces symbols of loaded modules and records them; it also replaces attributes of single objects.

A replaced attribute does not outlive its object. Only the modules in ``manifest.ELSEWHERE`` replace symbols besides.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron.patches.manifest import ON_OBJECTS

_originals: dict[str, Any] = {}


def replace(module: str, symbol: str, new: Any) -> None:
    """Replace `symbol` (a name, or "Class.method") of `module` by `new`, unless it was replaced before.

    So applying a patch twice has no effect. The original is kept (see :func:`original`); the original of a symbol that
    did not exist is ``None``.
    """
    owner, name = _place(module, symbol)
    key = f"{module}.{symbol}"
    if key not in _originals:
        _originals[key] = getattr(owner, name, None)
        setattr(owner, name, new)


def wrap(module: str, symbol: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function `symbol` of `module` by one that calls ``wrapper(original, *args, **kwargs)``."""
    owner, name = _place(module, symbol)
    wrapped = _calls(wrapper, getattr(owner, name, None))
    is_static = isinstance(inspect.getattr_static(owner, name, None), staticmethod)
    replace(module, symbol, staticmethod(wrapped) if is_static else wrapped)


def wrap_attribute(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by a function that calls ``wrapper(original, *args, **kwargs)``.

    Args:
        owner: an optimizer or a model's configuration.
        name: "step" or "finalize_model_grads_func".
        wrapper: gets the original function, which may itself be a wrapper, and its arguments.

    Raises:
        KeyError: :data:`megatron.patches.manifest.ON_OBJECTS` lists no such attribute.
    """
    if not any(attribute.endswith(f".{name}") for attribute in ON_OBJECTS):
        raise KeyError(f"megatron.patches.manifest does not list the attribute {name}")
    setattr(owner, name, _calls(wrapper, getattr(owner, name)))


def _calls(wrapper: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(plain, *args, **kwargs)

    return wrapped


def _place(module: str, symbol: str) -> tuple[Any, str]:
    """Return the module or class that has the symbol, and the symbol's name in it."""
    owner: Any = importlib.import_module(module)
    *path, name = symbol.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def original(name: str) -> Any:
    """Return the original of the symbol with the full dotted `name`.

    Raises:
        KeyError: the symbol was not replaced.
    """
    return _originals[name]


def replaced() -> tuple[str, ...]:
    """Return the full dotted names of all symbols replaced in this process, in the order of replacement."""
    return tuple(_originals)
