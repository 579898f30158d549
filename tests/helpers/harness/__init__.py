"""Distributed tests that import torch only once: a warm server process forks the ranks of every test.

A test asks for the fixture ``ranks`` and passes it a function of its own module::

    def gather_ranks():
        ...

    def test_gather(ranks):
        assert ranks(gather_ranks, 4) == [[0, 1, 2, 3]] * 4

See :class:`harness.client.Ranks` for its guarantees, and :class:`harness.handle.Handle` for killing ranks.
"""

from harness.client import Ranks
from harness.handle import Handle, Outcome, RankFailed, RanksHung, RanksLeftBehind

__all__ = ["Handle", "Outcome", "RankFailed", "Ranks", "RanksHung", "RanksLeftBehind"]
