"""--deterministic-mode: makes training bitwise reproducible, or raises an error (FT-HSDP, section 2.2).

Every operator has to be reproducible: no fused cross entropy (rejected with the flags, as Megatron-LM does; with
``--attention-backend flash`` Transformer Engine is told to take reproducible kernels), no auto-tuner of cuDNN, and
deterministic algorithms of torch, which megatron-core also uses to choose among its own. Memory that torch leaves
uninitialised is filled, so that the padding in checkpoints is the same as well. Libraries below torch (cuBLAS, NCCL)
are configured by environment variables, which they read at their first use.
"""

import os
from collections.abc import Mapping

import torch

from ft.base.errors import UserError

NEEDED = {
    "CUBLAS_WORKSPACE_CONFIG": (
        (":4096:8", ":16:8"),
        "cuBLAS sums in a fixed order only with workspaces of a fixed size",
    ),
    "NCCL_ALGO": (
        ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
        "NCCL must not choose among algorithms that sum in different orders",
    ),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": (
        ("0",),
        "Transformer Engine's attention has backward kernels that add in no fixed order",
    ),
}
"""Variable of cuBLAS (torch's notes on reproducibility), NCCL (values as in Megatron-LM) and Transformer Engine -> (the
values with which the library is reproducible, the default first; why)."""


def missing(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have to be added to ``environment``.

    Raises:
        UserError: a variable is set to a value with which a library is not reproducible.
    """
    for name, (allowed, why) in NEEDED.items():
        if environment.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"--deterministic-mode with {name}={environment[name]}: {why}",
                f"unset it, or set it to {' or '.join(allowed)}",
            )
    return {name: allowed[0] for name, (allowed, _) in NEEDED.items() if name not in environment}


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
