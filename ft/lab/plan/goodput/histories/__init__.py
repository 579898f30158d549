"""Published and recorded histories of failures, and what they say about another cluster.

A history is a CSV file with the columns ``cause``, ``count`` and ``kind`` (node, software, rack, switch or power), or
with ``time_s``, ``cause`` and ``kind`` for failures with their times; lines ``# key: value`` before them say how many
``gpus`` failed within how many ``hours``, and the ``source``.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ft.base import files
from ft.base.errors import UserError

KINDS = {"node": 1, "software": 0, "rack": 16, "switch": 32, "power": 64}
"""Kind of a failure -> number of neighbouring nodes that it takes."""


@dataclass(frozen=True)
class FailureCause:
    """What fails together, and how often.

    Attributes:
        name: its name.
        mtbf_s: mean seconds between two failures of one such part.
        taken: nodes that a failure takes; 0: a process crashes and no node is lost.
        per: number of nodes that have one such part.
        repair_s: mean seconds until the nodes are back.
    """

    name: str
    mtbf_s: float
    taken: int
    per: int
    repair_s: float

    def rate(self, nodes: int) -> float:
        """Return the failures per second of a number of nodes."""
        return math.ceil(nodes / self.per) / self.mtbf_s


@dataclass(frozen=True)
class FailureHistory:
    """Failures that were recorded.

    Attributes:
        name: name or path.
        source: where they were published.
        gpus: GPUs of the job. ``hours``: its duration.
        counts: (cause, kind) -> number of failures.
        times: (seconds, kind) of each failure, if they are known.
    """

    name: str
    source: str
    gpus: int
    hours: float
    counts: dict[tuple[str, str], float]
    times: tuple[tuple[float, str], ...] = ()

    def causes(
        self, gpus_per_node: int, repair_s: float, domain_s: float, sizes: Mapping[str, int | None]
    ) -> list[FailureCause]:
        """Return the causes with their rates per node, one for each kind.

        Args:
            gpus_per_node: GPUs of a node of the cluster that is asked about.
            repair_s: mean seconds until a failed node is back.
            domain_s: the same for the nodes of a rack, switch or power line.
            sizes: kind -> nodes of such a domain of that cluster; where it is unknown, those of ``KINDS``.
        """
        totals: dict[str, float] = {}
        for (_, kind), number in self.counts.items():
            totals[kind] = totals.get(kind, 0.0) + number
        node_seconds = self.gpus / gpus_per_node * self.hours * 3600.0
        found = []
        for kind, number in totals.items():
            taken = sizes.get(kind) or KINDS[kind]
            per = max(1, taken)
            repair = repair_s if kind == "node" else 0.0 if kind == "software" else domain_s
            found.append(FailureCause(f"{kind} ({self.name})", node_seconds / per / number, taken, per, repair))
        return found


def names() -> list[str]:
    """Return the names of the published histories."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.csv"))


def history(name: str) -> FailureHistory:
    """Return a published history, or one from a CSV file.

    Raises:
        UserError: there is no such history, or the file cannot be read.
    """
    path = Path(__file__).parent / f"{name}.csv" if name in names() else Path(name)
    fix = f"give one of {', '.join(names())}, or a CSV file with the columns cause, count and kind"
    try:
        text = files.read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--history {name} cannot be read: {error}", fix) from error
    lines = text.splitlines()
    about = dict(line[1:].split(":", 1) for line in lines if line.startswith("#") and ":" in line)
    about = {key.strip(): value.strip() for key, value in about.items()}
    try:
        rows = list(csv.DictReader(line for line in lines if line.strip() and not line.startswith("#")))
        return _history(name, about, rows)
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"--history {name}: {error!r}", f"{fix}, and lines # gpus: N and # hours: H") from error


def _history(name: str, about: dict[str, str], rows: Iterable[dict[str, str]]) -> FailureHistory:
    counts: dict[tuple[str, str], float] = {}
    times = []
    for row in rows:
        kind = (row.get("kind") or "node").strip()
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
        cause = (row.get("cause") or kind).strip()
        number = 1.0 if "time_s" in row else float(row["count"])
        if not 0.0 < number < math.inf:
            raise ValueError(f"count {row['count']} of {cause}")
        counts[cause, kind] = counts.get((cause, kind), 0.0) + number
        if "time_s" in row:
            times.append((float(row["time_s"]), kind))
    gpus, hours = int(about["gpus"]), float(about.get("hours") or max(times)[0] / 3600.0)
    if not counts or gpus < 1 or not 0.0 < hours < math.inf:
        raise ValueError("no failures, no GPUs or no time")
    return FailureHistory(name, about.get("source", name), gpus, hours, counts, tuple(sorted(times)))
