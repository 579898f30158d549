"""Observations by which faults are detected, as calls of the failure policy ``ft.faults.verdict``."""

from collections.abc import Callable
from functools import partial

from ft.faults import verdict
from ft.faults.verdict import Verdict


def error(*kinds: str, says: str = "") -> Callable[[], Verdict]:
    """Return the classification of an exception whose class and base classes have the names ``kinds``."""
    return partial(verdict.of_error, list(kinds), says)


def ended(code: int) -> Callable[[], Verdict]:
    """Return the classification of the end of a process with exit code ``code`` (-N: killed by signal N)."""
    return partial(verdict.of_exit, code)


LOST = partial(verdict.of_lost_agent, "n1", "nothing was heard of its agent")
"""Classification of a lost node."""
SILENT = "no heartbeat for"
"""Beginning of the message about missing heartbeats."""
