"""The state of a rank as replicas hand it to one another: tensors by name, and JSON for all the rest."""

import base64
from typing import Any

import torch

from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.snapshot.state import OWNED, REPLICATED, RankState


class ReplicaState:
    """The live state of this rank; all of it is equal on the same rank of every replica of a quorum.

    Args:
        subject: model, optimizer and schedule. position: the trainer's own state, with the samples of all replicas.
    """

    def __init__(self, subject: TrainingState, position: Position):
        self._subject, self._position = subject, position

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors."""
        return _named(self._subject.state(self._position.get()))

    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's own, that forward passes compute with: made from the optimizer's, no part of the state."""
        chunks = enumerate(self._subject.chunks)
        return {f"chunk{at}/{name}": param.detach() for at, chunk in chunks for name, param in chunk.named_parameters()}

    def whole(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The live tensors, and everything beside them as JSON values: numbers, schedule, position, generators,
        buffers."""
        state = self._subject.state(self._position.get())
        blobs = {name: base64.b64encode(blob).decode() for name, blob in state.blobs.items()}
        return _named(state), {"envelope": state.envelope, "blobs": blobs}

    def apply(self, envelope: dict[str, Any]) -> None:
        """Puts the envelope that :meth:`whole` took in its place; on all ranks of the replica alike.

        Raises:
            UserError: it is of another model or optimizer.
        """
        blobs = {name: base64.b64decode(text) for name, text in envelope["blobs"].items()}
        position = self._subject.apply_envelope(RankState(envelope=envelope["envelope"], blobs=blobs))
        self._position.set(position)


def _named(state: RankState) -> dict[str, torch.Tensor]:
    return {
        f"{section}/{name}": tensor
        for section, tensors in ((OWNED, state.owned), (REPLICATED, state.replicated))
        for name, tensor in tensors.items()
    }
