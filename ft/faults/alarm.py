"""Timer for the faults that are planned for a time instead of a step."""

import threading
import time
from collections.abc import Callable, Sequence

from ft.faults.faults import Fault


class Alarm:
    """A daemon thread that calls ``ring(fault)`` when the time of a fault has come.

    If the time of a fault has already passed, it happens at once: its victim did not run when it was due.

    Args:
        faults: planned faults that have a ``time``.
        began: wall-clock time in seconds from which their times count.
        ring: called with each fault.
    """

    def __init__(self, faults: Sequence[Fault], began: float, ring: Callable[[Fault], None]):
        self._faults = sorted(faults, key=lambda fault: fault.time)
        # The wall clock is used only once, because hosts share it; later changes of it do not move a fault.
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
