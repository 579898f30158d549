"""What NVIDIA's driver asks for after a fault of a GPU: the names of its recovery actions.

The same numbers stand in the text of Xid 154 and in NVML's field for the recovery action.
"""

ACTIONS = (
    *("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset"),
    "system_reboot",
)
"""Names of the actions by their numbers (NVML's enumeration ``nvmlDeviceGpuRecoveryAction_t``)."""
UNKNOWN = "unknown"
NONE = 0


def name_of(number: float) -> str:
    """Return the name of an action; UNKNOWN if the number is one of a newer driver."""
    return ACTIONS[int(number)] if 0 <= number < len(ACTIONS) else UNKNOWN
