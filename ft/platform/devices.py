"""Reads the state of this node's NVIDIA GPUs without CUDA: their memory in use, and faults that only a reset clears.

The source is NVML, through the Python package ``nvidia-ml-py`` if it is installed, else through ``nvidia-smi``. Neither
creates a CUDA context, so a process that has asked can still be forked, and asking takes no memory of a GPU.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft.platform.health.gpus import ask, fields, find_nvml

_FIELDS = "uuid,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_QUERY_S = 20.0
_MIB = 1 << 20
_ACTIONS = {1: "a reset", 2: "a reboot of the node", 3: "its NVLink traffic to be drained", 4: "a drain and a reset"}
"""Values of NVML's field "GPU recovery action", which the driver sets after a fatal Xid; 0: nothing is to be done."""


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU.

    Attributes:
        uuid: its unique id, such as "GPU-5c2f...".
        total: its memory in bytes, 0 if unknown.
        used: the memory that is in use, in bytes.
        problem: why no worker can use the GPU, or "".
    """

    uuid: str = ""
    total: int = 0
    used: int = 0
    problem: str = ""


def read(environment: Mapping[str, str] = os.environ) -> list[GpuState]:
    """Return the state of the GPUs that processes with this environment can use, in CUDA's order.

    The list is empty if the GPUs are unknown: no driver, or parts of GPUs (MIG), whose state NVML does not report.
    """
    found = _from_nvml()
    if found is None:
        found = _from_smi()
    return visible(found, environment.get("CUDA_VISIBLE_DEVICES"))


def visible(found: Sequence[GpuState], selection: str | None) -> list[GpuState]:
    """Return the readings that CUDA_VISIBLE_DEVICES selects, in its order.

    Args:
        selection: the variable, or None if it is not set.
    """
    if selection is None:
        return list(found)
    chosen: list[int] = []
    for name in (word.strip() for word in selection.split(",")):
        alike = [i for i, each in enumerate(found) if name == str(i) or _names(name, each.uuid)]
        if len(alike) != 1 or alike[0] in chosen:  # CUDA ignores all that follows an entry that names no GPU
            break
        chosen += alike
    return [found[index] for index in chosen]


def on_node(number: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the index among all GPUs of the node of a device that CUDA numbers as CUDA_VISIBLE_DEVICES says.

    A part of a GPU (MIG), and a GPU that NVML does not list, keep CUDA's own number.
    """
    names = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if number >= len(names) or not names[number]:
        return number
    if names[number].isdecimal():
        return int(names[number])
    every = read({})
    alike = [index for index, each in enumerate(every) if _names(names[number], each.uuid)]
    return alike[0] if len(alike) == 1 else number


def _names(name: str, uuid: str) -> bool:
    """Return whether an entry of CUDA_VISIBLE_DEVICES is the (shortened) id of a GPU."""
    return name.startswith("GPU-") and uuid.startswith(name)


def _from_nvml() -> list[GpuState] | None:
    """Return the readings of all GPUs, or None if NVML or its Python package is missing."""
    nvml = find_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return [_read_one(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _read_one(nvml: Any, index: int) -> GpuState:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = ask(nvml, "nvmlDeviceGetUUID", handle) or ""
        memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        total, used = (memory.total, memory.used) if memory is not None else (0, 0)
        return GpuState(uuid.decode() if isinstance(uuid, bytes) else uuid, total, used, _fault(nvml, handle))
    except nvml.NVMLError as error:
        return GpuState(problem=f"NVML cannot reach it: {error}")


def _fault(nvml: Any, handle: Any) -> str:
    """Return the fault of a GPU that lasts until a reset, or "".

    The driver knows best what an Xid or a memory error requires, and newer drivers (565 and later) say so. An
    uncorrectable error counts by itself only with older drivers: newer GPUs contain it and go on.
    """
    [action] = fields(nvml, handle, ["NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"])
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", handle)  # correctable, uncorrectable, pending, failed
    if action:
        return f"the driver asks for {_ACTIONS.get(action, f'recovery action {action:.0f}')}"
    if rows and rows[3]:
        return "a row of its memory is defective and cannot be replaced"
    if ask(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle):
        return "pages of its memory are retired at the next reboot"
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    errors = ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, *kinds) if action is None else 0
    return f"{errors} uncorrectable error(s) of its memory" if errors else ""


def _from_smi() -> list[GpuState]:
    """Return the readings of all GPUs, none if ``nvidia-smi`` is missing or fails."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [_parse(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _parse(line: str) -> GpuState:
    """Return the reading of one line of ``nvidia-smi``, in which "[N/A]" stands for what the GPU does not report."""
    uuid, total, used, errors, pending = (word.strip() for word in line.split(","))
    lost = next((word for word in (uuid, total, used) if word.startswith("[") and "N/A" not in word), "")
    problem = f"nvidia-smi reports {lost}" if lost else ""
    if not problem and pending == "Yes":
        problem = "pages of its memory are retired at the next reboot"
    if not problem and errors.isdecimal() and int(errors):
        problem = f"{errors} uncorrectable error(s) of its memory"
    sizes = [int(word) * _MIB if word.isdecimal() else 0 for word in (total, used)]
    return GpuState(uuid, *sizes, problem)
