"""Sends a report again and again until an order acknowledges it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ft.job.agent.link import Link

PERIOD_S = 3.0
"""Seconds between two sends: longer than an answer usually takes. The receiver ignores duplicates."""


@contextlib.contextmanager
def send_until_acknowledged(link: Link, report: Any, period_s: float = PERIOD_S) -> Iterator[None]:
    """Send ``report``, and send it again every ``period_s`` seconds until the ``with`` block ends.

    If a report were lost, no other process would know of it, and all would wait for a deadline.

    Raises:
        OSError: the agent is gone.
    """
    answered = threading.Event()

    def remind() -> None:
        with contextlib.suppress(OSError):  # the link's own thread notices that the agent is gone
            while not answered.wait(period_s):
                link.send(report)

    link.send(report)
    # the report may be about exhausted memory, so that no thread can be started
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=remind, name="ft-remind", daemon=True).start()
    try:
        yield
    finally:
        answered.set()
