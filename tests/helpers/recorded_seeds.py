"""The seeds at which simulations have found their planted bugs, so that tests need not search again each time."""

import re
from collections.abc import Iterator
from pathlib import Path

_RESULTS = Path(__file__).parent.parent.parent / "tools" / "experiments" / "results"
_LIMIT = 1000


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
