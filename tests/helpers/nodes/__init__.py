"""Hosts on one machine: network namespaces, and between them a network that fails on command.

Real IP packets of real TCP connections go through a router of a few lines of Python, which loses, delays, throttles or
swallows them (the kernel's own means for that, netem, is not everywhere). Nothing has a name on this machine: all of it
is gone with the process that made it, however that ends.
"""

from nodes.lab import Host, Lab, why_not

__all__ = ["Host", "Lab", "why_not"]
