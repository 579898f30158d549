"""What two checkpoints hold, against each other."""

from pathlib import Path

import torch

from ft.observe.diagnose import stored
from ft.observe.diagnose.difference import of_tensors
from megatron.training.checkpointing import naming

Tensors = dict[tuple, torch.Tensor]


def tensors_of(saved: Path, step: int) -> Tensors:
    """Every shard in the checkpoint of ``step``, weights and the optimizer's: (name, offsets) -> tensor."""
    checkpoint = stored.read(saved / naming.checkpoint_name(step))
    return {piece.key: checkpoint.whole(piece) for piece in checkpoint.pieces.values() if piece.dtype is not None}


def weights_of(tensors: Tensors) -> Tensors:
    """Without the optimizer's, whose shards depend on how many ranks it is divided among."""
    return {key: tensor for key, tensor in tensors.items() if not key[0].startswith("optimizer")}


def equal(one: Tensors, other: Tensors) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(of_tensors(tensor, other[key]) is None for key, tensor in one.items())


def furthest(one: Tensors, other: Tensors) -> tuple[float, tuple]:
    """The largest distance of two elements in the same place, and of which shard."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max((float((one[key].double() - other[key].double()).abs().max()), key) for key in one)
