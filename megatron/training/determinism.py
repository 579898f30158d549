"""--deterministic-mode: the same input gives the same bits in every run, or a refusal (FT-HSDP, section 2.2).

Every operator has to be reproducible: no flash attention and no fused cross entropy (``KernelOptions`` refuses them),
no auto-tuner of cuDNN, deterministic algorithms of torch, which megatron-core asks about where it has several ways.
Memory that torch leaves uninitialised is filled, so that the padding in checkpoints is the same as well. Libraries
below torch read the environment, each at its first use.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ft.base.errors import UserError


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Args:
        default: what it is set to where it is not set.
        allowed: its values under which the library is reproducible.
        why: what it decides.
    """

    name: str
    default: str
    allowed: tuple[str, ...]
    why: str


NEEDED = (
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        (":4096:8", ":16:8"),
        "cuBLAS sums in a fixed order only with workspaces of a fixed size",
    ),
    Variable(
        "NCCL_ALGO",
        "Ring",
        ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
        "NCCL must not choose among algorithms that sum in different orders",
    ),
    Variable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "0",
        ("0",),
        "Transformer Engine's attention has backward kernels that add in no fixed order",
    ),
)
"""Of cuBLAS (torch's notes on reproducibility), NCCL (the values that Megatron-LM accepts) and Transformer Engine."""


def missing(environment: Mapping[str, str]) -> dict[str, str]:
    """What has to be added to ``environment``.

    Raises:
        UserError: a variable is set to a value under which a library is not reproducible.
    """
    for needed in NEEDED:
        found = environment.get(needed.name, needed.default)
        if found not in needed.allowed:
            raise UserError(
                f"--deterministic-mode with {needed.name}={found}: {needed.why}",
                f"unset it, or set it to {' or '.join(needed.allowed)}",
            )
    return {needed.name: needed.default for needed in NEEDED if needed.name not in environment}


def enforce() -> None:
    """Makes this process reproducible; before the first CUDA call, which is when libraries read their environment.

    Raises:
        UserError: the environment forbids it.
    """
    os.environ.update(missing(os.environ))
    if "OMP_NUM_THREADS" not in os.environ:
        # A sum over several threads is split by their number, and that must not be the machine's choice.
        torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
