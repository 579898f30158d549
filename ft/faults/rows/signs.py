"""What gives a fault away, as the control plane would judge it."""

from collections.abc import Callable
from functools import partial

from ft.faults import verdict
from ft.faults.verdict import Verdict


def error(*kinds: str, says: str = "") -> Callable[[], Verdict]:
    """An exception of one's own."""
    return partial(verdict.of_error, list(kinds), says)


def ended(code: int) -> Callable[[], Verdict]:
    """The end of a process."""
    return partial(verdict.of_exit, code)


LOST = partial(verdict.of_lost_agent, "n1", "nothing was heard of its agent")
SILENT = "no heartbeat for"
