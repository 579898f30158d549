"""Estimate the seconds of operators and transfers with a roofline model.

An operator takes its arithmetic time or its memory time, whichever is longer. The rates (FLOP/s, bytes/s) are assumed
shares of the documented peak rates.
"""

from ft.lab.estimate.block import Transfer, Work
from ft.lab.estimate.clusters import Cluster


def seconds(step: Work | Transfer, cluster: Cluster) -> float:
    """Return the seconds of an operator, or of a collective within a node."""
    if isinstance(step, Transfer):
        return transfer_seconds(step.sent, cluster.device.link * cluster.reached.link, cluster)
    reached, device = cluster.reached, cluster.device
    share = reached.attention if step.kind == "attention" else reached.products
    return max(step.flops / (device.flops * share), read_seconds(step.moved, cluster))


def read_seconds(size: float, cluster: Cluster) -> float:
    """Return the seconds of reading (or writing) ``size`` bytes of the device's memory."""
    return size / (cluster.device.memory_rate * cluster.reached.memory)


def transfer_seconds(sent: float, rate: float, cluster: Cluster) -> float:
    """Return the seconds of sending ``sent`` bytes at ``rate`` bytes/s; 0 where nothing is sent."""
    return (sent / rate + cluster.reached.latency_s) * cluster.slowdown if sent else 0.0


def message_seconds(sent: float, same_node: bool, cluster: Cluster) -> float:
    """Return the seconds of a message of ``sent`` bytes between two pipeline stages.

    Args:
        sent: size of the message in bytes.
        same_node: whether both stages are on one node.
        cluster: rates of the links.
    """
    device, reached = cluster.device, cluster.reached
    rate = device.link * reached.link if same_node else cluster.network * reached.network
    return transfer_seconds(sent, rate, cluster)
