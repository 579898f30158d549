"""--deterministic-mode: makes training bitwise reproducible, or raises an error (FT-HSDP, section 2.2).

Every operator has to be reproducible: no fused cross entropy (rejected with the flags, as
Megatron-LM does; with ``--attention-backend flash`` Transformer Engine is told to take reproducible kernels), no
auto-tuner of cuDNN, and deterministic algorithms of torch, which megatron-core also uses to choose among its own.
Memory that torch leaves uninitialised is filled, so that the padding in checkpoints is the same as well. Libraries
below torch (cuBLAS, NCCL) are configured by environment variables, which they read at their first use.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ft.base.errors import UserError


@dataclass(frozen=True)
class Variable:
    """An environment variable that makes a library reproducible.

    Args:
        name: name of the variable.
        default: the value to set if the variable is not set.
        allowed: the values with which the library is reproducible.
        why: the effect of the variable.
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
"""Variables of cuBLAS (torch's notes on reproducibility), NCCL (values as in Megatron-LM) and Transformer Engine."""


def missing(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have to be added to ``environment``.

    Raises:
        UserError: a variable is set to a value with which a library is not reproducible.
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
    """Make this process reproducible. Call it before the first CUDA call, when libraries read their environment.

    Raises:
        UserError: an environment variable is set to a value with which a library is not reproducible.
    """
    os.environ.update(missing(os.environ))
    if "OMP_NUM_THREADS" not in os.environ:
        # The number of threads determines how a sum is split, so it must not depend on the machine.
        torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
