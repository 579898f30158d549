"""Encodes as JSON values, and decodes, the losses that a checkout's trainer sums up for its next log line.

The sums are part of the position that a recovery restores, so that the log line after a recovery has the numbers of a
run without a fault. No precision is lost.
"""

from typing import Any

import torch


def encode(sums: dict[str, Any]) -> dict[str, Any]:
    """Return the sums (``total_loss_dict``) as JSON values: numbers as they are, tensors as [dtype, shape, values]."""
    return {name: _encode(value) for name, value in sums.items()}


def decode(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Decode the result of :func:`encode`; return the sums with their tensors on ``device``."""
    return {name: _decode(value, device) for name, value in values.items()}


def _encode(value: Any) -> Any:
    if not torch.is_tensor(value):
        return value
    kept = value.detach().to("cpu", torch.float64)  # exact for the types that losses have
    return [str(value.dtype).removeprefix("torch."), list(value.shape), kept.reshape(-1).tolist()]


def _decode(value: Any, device: torch.device) -> Any:
    if not isinstance(value, list):
        return value
    kind, shape, numbers = value
    return torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, kind)).reshape(shape).to(device)
