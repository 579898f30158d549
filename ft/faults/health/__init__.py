"""Judges what a node says of itself: rules as data, from an observation to the class of fault and what to do.

The readings are those of :mod:`ft.platform.health`. Everything here is pure: no clock, no I/O.
"""

from ft.faults.health.findings import Finding, informed, rules
from ft.faults.health.rows import ACTIONS, DRAIN, EVICT, GPU_RULES, NODE_RULES, WATCH, Rule

RULES: tuple[Rule, ...] = GPU_RULES + NODE_RULES
"""All rules; of the rules for an observation, the first that fits it applies."""

__all__ = ["ACTIONS", "DRAIN", "EVICT", "RULES", "WATCH", "Finding", "Rule", "informed", "rules"]
