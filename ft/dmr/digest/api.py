"""``digest``: which backend computes it is a matter of speed alone."""

import functools
from collections.abc import Callable, Sequence

import torch

from ft.dmr.digest import eager, native

Backend = Callable[[torch.Tensor, int, torch.Tensor], None]


def digest(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """128 bits of a tensor's dtype, shape and every bit: int64 [2] on its device.

    Two tensors that differ have equal digests with probability <= 2^-64 (``definition.py``): compare all the bits, for
    the low ones alone do not see a flip of a high one. Elements count in logical order, so strides do not matter.
    Nothing is synchronised, but for the first digest with a new seed on a device, which copies its keys there. A tensor
    that is not contiguous is copied.

    Args:
        seed: 0 <= seed < 2^128; digests can be compared only under one seed.

    Raises:
        UserError: the seed is out of range; a sparse, quantised or meta tensor.
    """
    out = torch.empty(2, dtype=torch.int64, device=tensor.device)
    _backend(tensor.device.type)(tensor, seed, out)
    return out


def digest_many(tensors: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
    """The digests of tensors of one device: int64 [number of tensors, 2] there; row i is ``digest(tensors[i], seed)``.

    Raises:
        UserError: as ``digest``.
        ValueError: the tensors are on several devices.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"digests of tensors on several devices: {', '.join(sorted(map(str, devices)))}")
    device = devices.pop() if devices else torch.device("cpu")
    out = torch.empty((len(tensors), 2), dtype=torch.int64, device=device)
    compute = _backend(device.type)
    for tensor, row in zip(tensors, out.unbind(), strict=True):
        compute(tensor, seed, row)
    return out


def backend(device: torch.device | str) -> str:
    """Who computes digests there: "native" (C), "kernel" (Triton) or "eager" (plain torch)."""
    return _backend(torch.device(device).type).__module__.rpartition(".")[2]


@functools.cache
def _backend(device_type: str) -> Backend:
    if device_type == "cpu" and native.library() is not None:
        return native.digest
    if device_type == "cuda":
        try:
            from ft.dmr.digest import kernel
        except ImportError:
            return eager.digest
        return kernel.digest
    return eager.digest
