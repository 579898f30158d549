"""Reads what a node says of itself: its GPUs, network ports, memory, disks, clock, processors and kernel log.

``gpus`` and ``kernel_log`` read drivers, ``reader`` reads the rest and collects all. Each takes the root of the file
tree, or the NVML module, as an argument, and returns observations. Nothing here judges them: the rules are in
:mod:`ft.faults.health`.
"""

from ft.platform.health.observation import COUNTER, EVENT, GAUGE, CounterGrowth, Observation, Reading, differences
from ft.platform.health.reader import Reader

__all__ = ["COUNTER", "EVENT", "GAUGE", "CounterGrowth", "Observation", "Reader", "Reading", "differences"]
