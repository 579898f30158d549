"""Replaces symbols in loaded modules, and records every replaced symbol."""

import importlib
from typing import Any

_originals: dict[str, Any] = {}


def replace(module: str, symbol: str, new: Any) -> None:
    """Put `new` in the place of `symbol` (dotted: "Class.method") of `module`, once.

    A symbol that was replaced before is left alone, so applying a patch twice has no effect. The original is kept (see
    :func:`original`); a symbol that did not exist has ``None`` as its original.
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
    """Return what the full dotted `name` was before it was replaced.

    Raises:
        KeyError: it was not replaced.
    """
    return _originals[name]


def replaced() -> tuple[str, ...]:
    """Return the full dotted names of all symbols replaced in this process, in the order of replacement."""
    return tuple(_originals)
