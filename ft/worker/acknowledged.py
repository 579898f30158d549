"""Reports that an order has to answer, said again until it comes."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ft.job.agent.link import Link

PERIOD_S = 3.0
"""Longer than an answer takes where nothing is wrong; one that was taken before is ignored."""


@contextlib.contextmanager
def send_until_acknowledged(link: Link, report: Any, period_s: float = PERIOD_S) -> Iterator[None]:
    """Sends ``report`` and, until the block ends, sends it again every ``period_s``: if one is lost, nobody else knows
    that there was one, and all would wait for a deadline.

    Raises:
        OSError: the agent is gone.
    """
    answered = threading.Event()

    def remind() -> None:
        with contextlib.suppress(OSError):  # the link's own thread sees that the agent is gone
            while not answered.wait(period_s):
                link.send(report)

    link.send(report)
    with contextlib.suppress(RuntimeError):  # no memory for a thread may be what the report is about
        threading.Thread(target=remind, name="ft-remind", daemon=True).start()
    try:
        yield
    finally:
        answered.set()
