"""The fault-tolerant all-reduce: see :class:`ft.hsdp.ring.ring.Ring`."""

from ft.hsdp.ring.options import RingOptions
from ft.hsdp.ring.outcome import Outcome, Pending
from ft.hsdp.ring.ring import Ring

__all__ = ["Outcome", "Pending", "Ring", "RingOptions"]
