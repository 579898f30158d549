"""Describe the GPUs and networks of ``ft dmr estimate``: documented peak rates, and assumed achieved shares of them."""

from dataclasses import dataclass, field

from ft.base.errors import UserError

GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU as described by its data sheet.

    Attributes:
        name: name for the command line.
        flops: dense bf16 FLOP/s of matrix products (data sheets print twice that, for sparse matrices).
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
class AchievedShares:
    """Achieved shares of the peak rates, and latency.

    These are ASSUMED, not measured: they are usual in reports of training on these devices.

    Attributes:
        products: share of ``Device.flops`` in matrix products.
        attention: share of ``Device.flops`` in fused attention.
        memory: share of ``Device.memory_rate`` in elementwise operators.
        link: share of the bandwidth within a node.
        network: share of the bandwidth between nodes.
        latency_s: latency of one collective or message in seconds.
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

    Attributes:
        device: the GPU.
        gpus: number of GPUs in all.
        per_node: number of GPUs in a node.
        network: bytes/s between nodes for each GPU, one way.
        reached: achieved shares of the peak rates.
        reserved: bytes of each GPU for its context, communication buffers and fragmentation. ASSUMED.
        slowdown: factor on the time of every transfer; 1 unless calibrated to a measured share (``answer.py``).
    """

    device: Device
    gpus: int
    per_node: int = 8
    network: float = 50 * GB
    reached: AchievedShares = field(default_factory=AchievedShares)
    reserved: float = 7.5 * GB
    slowdown: float = 1.0

    def __post_init__(self):
        if self.gpus < 1 or self.per_node < 1:
            raise UserError(f"{self.gpus} GPUs, {self.per_node} in a node", "give at least one of each")
        if self.network <= 0 or self.slowdown <= 0:
            raise UserError("the bandwidth of the network must be above 0", "give a positive one")


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
"""Bytes/s for each GPU, one way, in NVIDIA's own systems: InfiniBand NDR 400 Gb/s (DGX H100, H200) and HDR 200 Gb/s
(A100).
"""


def device_named(name: str) -> Device:
    """Return the device called ``name``.

    Raises:
        UserError: no device has this name.
    """
    if name not in DEVICES:
        raise UserError(f"there is no device {name!r}", f"one of: {', '.join(DEVICES)}")
    return DEVICES[name]
