"""Replaces symbols in loaded modules, and records every replaced symbol."""

import importlib
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


def original(name: str) -> Any:
    """Return the original of the symbol with the full dotted `name`.

    Raises:
        KeyError: the symbol was not replaced.
    """
    return _originals[name]


def replaced() -> tuple[str, ...]:
    """Return the full dotted names of all symbols replaced in this process, in the order of replacement."""
    return tuple(_originals)
