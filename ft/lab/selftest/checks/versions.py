"""Check of versions and settings: what is installed, what the environment says, and whether all nodes agree."""

import importlib.metadata
import json
import os
import platform as machine
import subprocess
import sys
from datetime import timedelta

from ft.base import bounded_json
from ft.job.control.timeouts import Timeouts
from ft.lab.selftest.table import Context, Failed, Measured

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "flash-attn", "triton", "numpy", "mpi4py")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "NVTE_", "GLOO_")
_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF")
_OWN = ("NCCL_HOSTID", "CUDA_VISIBLE_DEVICES")
"""Settings that may differ between nodes."""
_DRIVER_S = 20.0


def versions(context: Context) -> tuple[str, Measured]:
    """Collect the versions of the installed packages and the settings of the environment.

    Raises:
        Failed: torch or megatron-core is not installed, or this node differs from node 0.
        UserError: this project's patches do not fit the installed megatron-core.
    """
    found = _packages()
    if context.planted:
        del found["megatron-core"]
    if "torch" not in found:
        raise Failed(
            "torch is not installed here", "install this project with pip in the environment of training", found
        )
    if "megatron-core" not in found:
        raise Failed("megatron-core is not installed here", "pip install megatron-core, as setup.py names it", found)
    settings = _settings()
    from ft.state.groups.backends import prepare_nccl  # imports torch, which may be missing

    replaced: list[str] = []
    prepare_nccl(Timeouts().launch_s, replaced.append)
    import torch

    from megatron import patches

    patches.apply()
    here = patches.platform()
    found.update(python=machine.python_version(), platform=here.name, **_of_devices(torch, here.name))
    _compare(context, {**found, **settings})
    gpus = (
        f"{found['gpus']} x {found['gpu']}, driver {found['driver']}, NCCL {found['nccl']}"
        if found["gpus"]
        else "no GPU"
    )
    extras = [f"{name} {found[name]}" for name in ("transformer-engine", "apex", "flash-attn") if name in found]
    said = ", ".join([f"torch {found['torch']}, core {found['megatron-core']}", *extras, gpus])
    return "; ".join([said, *replaced]), {**found, "settings": settings}


def _packages() -> Measured:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _settings() -> dict[str, str]:
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: os.environ[name] for name in names}


def _of_devices(torch, platform: str) -> Measured:
    if platform != "cuda":
        return {"gpus": 0, "cuda_build": torch.version.cuda or "none"}
    return {
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(0),
        "cuda_build": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def _compare(context: Context, mine: Measured) -> None:
    """Compare with node 0.

    Raises:
        Failed: something differs.
    """
    store = context.store_of_all_nodes()
    if store is None:
        return
    mine = {**mine, "ft": sys.modules["ft"].__file__, "executable": sys.executable}
    if context.node == 0:
        store.set("versions", json.dumps(mine))
        return
    store.wait(["versions"], timedelta(seconds=context.limit_s))
    theirs = bounded_json.loads(store.get("versions"), non_finite=True)
    names = sorted((mine.keys() | theirs.keys()) - set(_OWN))
    other = [f"{name} {mine.get(name, 'missing')} here, {theirs.get(name, 'missing')} on node 0" for name in names]
    other = [text for name, text in zip(names, other, strict=True) if mine.get(name) != theirs.get(name)]
    if other:
        raise Failed("; ".join(other[:3]), "use the same image, environment and settings on all nodes", mine)
