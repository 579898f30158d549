"""Comparison of the tensors in two checkpoints."""

from pathlib import Path

import torch

from ft.observe.diagnose import stored
from ft.observe.diagnose.compare import of_tensors
from megatron.ft_trainer.checkpointing import inventory

Tensors = dict[tuple, torch.Tensor]


def tensors_of(saved: Path, step: int) -> Tensors:
    """Return every shard in the checkpoint of ``step``, of weights and optimizer: (name, offsets) -> tensor."""
    checkpoint = stored.read(saved / inventory.checkpoint_name(step))
    return {piece.key: checkpoint.whole(piece) for piece in checkpoint.pieces.values() if piece.dtype is not None}


def weights_of(tensors: Tensors) -> Tensors:
    """Return the weights only: the optimizer's shards depend on the number of ranks that share them."""
    return {key: tensor for key, tensor in tensors.items() if not key[0].startswith("optimizer")}


def equal(one: Tensors, other: Tensors) -> bool:
    """Return whether two checkpoints are equal bit for bit."""
    return one.keys() == other.keys() and all(of_tensors(tensor, other[key]) is None for key, tensor in one.items())


def furthest(one: Tensors, other: Tensors) -> tuple[float, tuple]:
    """Return the largest difference of two elements in the same place, and the key of its shard."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max((float((one[key].double() - other[key].double()).abs().max()), key) for key in one)
