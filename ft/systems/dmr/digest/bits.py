"""View the bits of a tensor as integers in logical (row-major) order, for the digests and comparisons of DMR.

The tensor is copied only if its memory is not in that order already.
"""

import torch

from ft.base.errors import UserError

WORD_BYTES = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are in logical order in memory: ``tensor`` itself if possible, else a copy.

    Raises:
        UserError: the tensor has no plain memory (sparse, quantised, meta).
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantised" if tensor.is_quantized else tensor.layout
        raise UserError(f"a {kind} tensor has no bits to digest or compare", "give a dense tensor")
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in logical order, flattened to one dimension and detached from its graph."""
    return laid_out(tensor).detach().reshape(-1)


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of every element as an integer of the same width, in logical order [elements]. A complex element
    gives two integers, for its real and imaginary parts."""
    flat = in_order(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the tensor in logical order as int32 [ceil(bytes / 4)], padded with zeros. Copy only if the
    memory is not in logical order, is not aligned to 4 bytes, or needs padding."""
    flat = in_order(tensor)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=flat.device)
    octets = flat.view(torch.uint8)
    missing = -octets.numel() % WORD_BYTES
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % WORD_BYTES or octets.data_ptr() % WORD_BYTES:
        octets = octets.clone()
    return octets.view(torch.int32)
