"""Plays one seed of a simulation, here or in a process of its own; and the seeds at which planted bugs were found."""

import re
from collections.abc import Iterator

from pythons import ROOT, python

_RESULTS = ROOT / "tools" / "experiments" / "results"
_LIMIT = 1000


def told(name, seed, hash_seed):
    """Return what a process of its own prints of one seed of the simulation ``name``, and its exit code."""
    done = python("-m", "tests.simulation", name, "--seed", seed, PYTHONHASHSEED=str(hash_seed))
    return done.stdout, done.returncode


def holds(simulation, seed, options=None):
    """Play one seed and return its history, in which no invariant may be violated."""
    print("seed", seed)
    history = simulation.play(seed, options)
    assert not history.violation, f"python -m tests.simulation {simulation.name} --seed {seed}: {history.violation}"
    return history


def seeds_to_try(simulation: str, title: str) -> Iterator[int]:
    """Yield the recorded seed of a planted bug, and then all seeds below 1000 in order.

    A change of the simulated code may change the histories; then the bug is found by the search.

    Args:
        simulation: "control" or "hsdp_protocol".
        title: title of the planted bug.
    """
    recorded = (_RESULTS / f"simulate_{simulation}.txt").read_text()
    if line := re.search(rf"^  {re.escape(title)} +(\d+)$", recorded, re.MULTILINE):
        yield int(line[1])
    yield from range(_LIMIT)
