"""Placement of peer copies, such that no single failure destroys a state and all its copies (DEADPOOL, section V-C).

A peer copy is a copy of one rank's training state (the owner's) in the host memory of another rank (the holder). A
failure domain is a set of nodes that can fail together: a node, a rack, a switch, a power feed.

``assign`` chooses k holders for every logical rank, such that owner and holders are in k + 1 different failure domains,
and describes in words what a placement does not achieve.

All functions are pure functions of the map of ranks to nodes, with equal results on every rank. The failure domains of
the nodes are read by :mod:`ft.platform.slurm`.
"""

from collections.abc import Mapping

Where = Mapping[int, Mapping[str, str]]
"""The failure domains of each logical rank: rank -> kind of domain (such as "rack") -> name of the domain. One of the
kinds is "node"."""
