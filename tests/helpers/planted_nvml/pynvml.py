"""A stand-in for ``pynvml`` (nvidia-ml-py): GPUs whose state is in the JSON file that PLANTED_GPUS names.

The file holds a list with a dict for each GPU: "used" and "total" (bytes), "action" (NVML's recovery action),
"row_failed", "retired", "errors", "lost", and for the readings of health "corrected", "temperature", "milliwatts",
"reasons" (bits for lowered clocks), "replays" (of PCIe), "links" (a list of counters for each NVLink, null for one that
is down) and "xids" (a list of numbers, which events deliver once). A missing entry means a question that the GPU does
not support, which NVML answers with NVMLError_NotSupported (value 3), as in nvidia-ml-py's ``_nvmlCheckReturn``.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
NVML_NVLINK_MAX_LINKS = 18
nvmlEventTypeXidCriticalError = 8
_NOT_SUPPORTED, _TIMEOUT, _LOST = 3, 10, 15
_delivered: dict[int, int] = {}


class NVMLError(Exception):
    """NVML's error, with its code in ``value``."""

    def __init__(self, value: int):
        self.value = value
        super().__init__({_NOT_SUPPORTED: "Not Supported", _TIMEOUT: "Timeout", _LOST: "GPU is lost"}[value])


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
    assert counter == NVML_VOLATILE_ECC
    return _asked(handle, "errors" if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else "corrected")


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:{0x3A + handle:02X}:00.0")


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return _asked(handle, "temperature")


def nvmlDeviceGetTemperatureThreshold(handle: int, threshold: int) -> int:
    _asked(handle, "temperature")
    return 87


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return _asked(handle, "milliwatts")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    return _asked(handle, "reasons")


def nvmlDeviceGetPcieReplayCounter(handle: int) -> int:
    return _asked(handle, "replays")


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    return int(_link(handle, link) is not None)


def nvmlDeviceGetNvLinkErrorCounter(handle: int, link: int, counter: int) -> int:
    return _link(handle, link)[counter]


def _link(handle: int, link: int) -> list[int] | None:
    links = _asked(handle, "links")
    if link >= len(links):
        raise NVMLError(_NOT_SUPPORTED)
    return links[link]


def nvmlEventSetCreate() -> str:
    return "events"


def nvmlEventSetFree(events: str) -> None:
    pass


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: str) -> None:
    assert (kinds, events) == (nvmlEventTypeXidCriticalError, "events")
    _delivered[handle] = 0


def nvmlEventSetWait_v2(events: str, timeout_ms: int) -> SimpleNamespace:
    for handle, count in _delivered.items():
        xids = _gpus()[handle].get("xids", [])
        if count < len(xids):
            _delivered[handle] = count + 1
            return SimpleNamespace(device=handle, eventData=xids[count])
    raise NVMLError(_TIMEOUT)
