"""Devices and networks: documented peak rates, and the share of them that is assumed to be reached."""

from dataclasses import dataclass, field

from ft.base.errors import UserError

GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU, by its data sheet.

    Args:
        flops: dense bf16 matrix products, FLOP/s (data sheets print twice that, with sparsity).
        memory: bytes.
        memory_rate: bytes/s.
        link: bytes/s to the other GPUs of its node, one way (half of what data sheets print).
        source: the data sheet.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    link: float
    source: str


@dataclass(frozen=True)
class Reached:
    """Shares of the peak rates that are reached, and latencies. ASSUMED, not measured: figures usual in reports of
    training on these devices.

    Args:
        products: of ``Device.flops``, in matrix products.
        attention: of ``Device.flops``, in fused attention.
        memory: of ``Device.memory_rate``, in elementwise operators.
        link, network: of the bandwidth in and between nodes.
        latency_s: of one collective or message.
    """

    products: float = 0.70
    attention: float = 0.45
    memory: float = 0.80
    link: float = 0.75
    network: float = 0.80
    latency_s: float = 20e-6


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Args:
        gpus: in all.
        per_node: GPUs in a node.
        network: bytes/s between nodes for each GPU, one way.
        reserved: bytes of each GPU for its context, communication buffers and fragmentation. ASSUMED.
        slowdown: every transfer takes this many times longer than by rate; 1 unless calibrated to a measured idle
            share (``calibrate.py``).
    """

    device: Device
    gpus: int
    per_node: int = 8
    network: float = 50 * GB
    reached: Reached = field(default_factory=Reached)
    reserved: float = 7.5 * GB
    slowdown: float = 1.0

    def __post_init__(self):
        if self.gpus < 1 or self.per_node < 1:
            raise UserError(f"{self.gpus} GPUs, {self.per_node} in a node", "give at least one of each")
        if self.network <= 0 or self.slowdown <= 0:
            raise UserError("a network without bandwidth carries nothing", "give a positive one")


DEVICES = {
    device.name: device
    for device in (
        Device("h200", 989e12, 141 * GB, 4.8e12, 450 * GB, "NVIDIA H200 data sheet (SXM)"),
        Device("h100", 989e12, 80 * GB, 3.35e12, 450 * GB, "NVIDIA H100 data sheet (SXM)"),
        Device("h100-nvl", 835e12, 94 * GB, 3.9e12, 300 * GB, "NVIDIA H100 NVL data sheet"),
        Device("a100", 312e12, 80 * GB, 2.039e12, 300 * GB, "NVIDIA A100 data sheet (SXM, 80 GB)"),
        Device("a100-40gb", 312e12, 40 * GB, 1.555e12, 300 * GB, "NVIDIA A100 data sheet (SXM, 40 GB)"),
    )
}

NETWORKS = {"h200": 50 * GB, "h100": 50 * GB, "h100-nvl": 50 * GB, "a100": 25 * GB, "a100-40gb": 25 * GB}
"""Bytes/s for each GPU, one way, of NVIDIA's own systems: InfiniBand NDR 400 Gb/s (DGX H100, H200), HDR 200 Gb/s
(A100)."""


def device_named(name: str) -> Device:
    """Raises:
    UserError: no device has this name.
    """
    if name not in DEVICES:
        raise UserError(f"no device is called {name!r}", f"one of: {', '.join(DEVICES)}")
    return DEVICES[name]
