"""Reads network ports from /sys: InfiniBand and RoCE ports with their error counters, and Ethernet interfaces."""

import re
from pathlib import Path

from ft.platform.health.files import Source, folders, number, pci_address, text
from ft.platform.health.observation import COUNTER

_PORT_COUNTERS = (
    *("symbol_error", "link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors"),
    *("port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_wait"),
    *("port_rcv_constraint_errors", "excessive_buffer_overrun_errors", "VL15_dropped"),
)
_HARDWARE_COUNTERS = (
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err"),
    *("rx_icrc_encapsulated", "out_of_buffer", "req_cqe_error", "resp_cqe_error", "req_remote_access_errors"),
    *("roce_adp_retrans", "roce_slow_restart", "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"),
)
_INTERFACE_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_dropped", "tx_dropped", "tx_carrier_errors")
_LINK_UP, _INFINIBAND_DOWN = "4", "3"


def read(root: Path, node: str, when: float) -> Source:
    """Return the observations of all network ports that are devices, not software.

    Args:
        root: root of the file tree, normally "/".
        node: name of the node.
        when: wall time in seconds since 1970.
    """
    found = Source(node, when)
    for adapter in folders(root / "sys/class/infiniband"):
        for port in folders(adapter / "ports"):
            _read_port(found, f"{adapter.name}/{port.name}", port)
        if address := pci_address(adapter / "device"):
            found.aliases[address] = adapter.name
    for interface in folders(root / "sys/class/net"):
        if (interface / "device").exists():
            _read_interface(found, interface)
            if address := pci_address(interface / "device"):
                found.aliases.setdefault(address, interface.name)
    if not found.observations:
        found.unreadable = "there is no InfiniBand, RoCE or Ethernet device in /sys/class"
    return found


def _read_port(found: Source, device: str, port: Path) -> None:
    state, physical = (text(port / name) or "" for name in ("state", "phys_state"))
    if state:
        found.add(device, "port.up", int(state.startswith(_LINK_UP)), text=state)
    if physical:  # a port whose administrator has disabled it is down on purpose
        found.add(device, "port.disabled", int(physical.startswith(_INFINIBAND_DOWN)), text=physical)
    speed = re.match(r"([\d.]+) Gb/sec", text(port / "rate") or "")
    found.add(device, "port.rate", float(speed[1]) if speed else None, "Gb/s")
    for name in _PORT_COUNTERS:
        found.add(device, f"port.{name}", number(port / "counters" / name), kind=COUNTER)
    for name in _HARDWARE_COUNTERS:
        found.add(device, f"port.{name}", number(port / "hw_counters" / name), kind=COUNTER)


def _read_interface(found: Source, interface: Path) -> None:
    device, state = interface.name, text(interface / "operstate")
    if state in ("up", "down"):
        found.add(device, "interface.up", int(state == "up"))
    rate = number(interface / "speed") if state == "up" else None
    found.add(device, "interface.rate", rate / 1000 if rate and rate > 0 else None, "Gb/s")
    found.add(device, "interface.carrier_downs", number(interface / "carrier_down_count"), kind=COUNTER)
    for name in _INTERFACE_COUNTERS:
        found.add(device, f"interface.{name}", number(interface / "statistics" / name), kind=COUNTER)
