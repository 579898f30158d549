"""Collects the settings of a worker (training process) that must be equal on all workers of a run.

The settings are environment variables, package versions and the source code. If they differed, results could differ
between ranks.
"""

from collections.abc import Mapping

from ft.job.control.timeouts import VARIABLE
from ft.platform.versions import versions

_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVTE_", "GLOO_", "MKL_", "OMP_")
# Variables that name a node's own hardware or paths may differ between nodes.
_OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "OMP_PLACES")
_OWN_ENDINGS = ("_IFNAME", "_HCA", "_HOME", "_PATH", "_FILE", "_DIR", "_DIRECTORY")


def surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that affect the computation, the limits of the run, versions, and a digest of this
    project's sources.
    """
    found = {f"environment {name}": value for name, value in environment.items() if _counts(name)}
    found["limits"] = environment.get(VARIABLE, "{}")
    return found | versions()


def _counts(name: str) -> bool:
    return name.startswith(_PREFIXES) and name not in _OWN and not name.endswith(_OWN_ENDINGS)
