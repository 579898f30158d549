"""Pauses between attempts that fail: each is twice as long as the one before, up to a limit."""


def doubled(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds after a failure.

    Args:
        first_s: pause after the first of them, in seconds.
    """
    return min(first_s * 2.0 ** min(failures - 1, 64), longest_s)


class Backoff:
    """Counts failures in a row, and computes how long to wait after each."""

    def __init__(self, first_s: float, longest_s: float):
        self._first_s, self._longest_s = first_s, longest_s
        self._failures = 0

    def reset(self) -> None:
        """Record a success."""
        self._failures = 0

    def failed(self) -> float:
        """Record a failure, and return the pause before the next attempt in seconds."""
        self._failures += 1
        return doubled(self._failures, self._first_s, self._longest_s)
