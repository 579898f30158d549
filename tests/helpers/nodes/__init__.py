"""Simulated hosts on one machine: network namespaces, connected by a network that fails on command.

Real IP packets of real TCP connections go through a router written in Python, which loses, delays, throttles or blocks
them (the kernel's own means for that, netem, is not available everywhere). The namespaces have no names on this
machine: all of them disappear with the process that made them, however it ends.
"""

from nodes.lab import Host, Lab, why_not

__all__ = ["Host", "Lab", "why_not"]
