"""Replaces symbols in loaded modules, and records every replaced symbol."""

import importlib
from collections.abc import Callable
from typing import Any

_originals: dict[str, Any] = {}


def replace(module: str, symbol: str, new: Any) -> None:
    """Replace `symbol` (a name, or "Class.method") of `module` by `new`, unless it was replaced before.

    So applying a patch twice has no effect. The original is kept (see :func:`original`); the original of a symbol that
    did not exist is ``None``.
    """
    key = f"{module}.{symbol}"
    if key in _originals:
        return
    owner: Any = importlib.import_module(module)
    *path, name = symbol.split(".")
    for part in path:
        owner = getattr(owner, part)
    _originals[key] = getattr(owner, name, None)
    setattr(owner, name, new)


def wrap(module: str, symbol: str, wrapper: Callable[..., Any], *, static: bool = False) -> None:
    """Replace the function `symbol` of `module` by one that calls ``wrapper(original, *args, **kwargs)``.

    `static`: whether `symbol` is a static method.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(_originals[f"{module}.{symbol}"], *args, **kwargs)

    replace(module, symbol, staticmethod(wrapped) if static else wrapped)


def original(name: str) -> Any:
    """Return the original of the symbol with the full dotted `name`.

    Raises:
        KeyError: the symbol was not replaced.
    """
    return _originals[name]


def replaced() -> tuple[str, ...]:
    """Return the full dotted names of all symbols replaced in this process, in the order of replacement."""
    return tuple(_originals)
