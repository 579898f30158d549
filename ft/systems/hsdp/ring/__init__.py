"""Fault-tolerant all-reduce across replicas (FTAR; FT-HSDP, section 4.2): see
:class:`ft.systems.hsdp.ring.ring.Ring`.
"""

from ft.systems.hsdp.ring.options import RingOptions
from ft.systems.hsdp.ring.outcome import Outcome, Pending
from ft.systems.hsdp.ring.ring import Ring

__all__ = ["Outcome", "Pending", "Ring", "RingOptions"]
