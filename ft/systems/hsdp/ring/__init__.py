"""Fault-tolerant all-reduce (FTAR) of gradients between FT-HSDP replicas (FT-HSDP, section 4.2).

The public class is :class:`ft.systems.hsdp.ring.ring.Ring`.
"""

from ft.systems.hsdp.ring.options import Pending, ReduceResult, RingOptions
from ft.systems.hsdp.ring.ring import Ring

__all__ = ["Pending", "ReduceResult", "Ring", "RingOptions"]
