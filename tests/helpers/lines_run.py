"""How much work a function does, in lines of Python instead of seconds, which depend on the machine's load."""

import sys
from collections.abc import Callable


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python ``work`` runs; each round of a loop counts."""
    work()  # what Python does once only, such as imports, is done
    found, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal found
        found += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return found
