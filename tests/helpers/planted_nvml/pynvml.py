"""A stand-in for ``pynvml`` (nvidia-ml-py): GPUs whose state is in the JSON file that PLANTED_GPUS names.

The file holds a list with a dict for each GPU: "used" and "total" (bytes), "action" (NVML's recovery action),
"row_failed", "retired", "errors", "lost", "closed" (the error of opening it), and for the readings of health
"corrected", "temperature", "margin" (degrees), "milliwatts", "reasons" (bits for lowered clocks), "replays" (of PCIe),
"links" (a list of counters for each NVLink, null for one that is down), "link_fields" (number of a field -> value of
all NVLinks), "full_banks", "sram" (whether there are too many errors), "fabric" (state, status, mask) and "xids" (a
list of numbers, which events deliver once). A missing entry means a question that the GPU does not support, which NVML
answers with NVMLError_NotSupported (value 3), as in nvidia-ml-py's ``_nvmlCheckReturn``.
"""

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS = 208
NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS = 214
NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS = 215
NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS = 221
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
NVML_NVLINK_MAX_LINKS = 18
nvmlEventTypeXidCriticalError = 8
_NOT_SUPPORTED, _TIMEOUT, _LOST = 3, 10, 15
_UNSIGNED, _UNSIGNED_LONG_LONG = 1, 3
_WORDS = {_NOT_SUPPORTED: "Not Supported", 4: "Insufficient Permissions", _TIMEOUT: "Timeout", _LOST: "GPU is lost"}
_delivered: dict[int, int] = {}
_registered: set[int] = set()


class NVMLError(Exception):
    """NVML's error, with its code in ``value``."""

    def __init__(self, value: int):
        self.value = value
        super().__init__(_WORDS.get(value, "Unknown Error"))


class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
    """What a GPU knows of the NVLink fabric."""

    _fields_ = [
        *(("version", ctypes.c_uint), ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint)),
        *(("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint), ("healthMask", ctypes.c_uint32)),
    ]


class c_nvmlEccSramErrorStatus_v1_t(ctypes.Structure):
    """Errors of a GPU's SRAM, without the counts."""

    _fields_ = [("version", ctypes.c_uint), ("bThresholdExceeded", ctypes.c_uint)]


def _gpus() -> list[dict]:
    return json.loads(Path(os.environ["PLANTED_GPUS"]).read_text())


def _asked(index: int, name: str):
    gpu = _gpus()[index]
    if gpu.get("lost"):
        raise NVMLError(_LOST)
    if name not in gpu:
        raise NVMLError(_NOT_SUPPORTED)
    return gpu[name]


def _answer(entry: str) -> Callable[..., int]:
    """Return a function of NVML that answers with an entry of the GPU that its first argument names."""
    return lambda handle, *_: _asked(handle, entry)


nvmlDeviceGetRetiredPagesPendingStatus = _answer("retired")
nvmlDeviceGetTemperature = _answer("temperature")
nvmlDeviceGetMarginTemperature = _answer("margin")
nvmlDeviceGetPowerUsage = _answer("milliwatts")
nvmlDeviceGetCurrentClocksThrottleReasons = _answer("reasons")
nvmlDeviceGetPcieReplayCounter = _answer("replays")


def nvmlInit() -> None:
    if "PLANTED_GPUS" not in os.environ:
        raise NVMLError(_NOT_SUPPORTED)


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if closed := _gpus()[index].get("closed"):
        raise NVMLError(closed)
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    _asked(handle, "used")
    return f"GPU-{handle:04x}"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=_asked(handle, "total"), used=_asked(handle, "used"))


def nvmlDeviceGetFieldValues(handle: int, fields: list) -> list[SimpleNamespace]:
    """Return the values of fields, which are numbers, or pairs of a number and that of a part of the GPU."""
    return [_field(handle, *(field if isinstance(field, tuple) else (field, 0))) for field in fields]


def _field(handle: int, number: int, scope: int) -> SimpleNamespace:
    gpu = _gpus()[handle]
    if number == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
        value, kind = gpu.get("action"), _UNSIGNED
    else:
        value, kind = gpu.get("link_fields", {}).get(str(number)), _UNSIGNED_LONG_LONG
        value = None if value is None else value + scope
    union = SimpleNamespace(uiVal=(value or 0) % (1 << 32), ullVal=value or 0)
    return SimpleNamespace(nvmlReturn=_NOT_SUPPORTED if value is None else 0, valueType=kind, value=union)


def nvmlDeviceGetRowRemapperHistogram(handle: int) -> SimpleNamespace:
    return SimpleNamespace(max=640, high=0, partial=0, low=0, none=_asked(handle, "full_banks"))


def nvmlDeviceGetSramEccErrorStatus(handle: int, status) -> int:
    status._obj.bThresholdExceeded = _asked(handle, "sram")
    return 0


def nvmlDeviceGetGpuFabricInfoV(handle: int, fabric) -> int:
    filled = fabric._obj
    filled.state, filled.status, filled.healthMask = _asked(handle, "fabric")
    return 0


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, int, int, int]:
    return 0, 0, 0, _asked(handle, "row_failed")


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    assert counter == NVML_VOLATILE_ECC
    return _asked(handle, "errors" if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else "corrected")


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:{0x3A + handle:02X}:00.0")


def nvmlDeviceGetTemperatureThreshold(handle: int, threshold: int) -> int:
    _asked(handle, "temperature")
    return 87


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    return int(_link(handle, link) is not None)


def nvmlDeviceGetNvLinkErrorCounter(handle: int, link: int, counter: int) -> int:
    counters = _link(handle, link)
    if not counters:  # as from the fifth generation on
        raise NVMLError(_NOT_SUPPORTED)
    return counters[counter]


def _link(handle: int, link: int) -> list[int] | None:
    links = _asked(handle, "links")
    if link >= len(links):
        raise NVMLError(_NOT_SUPPORTED)
    return links[link]


def nvmlEventSetCreate() -> str:
    return "events"


def nvmlEventSetFree(events: str) -> None:
    _registered.clear()


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: str) -> None:
    assert (kinds, events) == (nvmlEventTypeXidCriticalError, "events")
    _asked(handle, "used")
    _delivered.setdefault(handle, 0)
    _registered.add(handle)


def nvmlEventSetWait_v2(events: str, timeout_ms: int) -> SimpleNamespace:
    for handle, count in _delivered.items():
        if _gpus()[handle].get("lost") and handle in _registered:
            raise NVMLError(_LOST)
        xids = _gpus()[handle].get("xids", [])
        if count < len(xids):
            _delivered[handle] = count + 1
            return SimpleNamespace(device=handle, eventData=xids[count])
    raise NVMLError(_TIMEOUT)
