"""Which replicas are in a step (FT-HSDP, sections 4.1 and 4.3): the leaders report, the server decides.

``decide.decide`` is all of the judgement, free of I/O, clocks and chance; ``server`` is the process around it,
``client`` a leader's end of the wire, ``spread`` the way from a leader to the ranks of its replica.
"""

from ft.job.quorum.client import FailureNotice, QuorumClient
from ft.job.quorum.limits import Limits
from ft.job.quorum.values import NoQuorum, Quorum, Report

__all__ = ["FailureNotice", "Limits", "NoQuorum", "Quorum", "QuorumClient", "Report"]
