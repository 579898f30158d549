"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LIMIT_S = 180.0
T = TypeVar("T")


def eventually(
    find: Callable[[], T], why: str | Callable[[], object] = "", limit_s: float = LIMIT_S, pause_s: float = 0.01
) -> T:
    """Call ``find`` until it returns something true, and return that.

    Args:
        find: what is waited for.
        why: what to say if it does not come about, or a function that returns it.
        limit_s: seconds after which the test fails.
        pause_s: seconds between two calls.
    """
    deadline = time.monotonic() + limit_s
    while not (found := find()):
        assert time.monotonic() < deadline, why() if callable(why) else f"not within {limit_s:g} s: {why}"
        time.sleep(pause_s)
    return found


def at_once(work: Callable[..., T], *given: Iterable) -> list[T]:
    """Call ``work`` with each of the values, as ``map`` does, each call in a thread; return what the calls return."""
    calls = list(zip(*given, strict=True))
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: work(*call), calls))
