"""Collects the settings of a worker (training process) that must be equal on all workers of a run.

The settings are environment variables, package versions and the source code. If they differed, results could differ
between ranks.
"""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from ft.base.checkout import CHECKOUT
from ft.job.control.timeouts import VARIABLE

_OURS = ("ft", "megatron/training", "megatron/patches")
_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine")
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
    found["python"] = platform.python_version()
    found["code of ft and megatron"] = CODE
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _counts(name: str) -> bool:
    return name.startswith(_PREFIXES) and name not in _OWN and not name.endswith(_OWN_ENDINGS)


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for folder in _OURS:
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


CODE = _digest_of_code()
"""Digest of the sources at the time of import. Workers inherit it from the process that they are forked from."""
