"""A planted file tree of /sys, /proc and /dev, with what a node says of itself, for tests of health."""

from pathlib import Path

HEALTHY = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "2",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "0",
    "sys/class/infiniband/mlx5_0/ports/1/hw_counters/local_ack_timeout_err": "7",
    "sys/class/net/eth0/device/vendor": "0x15b3",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "100000",
    "sys/class/net/eth0/statistics/rx_errors": "0",
    "sys/class/net/docker0/operstate": "down",
    "sys/devices/system/edac/mc/mc0/ce_count": "3",
    "sys/devices/system/edac/mc/mc0/ue_count": "0",
    "sys/devices/system/edac/mc/mc0/dimm1/dimm_label": "CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
    "sys/devices/system/edac/mc/mc0/dimm1/dimm_ce_count": "3",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "sys/devices/system/cpu/present": "0-3",
    "sys/devices/system/cpu/online": "0-3",
    "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "0",
    "sys/devices/system/cpu/cpu0/topology/physical_package_id": "0",
    "sys/class/nvme/nvme0/state": "live",
    "sys/class/nvme/nvme0/hwmon1/temp1_input": "41850",
    "sys/block/sda/device/ioerr_cnt": "0x1f",
    "sys/bus/pci/devices/0000:08:00.0/aer_dev_correctable": "RxErr 3\nBadTLP 0\nTOTAL_ERR_COR 3",
    "sys/bus/pci/devices/0000:08:00.0/aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0",
    "sys/bus/pci/devices/0000:08:00.0/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0",
    "sys/bus/pci/devices/0000:08:00.0/current_link_width": "16",
    "sys/bus/pci/devices/0000:08:00.0/max_link_width": "16",
    "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    400 kB\nHardwareCorrupted:     0 kB",
    "proc/vmstat": "nr_free_pages 12\noom_kill 1",
    "dev/kmsg": "6,1,1000000,-;Linux version 6.8",
}
"""Path below the root -> content."""


def plant(root: Path, changes: dict[str, str] | None = None) -> Path:
    """Write a healthy node's tree with ``changes`` (path -> content) below ``root``, and return ``root``."""
    for path, content in {**HEALTHY, **(changes or {})}.items():
        change(root, path, content)
    device = root / "sys/class/infiniband/mlx5_0/device"
    if not device.is_symlink():
        device.symlink_to("../../../bus/pci/devices/0000:08:00.0")
    return root


def gpus(root: Path, *addresses: str) -> None:
    """Write what NVIDIA's driver says of its GPUs in /proc; the unique ids are "GPU-of-<address>"."""
    for number, address in enumerate(addresses):
        lines = (
            "Model: \t\t NVIDIA H100 80GB HBM3",
            f"GPU UUID: \t GPU-of-{address}",
            f"Bus Location: \t {address}",
            f"Device Minor: \t {number}",
        )
        change(root, f"proc/driver/nvidia/gpus/{address}/information", "\n".join(lines))


def change(root: Path, path: str, content: str) -> None:
    """Write one file of the tree."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    fresh = (root / path).with_name("fresh")
    fresh.write_text(content + "\n")
    fresh.rename(root / path)  # a reader finds the old content or the new one


def log(root: Path, *lines: str) -> None:
    """Append lines to the kernel log of the tree."""
    with (root / "dev/kmsg").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
