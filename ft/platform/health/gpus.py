"""Reads NVIDIA GPUs through NVML: memory errors, row remaps, links, throttling, power and temperature, and Xids.

An Xid is an error report of NVIDIA's driver. NVML delivers Xids to a program that has asked for them, also where the
kernel log cannot be read, as in most containers; those of earlier times are in the kernel log only. After a fault the
driver asks for a recovery action; the same numbers stand in the text of Xid 154 and in NVML's field for the action.
"""

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ft.platform.health.observation import COUNTER, EVENT, HealthSource, as_pci_address, folders, pci_name, text

RECOVERY_ACTIONS = (
    *("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset"),
    "system_reboot",
)
"""Names of the actions by their numbers (NVML's enumeration ``nvmlDeviceGpuRecoveryAction_t``)."""
UNKNOWN_ACTION = "unknown"
NO_ACTION = 0


def action_name(number: float) -> str:
    """Return the name of an action; UNKNOWN_ACTION if the number is one of a newer driver."""
    return RECOVERY_ACTIONS[int(number)] if 0 <= number < len(RECOVERY_ACTIONS) else UNKNOWN_ACTION


FROM_NVML = "NVML: "
"""How the text of an event begins that NVML has delivered."""
_LOST = (15, 16)
"""Values of NVMLError for a GPU that has fallen off the bus, and for one that has to be reset."""
_UNREACHABLE = (8, *_LOST, 28, 999)
"""Values for a GPU that cannot be opened: it lacks power, as above, it is not found, and an unknown error."""
_THROTTLED = {
    "gpu.throttled.power_cap": 0x04,
    "gpu.throttled.heat_software": 0x20,
    "gpu.throttled.heat_hardware": 0x40,
    "gpu.throttled.power_brake": 0x80,
}
"""Names of observations -> bit of NVML's reasons for lowered clocks."""
_SLOWED, _SLOWED_WHY = 0x08, 0x40 | 0x80
"""The bit for "slowed down by hardware", and those that say why."""
_LINK_COUNTERS = {"nvlink.replays": 0, "nvlink.recoveries": 1, "nvlink.crc_flit": 2, "nvlink.crc_data": 3}
"""Name of the observation -> number by which NVML knows the error counter of an NVLink, for its generations 1 to 4."""
_LINK_FIELDS = {
    "nvlink.recoveries": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    "nvlink.recoveries_failed": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    "nvlink.receive_errors": "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    "nvlink.integrity_errors": "NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    "nvlink.symbol_errors": "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS",
}
"""Name of the observation -> name of NVML's field with the error counter of an NVLink, from generation 5 on."""
_UNREADY, _COMPLETED = {1: "not started", 2: "in progress"}, 3
"""NVML's states of a GPU's registration with the NVLink fabric."""
_FABRIC_FAULTS = {"less bandwidth": 0, "route recovery": 2, "route unhealthy": 4, "access timeout": 6}
"""Faults of the fabric -> place of their two bits in NVML's mask; the bits are 1 for a fault."""
_FABRIC_CONFIGURATION, _CONFIGURED = 8, 1
"""Place of the four bits for a wrong configuration, and their largest value without one."""
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_MOST_EVENTS = 64
_TIMEOUT = 10
_RECOVERY_CHANGED = 154


def find_nvml() -> Any:
    """Return the module ``pynvml`` (package ``nvidia-ml-py``), or None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """Return the answer of an NVML function, or None if this GPU, driver or package does not have it.

    Raises:
        NVMLError: the GPU is lost, or has to be reset.
    """
    function: Callable[..., Any] | None = getattr(nvml, name, None)
    try:
        return function(*arguments) if function is not None else None
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in _LOST:
            raise
        return None


def fields(nvml: Any, handle: Any, names: Sequence[str], scope: int = 0) -> list[float | None]:
    """Return the values of NVML's numbered fields, None for those that are not there.

    Args:
        scope: number of the part of the GPU, such as that of an NVLink.
    """
    known = [name for name in names if hasattr(nvml, name)]
    asked = [(getattr(nvml, name), scope) for name in known]
    answers = ask(nvml, "nvmlDeviceGetFieldValues", handle, asked) if asked else None
    values = dict(zip(known, map(_value, answers or ()), strict=False))
    return [values.get(name) for name in names]


class Gpus:
    """Reads the GPUs of this node. Used by one thread.

    Args:
        root: root of the file tree, normally "/"; the driver names its GPUs there.
    """

    def __init__(self, nvml: Any, root: Path = Path("/")):
        self._nvml = nvml
        self._root = root
        self._events: Any = None
        self._is_open = False

    def read(self, found: HealthSource) -> None:
        """Observe all GPUs."""
        if self._nvml is None:
            found.unreadable = "the Python package nvidia-ml-py is not there"
        else:
            try:
                self._open()
                self._read_all(found)
            except Exception as error:
                found.unreadable = f"NVML: {error}"
        _name_by_driver(found, self._root)

    def news(self, found: HealthSource) -> None:
        """Observe the Xids since the last call of ``read`` or ``news``; none before the first ``read``."""
        if self._is_open:
            self._xids(found)

    def close(self) -> None:
        """Release NVML."""
        self._listen_no_more()
        if self._is_open:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._is_open = False

    def _open(self) -> None:
        if not self._is_open:
            self._nvml.nvmlInit()
            self._is_open = True
        if self._events is None:
            self._listen()

    def _listen(self) -> None:
        """Ask for the Xids of all GPUs that can be asked; vGPUs and lost GPUs have no events."""
        with contextlib.suppress(Exception):
            self._events = self._nvml.nvmlEventSetCreate()
            for index in range(self._nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(self._nvml.NVMLError):
                    handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                    self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def _listen_no_more(self) -> None:
        if self._events is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlEventSetFree(self._events)
        self._events = None

    def _read_all(self, found: HealthSource) -> None:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            self._read_one(found, index)
        self._xids(found)

    def _read_one(self, found: HealthSource, index: int) -> None:
        device = f"gpu{index}"
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._names(found, device, handle)
            self._memory(found, device, handle)
            self._heat_and_power(found, device, handle)
            self._links(found, device, handle)
            self._fabric(found, device, handle)
            found.add(device, "gpu.lost", 0)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in _UNREACHABLE:
                found.add(device, "gpu.lost", 1, text=str(error))
            else:
                found.unreadable = f"{device}: {error}"

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(self._nvml, name, *arguments)

    def _filled(self, function: str, kind: str, handle: Any) -> Any:
        """Return a structure that an NVML function has filled, or None if one of both is not there.

        Args:
            kind: name of the structure, which knows its version.
        """
        make: Callable[[], Any] | None = getattr(self._nvml, kind, None)
        if make is None:
            return None
        filled = make()
        return filled if self._ask(function, handle, ctypes.byref(filled)) is not None else None

    def _names(self, found: HealthSource, device: str, handle: Any) -> None:
        uuid = self._ask("nvmlDeviceGetUUID", handle)
        bus = getattr(self._ask("nvmlDeviceGetPciInfo", handle), "busId", None)
        for alias in (uuid, bus):
            if alias:
                name = alias.decode() if isinstance(alias, bytes) else alias
                found.aliases[name if name.startswith("GPU-") else pci_name(name)] = device

    def _memory(self, found: HealthSource, device: str, handle: Any) -> None:
        nvml = self._nvml
        for name, kind in (("corrected", 0), ("uncorrected", 1)):
            errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, kind, getattr(nvml, "NVML_VOLATILE_ECC", 0))
            found.add(device, f"gpu.ecc.{name}", errors, kind=COUNTER)
        if rows := self._ask("nvmlDeviceGetRemappedRows", handle):
            found.add(device, "gpu.rows.corrected", rows[0], kind=COUNTER)
            found.add(device, "gpu.rows.uncorrected", rows[1], kind=COUNTER)
            found.add(device, "gpu.rows.pending", int(rows[2]))
            found.add(device, "gpu.rows.failed", int(rows[3]))
        spare = self._ask("nvmlDeviceGetRowRemapperHistogram", handle)
        found.add(device, "gpu.rows.banks_without_spare", getattr(spare, "none", None))
        sram = self._filled("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t", handle)
        found.add(device, "gpu.sram.over_threshold", None if sram is None else int(bool(sram.bThresholdExceeded)))
        found.add(device, "gpu.pages.pending", self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle))
        if (action := self._recovery_action(handle)) is not None:
            found.add(device, f"gpu.recovery.{action_name(action)}", int(action != NO_ACTION))

    def _recovery_action(self, handle: Any) -> float | None:
        return fields(self._nvml, handle, ["NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"])[0]

    def _heat_and_power(self, found: HealthSource, device: str, handle: Any) -> None:
        found.add(device, "gpu.temperature", (heat := self._ask("nvmlDeviceGetTemperature", handle, 0)), "C")
        margin = self._ask("nvmlDeviceGetMarginTemperature", handle)  # to the temperature at which the GPU slows down
        limit = self._ask("nvmlDeviceGetTemperatureThreshold", handle, 1) if margin is None else None
        if margin is None and heat is not None and limit:
            margin = limit - heat
        found.add(device, "gpu.temperature.margin", margin, "C", text=f"it slows down at {limit} C" if limit else "")
        for name, function in (
            ("gpu.power", "nvmlDeviceGetPowerUsage"),
            ("gpu.power.limit", "nvmlDeviceGetEnforcedPowerLimit"),
        ):
            milliwatts = self._ask(function, handle)
            found.add(device, name, None if milliwatts is None else milliwatts / 1000, "W")
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if reasons is not None:
            for name, bit in _THROTTLED.items():
                found.add(device, name, int(bool(reasons & bit)))
            found.add(device, "gpu.throttled.hardware", int(bool(reasons & _SLOWED) and not reasons & _SLOWED_WHY))

    def _links(self, found: HealthSource, device: str, handle: Any) -> None:
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
            if is_up:
                self._link(found, f"{device}/nvlink{link}", handle, link)

    def _link(self, found: HealthSource, device: str, handle: Any, link: int) -> None:
        counts = dict(zip(_LINK_FIELDS, fields(self._nvml, handle, list(_LINK_FIELDS.values()), link), strict=True))
        for name, counter in _LINK_COUNTERS.items():
            errors = self._ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
            if errors is None:  # a GPU has all of them or none
                break
            counts[name] = errors
        for name, count in counts.items():
            found.add(device, name, count, kind=COUNTER)

    def _fabric(self, found: HealthSource, device: str, handle: Any) -> None:
        """Add what the GPU knows of the NVLink fabric, which the fabric manager sets up."""
        fabric = self._filled("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t", handle)
        if fabric is None or fabric.state not in (*_UNREADY, _COMPLETED):
            return
        status = fabric.status if fabric.state == _COMPLETED else 0
        mask = fabric.healthMask
        wrong = [fault for fault, place in _FABRIC_FAULTS.items() if mask >> place & 3 == 1]
        wrong += ["wrong configuration"] if mask >> _FABRIC_CONFIGURATION & 15 > _CONFIGURED else []
        found.add(device, "gpu.fabric.unready", int(fabric.state in _UNREADY), text=_UNREADY.get(fabric.state, ""))
        found.add(device, "gpu.fabric.failed", int(status != 0), text=f"NVML status {status}" if status else "")
        found.add(device, "gpu.fabric.unhealthy", len(wrong), text=", ".join(wrong))

    def _xids(self, found: HealthSource) -> None:
        """Observe the Xids since the last call."""
        for number, data in enumerate(self._waiting()):
            with contextlib.suppress(self._nvml.NVMLError):
                device = f"gpu{self._nvml.nvmlDeviceGetIndex(data.device)}"
                # the number makes two Xids of one reading two events
                said = f"{FROM_NVML}Xid {data.eventData} at {found.when:.3f} ({number})"
                found.add(device, self._name_of(data), data.eventData, kind=EVENT, text=said)

    def _name_of(self, data: Any) -> str:
        """Return the name of the observation of an Xid; that of Xid 154 says what the driver asks for now."""
        action = self._recovery_action(data.device) if data.eventData == _RECOVERY_CHANGED else None
        if action is None:
            return f"xid.{data.eventData}"
        return "gpu.recovered" if action == NO_ACTION else f"xid.154.{action_name(action)}"

    def _waiting(self) -> Iterator[Any]:
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                yield self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) != _TIMEOUT:
                    self._listen_no_more()  # the next reading asks again, without a GPU that is lost
                return


def _value(answer: Any) -> float | None:
    """Return the value of one of NVML's fields, or None."""
    if answer.nvmlReturn != 0 or not 0 <= answer.valueType < len(_VALUE_TYPES):
        return None
    value: float = getattr(answer.value, _VALUE_TYPES[answer.valueType])
    return value


def _name_by_driver(found: HealthSource, root: Path) -> None:
    """Name the GPUs that NVML has not named, or cannot name any more, by the driver's own files in /proc.

    NVML numbers GPUs in the order of their addresses. A GPU is only named if no other one has its number.
    """
    base = root / "proc/driver/nvidia/gpus"
    for index, folder in enumerate(folders(base)):
        device = f"gpu{index}"
        address = as_pci_address(folder.name)
        if not address or address in found.aliases:
            continue
        if any(name == device and not alias.startswith("GPU-") for alias, name in found.aliases.items()):
            continue
        found.aliases[address] = device
        for line in (text(folder / "information") or "").splitlines():
            if line.startswith("GPU UUID:") and "?" not in line:
                found.aliases.setdefault(line.split()[-1], device)
