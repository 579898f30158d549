"""A stand-in for ``pynvml`` (nvidia-ml-py): GPUs whose state is in the JSON file that PLANTED_GPUS names.

The file holds a list with a dict for each GPU: "used" and "total" (bytes), "action" (NVML's recovery action),
"row_failed", "retired", "errors", "lost". A missing entry means a question that the GPU does not support, which NVML
answers with NVMLError_NotSupported (value 3), as in nvidia-ml-py's ``_nvmlCheckReturn``.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
_NOT_SUPPORTED, _LOST = 3, 15


class NVMLError(Exception):
    """NVML's error, with its code in ``value``."""

    def __init__(self, value: int):
        self.value = value
        super().__init__({_NOT_SUPPORTED: "Not Supported", _LOST: "GPU is lost"}[value])


def _gpus() -> list[dict]:
    return json.loads(Path(os.environ["PLANTED_GPUS"]).read_text())


def _asked(index: int, name: str):
    gpu = _gpus()[index]
    if gpu.get("lost"):
        raise NVMLError(_LOST)
    if name not in gpu:
        raise NVMLError(_NOT_SUPPORTED)
    return gpu[name]


def nvmlInit() -> None:
    if "PLANTED_GPUS" not in os.environ:
        raise NVMLError(_NOT_SUPPORTED)


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    _asked(handle, "used")
    return f"GPU-{handle:04x}"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> list[int]:
    return _asked(handle, "capability")


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=_asked(handle, "total"), used=_asked(handle, "used"))


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[SimpleNamespace]:
    assert fields == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    if "action" not in _gpus()[handle]:
        return [SimpleNamespace(nvmlReturn=_NOT_SUPPORTED, value=SimpleNamespace(uiVal=0))]
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=_asked(handle, "action")))]


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, int, int, int]:
    return 0, 0, 0, _asked(handle, "row_failed")


def nvmlDeviceGetRetiredPagesPendingStatus(handle: int) -> int:
    return _asked(handle, "retired")


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return _asked(handle, "errors")
