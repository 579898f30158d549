"""The kernel that adds what has come to a member's own and puts the sum where it belongs, in one pass over memory.

What has come, and what goes on, lies in pinned host memory, which the kernel reads and writes over the bus itself. The
last step of reduce-scatter puts its result into the tensor and into what is sent from registers (FT-HSDP, section 4.2).
It runs on few programs, so that it takes few multiprocessors from the computation beside it.
"""

import torch
import triton
import triton.language as tl

_PROGRAMS, _STEP, _WARPS = 2, 4096, 16
"""2 blocks of 512 threads, as the paper's."""


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
    """``into`` and ``also``, if given, become (received + own) x scale, made in fp32, on the present stream.

    Args:
        received, into, also: pinned host or device memory. own: on the device. All of one length, without gaps.
    """
    twice = also is not None
    _add[(_PROGRAMS,)](
        received, own, into, also if twice else into, scale, own.numel(), STEP=_STEP, TWICE=twice, num_warps=_WARPS
    )
