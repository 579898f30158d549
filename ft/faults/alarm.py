"""Faults that come by the clock."""

import threading
import time
from collections.abc import Callable, Sequence

from ft.faults.faults import Fault


class Alarm:
    """A daemon thread that calls ``ring(fault)`` for each fault when its time has come.

    Args:
        faults: with a ``time``. began: the wall time that their times count from. A fault whose time has passed rings
            at once: its victim was away when it was due.
    """

    def __init__(self, faults: Sequence[Fault], began: float, ring: Callable[[Fault], None]):
        self._faults = sorted(faults, key=lambda fault: fault.time)
        # The wall clock places the start between hosts; from here on it may be set without moving a fault.
        self._began = time.monotonic() - max(0.0, time.time() - began)
        self._ring = ring
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-faults", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        for fault in self._faults:
            if self._stop.wait(max(0.0, self._began + fault.time - time.monotonic())):
                return
            self._ring(fault)
