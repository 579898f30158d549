"""Triton kernel of FT-HSDP's ring all-reduce: add a received chunk to a member's own values in one pass over memory.

Received and outgoing chunks lie in pinned host memory, which the kernel accesses over the bus. The last step of
reduce-scatter stores its result from registers both into the tensor and into the send buffer (FT-HSDP, section 4.2).
The kernel uses few programs, so that it takes few multiprocessors from the computation that runs beside it.
"""

import torch
import triton
import triton.language as tl

_PROGRAMS, _STEP, _WARPS = 2, 4096, 16
"""2 blocks of 512 threads, as in FT-HSDP, section 4.2."""


@triton.jit
def _add(received, own, into, also, scale, count, STEP: tl.constexpr, TWICE: tl.constexpr):
    first = tl.program_id(0) * STEP
    for start in range(first, count, tl.num_programs(0) * STEP):
        at = start + tl.arange(0, STEP)
        there = at < count
        total = tl.load(received + at, mask=there).to(tl.float32) + tl.load(own + at, mask=there).to(tl.float32)
        total = total * scale
        tl.store(into + at, total.to(into.dtype.element_ty), mask=there)
        if TWICE:
            tl.store(also + at, total.to(also.dtype.element_ty), mask=there)


def add(received: torch.Tensor, own: torch.Tensor, scale: float, into: torch.Tensor, also: torch.Tensor | None) -> None:
    """Set ``into``, and ``also`` if given, to (received + own) x scale, computed in fp32 on the current stream.

    All tensors have the same length and are contiguous.

    Args:
        received: pinned host or device memory.
        own: device memory.
        into: pinned host or device memory.
        also: pinned host or device memory, or None.
    """
    twice = also is not None
    _add[(_PROGRAMS,)](
        received, own, into, also if twice else into, scale, own.numel(), STEP=_STEP, TWICE=twice, num_warps=_WARPS
    )
