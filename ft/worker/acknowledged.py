"""Sends a worker's report to the control plane repeatedly until it is acknowledged (at-least-once delivery)."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ft.job.agent.link import Link

PERIOD_S = 3.0
"""Seconds between two transmissions: longer than an answer usually takes. The receiver ignores duplicates."""


@contextlib.contextmanager
def send_until_acknowledged(link: Link, report: Any, period_s: float = PERIOD_S) -> Iterator[None]:
    """Send ``report``, and send it again every ``period_s`` seconds until the ``with`` block ends.

    The block has to wait for the control plane's order that answers the report. Without repetition, a lost report would
    make all workers wait until a timeout expires.

    Raises:
        OSError: the connection to the node agent is closed.
    """
    answered = threading.Event()

    def remind() -> None:
        with contextlib.suppress(OSError):  # the receiving thread of the link detects the agent's death
            while not answered.wait(period_s):
                link.send(report)

    link.send(report)
    # the reported failure may be exhausted memory, so that no thread can be started
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=remind, name="ft-remind", daemon=True).start()
    try:
        yield
    finally:
        answered.set()
