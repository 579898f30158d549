"""Reads disks: the state of NVMe controllers, errors that disks count, and free space in folders that a run needs."""

import os
from collections.abc import Sequence
from pathlib import Path

from ft.platform.health.files import Source, folders, number, pci_address, text
from ft.platform.health.observation import COUNTER


def read(root: Path, node: str, when: float, watched: Sequence[Path] = ()) -> Source:
    """Return the observations of the disks.

    Args:
        root: root of the file tree, normally "/".
        node: name of the node.
        when: wall time in seconds since 1970.
        watched: folders whose free space and writability are observed.
    """
    found = Source(node, when)
    for controller in folders(root / "sys/class/nvme"):
        state = text(controller / "state")
        if state is not None:
            found.add(controller.name, "disk.live", int(state == "live"), text=state)
        for sensor in folders(controller):
            if sensor.name.startswith("hwmon"):
                heat = number(sensor / "temp1_input")
                found.add(controller.name, "disk.temperature", None if heat is None else heat / 1000, "C")
        if address := pci_address(controller / "device"):
            found.aliases[address] = controller.name
    for disk in folders(root / "sys/block"):
        found.add(disk.name, "disk.errors", number(disk / "device/ioerr_cnt"), kind=COUNTER)
    for folder in watched:
        _read_folder(found, folder)
    if not found.observations:
        found.unreadable = "no disk reports a state or errors"
    return found


def _read_folder(found: Source, folder: Path) -> None:
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        found.add(str(folder), "disk.unreachable", 1, text=str(error))
        return
    if disk.f_blocks:
        found.add(str(folder), "disk.free", disk.f_bavail * disk.f_frsize, "bytes")
        found.add(str(folder), "disk.free_share", disk.f_bavail / disk.f_blocks)
    if disk.f_files:
        found.add(str(folder), "disk.free_inodes_share", disk.f_favail / disk.f_files)
    found.add(str(folder), "disk.read_only", int(bool(disk.f_flag & os.ST_RDONLY)))
