"""Lets torch read members of enumerations in checkpoints that Python 3.11.0 to 3.11.3 has written.

These releases of Python (Debian 12 has 3.11.2) pickle a member as a call of ``getattr``, and a signal by its name in
the module ``signal``, neither of which ``torch.load`` accepts by default. Megatron-LM stores such members in the
``args`` of its checkpoints, and cannot load them there itself.
"""

import pickle
import signal
from enum import Enum
from typing import Any


def allow() -> None:
    """Have ``torch.load`` accept names of signals, and ``getattr`` of enumerations and of nothing else."""
    import torch

    signals = [(each, f"signal.{each.name}") for each in signal.Signals]
    torch.serialization.add_safe_globals([(_member, "builtins.getattr"), *signals])


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"getattr of {kind!r} in a checkpoint, which is allowed of enumerations only")
    return kind[name]
