"""Quorum service: decide which replicas take part in each training step (FT-HSDP, sections 4.1 and 4.3).

The leader of a replica is the rank that asks the quorum server, on behalf of the replica, for the members of the next
step (the quorum). A life is one world of a replica's worker processes; a term is the number of a server, claimed as in
a leader election. ``decide.decide`` makes the decision as a pure function, without I/O, clocks or randomness.
``server`` is the process around this function, and ``client`` is a leader's end of the protocol.
"""

from ft.job.quorum.client import GIVEN_UP, REPAIRS, QuorumClient, ReplicaNotice
from ft.job.quorum.limits import Limits
from ft.job.quorum.values import EPOCHS, NoQuorum, Quorum, Report

__all__ = ["EPOCHS", "GIVEN_UP", "REPAIRS", "Limits", "NoQuorum", "Quorum", "QuorumClient", "ReplicaNotice", "Report"]
