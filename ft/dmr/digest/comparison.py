"""Bitwise comparison: NaN equals itself, and -0 is not +0."""

import torch

from ft.dmr.digest import bits


def compare(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two tensors have the same dtype, shape and bits: bool [] on their device, without synchronisation.

    Raises:
        UserError: one has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return torch.zeros((), dtype=torch.bool, device=a.device)
    ours, theirs = bits.integers(a), bits.integers(b)
    if ours.device.type == "cpu":
        return torch.tensor(torch.equal(ours, theirs))  # leaves at the first difference and makes no temporary
    return (ours == theirs).all()


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many elements of two tensors of one dtype and shape differ: int64 [] on their device, not synchronised.

    Raises:
        ValueError: another dtype or shape.
        UserError: one has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}: elements cannot be counted")
    differences = bits.integers(a) != bits.integers(b)
    if a.is_complex():
        differences = differences.view(-1, 2).any(1)
    return differences.sum()
