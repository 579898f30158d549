"""Fault-tolerant all-reduce (FTAR) of gradients between FT-HSDP replicas (FT-HSDP, section 4.2).

The public class is :class:`ft.systems.hsdp.ring.ring.Ring`.
"""

from ft.systems.hsdp.ring.options import Outcome, Pending, RingOptions
from ft.systems.hsdp.ring.ring import Ring

__all__ = ["Outcome", "Pending", "Ring", "RingOptions"]
