"""Saves and loads the trainer's checkpoints in megatron-core's sharded format, with checksums and atomic commits.

``checkpointer`` contains the interface for the training loop; ``naming`` describes the files in a checkpoint folder.

The names below are imported when they are first used, so that ``python -m megatron.ft_trainer.checkpointing`` runs
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer
    from megatron.ft_trainer.checkpointing.content import TrainState
    from megatron.ft_trainer.checkpointing.load import LoadReport, NoUsableCheckpoint

__all__ = ["Checkpointer", "LoadReport", "NoUsableCheckpoint", "TrainState"]

_HOMES = {"Checkpointer": "checkpointer", "TrainState": "content", "LoadReport": "load", "NoUsableCheckpoint": "load"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
