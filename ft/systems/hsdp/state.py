"""Training state of a rank in the form in which a returning FT-HSDP replica fetches it from another replica.

The state consists of tensors by name, and of the *envelope*: everything else (counters, scheduler, RNG states, ...) as
JSON values.
"""

import base64
from typing import Any

import torch

from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.snapshot.state import OWNED, REPLICATED, RankState


class ReplicaState:
    """The live training state of this rank. After a committed step, the same rank of every other replica has an equal
    state.

    Args:
        subject: model, optimizer and scheduler.
        position: the trainer's position (step, data position), including the number of samples that each replica has
            taken.
    """

    def __init__(self, subject: TrainingState, position: Position):
        self._subject, self._position = subject, position

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by name."""
        return _named(self._subject.state(self._position.get()))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the model parameters by name, as forward passes use them.

        They are not part of the transferred state, because they are derived from the optimizer's main parameters.
        """
        chunks = enumerate(self._subject.chunks)
        return {f"chunk{at}/{name}": param.detach() for at, chunk in chunks for name, param in chunk.named_parameters()}

    def whole(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the live tensors, and the envelope: counters, scheduler, position, RNG states and buffers as JSON
        values.
        """
        state = self._subject.state(self._position.get())
        blobs = {name: base64.b64encode(blob).decode() for name, blob in state.blobs.items()}
        return _named(state), {"envelope": state.envelope, "blobs": blobs}

    def apply(self, envelope: dict[str, Any]) -> None:
        """Restore an envelope that :meth:`whole` has returned. Must be called on all ranks of the replica.

        Raises:
            UserError: the envelope belongs to another model or optimizer.
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
