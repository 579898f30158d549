"""Reads NVIDIA GPUs through NVML: memory errors, row remaps, links, throttling, power and temperature, and Xids.

An Xid is an error report of NVIDIA's driver. NVML delivers Xids to a program that has asked for them, also where the
kernel log cannot be read, as in most containers; those of earlier times are in the kernel log only.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from ft.platform.health.files import Source
from ft.platform.health.observation import COUNTER, EVENT

_LOST = (15, 16)
"""Values of NVMLError for a GPU that has fallen off the bus, and for one that has to be reset."""
_THROTTLED = {
    "gpu.throttled.power_cap": 0x04,
    "gpu.throttled.hardware": 0x08,
    "gpu.throttled.heat_software": 0x20,
    "gpu.throttled.heat_hardware": 0x40,
    "gpu.throttled.power_brake": 0x80,
}
"""Names of observations -> bit of NVML's reasons for lowered clocks."""
_LINK_COUNTERS = {"nvlink.replays": 0, "nvlink.recoveries": 1, "nvlink.crc_flit": 2, "nvlink.crc_data": 3}
"""Names of observations -> NVML's number of the counter."""
_MOST_EVENTS = 64
_TIMEOUT = 10


def find_nvml() -> Any:
    """Return the module ``pynvml`` (package ``nvidia-ml-py``), or None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


class Gpus:
    """Reads the GPUs of this node. Used by one thread.

    Args:
        nvml: the module ``pynvml``, or None.
    """

    def __init__(self, nvml: Any):
        self._nvml = nvml
        self._events: Any = None
        self._is_open = False

    def read(self, node: str, when: float) -> Source:
        """Return the observations of all GPUs. ``when``: wall time in seconds since 1970."""
        found = Source(node, when)
        if self._nvml is None:
            found.unreadable = "the Python package nvidia-ml-py is not there"
            return found
        try:
            self._open()
            count = self._nvml.nvmlDeviceGetCount()
        except Exception as error:
            found.unreadable = f"NVML: {error}"
            return found
        for index in range(count):
            self._read_one(found, index)
        found.observations += self._xids(found)
        return found

    def news(self, node: str, when: float) -> Source:
        """Return the Xids since the last call of ``read`` or ``news``; none before the first ``read``."""
        found = Source(node, when)
        if self._is_open:
            found.observations += self._xids(found)
        return found

    def close(self) -> None:
        """Release NVML."""
        if self._is_open:
            with contextlib.suppress(Exception):
                if self._events is not None:
                    self._nvml.nvmlEventSetFree(self._events)
                self._nvml.nvmlShutdown()
        self._events, self._is_open = None, False

    def _open(self) -> None:
        if not self._is_open:
            self._nvml.nvmlInit()
            self._is_open = True
            with contextlib.suppress(Exception):  # events are optional: MIG and vGPUs have none
                self._events = self._nvml.nvmlEventSetCreate()
                for index in range(self._nvml.nvmlDeviceGetCount()):
                    handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                    self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def _read_one(self, found: Source, index: int) -> None:
        device = f"gpu{index}"
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._names(found, device, handle)
            self._memory(found, device, handle)
            self._heat_and_power(found, device, handle)
            self._links(found, device, handle)
            found.add(device, "gpu.lost", 0)
        except self._nvml.NVMLError as error:
            found.add(device, "gpu.lost", 1, text=str(error))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer of an NVML function, or None if this GPU, driver or package does not have it.

        Raises:
            NVMLError: the GPU is lost, or has to be reset.
        """
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        try:
            return function(*arguments) if function is not None else None
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in _LOST:
                raise
            return None

    def _field(self, handle: Any, name: str) -> float | None:
        """Return the value of one of NVML's numbered fields, or None."""
        number = getattr(self._nvml, name, None)
        answer = self._ask("nvmlDeviceGetFieldValues", handle, [number]) if number is not None else None
        return answer[0].value.uiVal if answer and answer[0].nvmlReturn == 0 else None

    def _names(self, found: Source, device: str, handle: Any) -> None:
        uuid = self._ask("nvmlDeviceGetUUID", handle)
        bus = getattr(self._ask("nvmlDeviceGetPciInfo", handle), "busId", None)
        for alias in (uuid, bus):
            if alias:
                name = alias.decode() if isinstance(alias, bytes) else alias
                found.aliases[name if name.startswith("GPU-") else _short(name)] = device

    def _memory(self, found: Source, device: str, handle: Any) -> None:
        nvml = self._nvml
        for name, kind in (("corrected", 0), ("uncorrected", 1)):
            errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, kind, getattr(nvml, "NVML_VOLATILE_ECC", 0))
            found.add(device, f"gpu.ecc.{name}", errors, kind=COUNTER)
        if rows := self._ask("nvmlDeviceGetRemappedRows", handle):
            found.add(device, "gpu.rows.corrected", rows[0], kind=COUNTER)
            found.add(device, "gpu.rows.uncorrected", rows[1], kind=COUNTER)
            found.add(device, "gpu.rows.pending", int(rows[2]))
            found.add(device, "gpu.rows.failed", int(rows[3]))
        found.add(device, "gpu.pages.pending", self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle))
        found.add(device, "gpu.recovery_action", self._field(handle, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"))

    def _heat_and_power(self, found: Source, device: str, handle: Any) -> None:
        found.add(device, "gpu.temperature", (heat := self._ask("nvmlDeviceGetTemperature", handle, 0)), "C")
        limit = self._ask("nvmlDeviceGetTemperatureThreshold", handle, 1)  # 1: the GPU slows down
        if heat is not None and limit:
            found.add(device, "gpu.temperature.margin", limit - heat, "C", text=f"it slows down at {limit} C")
        for name, function in (
            ("gpu.power", "nvmlDeviceGetPowerUsage"),
            ("gpu.power.limit", "nvmlDeviceGetEnforcedPowerLimit"),
        ):
            milliwatts = self._ask(function, handle)
            found.add(device, name, None if milliwatts is None else milliwatts / 1000, "W")
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        for name, bit in _THROTTLED.items() if reasons is not None else ():
            found.add(device, name, int(bool(reasons & bit)))

    def _links(self, found: Source, device: str, handle: Any) -> None:
        found.add(device, "gpu.pcie.replays", self._ask("nvmlDeviceGetPcieReplayCounter", handle), kind=COUNTER)
        width = self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
        most = self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
        if width and most:
            found.add(device, "gpu.pcie.lanes_lost", most - width, text=f"{width} of {most} lanes")
        for link in range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 0)):
            is_up = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if is_up is None:  # the links are numbered without gaps
                break
            found.add(f"{device}/nvlink{link}", "nvlink.up", is_up)
            for name, counter in _LINK_COUNTERS.items() if is_up else ():
                errors = self._ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
                found.add(f"{device}/nvlink{link}", name, errors, kind=COUNTER)

    def _xids(self, found: Source) -> list[Any]:
        """Return the Xids since the last call, as observations."""
        seen = Source(found.node, found.when)
        for number, data in enumerate(self._waiting()):
            with contextlib.suppress(self._nvml.NVMLError):
                device = f"gpu{self._nvml.nvmlDeviceGetIndex(data.device)}"
                # the number makes two Xids of one reading two events
                said = f"NVML: Xid {data.eventData} at {found.when:.3f} ({number})"
                seen.add(device, f"xid.{data.eventData}", data.eventData, kind=EVENT, text=said)
        return seen.observations

    def _waiting(self) -> Iterator[Any]:
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                yield self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) != _TIMEOUT:
                    self._events = None
                return


def _short(address: str) -> str:
    """Return a PCI address of NVML ("00000000:3B:00.0") as the kernel writes it ("0000:3b:00.0")."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
