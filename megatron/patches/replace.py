"""Replacing a symbol in a loaded module, and the record of every symbol replaced so far."""

import importlib
from typing import Any

_originals: dict[str, Any] = {}


def replace(module: str, symbol: str, new: Any) -> None:
    """Put `new` in the place of `symbol` (dotted: "Class.method") of `module`, once.

    A symbol that was replaced before is left alone, so that applying a patch twice is applying it once.
    The original is kept (see :func:`original`); a symbol that did not exist has ``None`` as its original.
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
    """What the full dotted `name` was before it was replaced; KeyError if it was not."""
    return _originals[name]


def replaced() -> tuple[str, ...]:
    """The full dotted names of all symbols replaced in this process, in the order of replacement."""
    return tuple(_originals)
