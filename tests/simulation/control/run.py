"""The simulation of the control plane: how a seed becomes a cluster with faults, and the report of many histories."""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import wrap

from ft.job.control.state import CLOSED, GATHERING, OPENED, REPAIRING, RESUMING, RUNNING
from tests.simulation.campaign import Simulation, Summary
from tests.simulation.control.cluster import Cluster
from tests.simulation.control.faults import KINDS, Schedule
from tests.simulation.control.mutants import PLANTS
from tests.simulation.control.shape import draw_shape
from tests.simulation.engine import Options

PHASES = (GATHERING, RUNNING, CLOSED, OPENED, REPAIRING, RESUMING)
"""Phases of the control plane, in the order of the report's columns."""


@contextmanager
def world(seed: int, options: Options, lines: list[str] | None) -> Iterator[Cluster]:
    """Yield the cluster of a seed, before its run."""
    rng = random.Random(seed)
    shape, schedule = draw_shape(rng, options.ranks), Schedule(rng, options.faults, options.kinds)
    if lines is not None:
        lines.append(f"seed {seed}: {shape}")
        lines.append("planned faults: " + (", ".join(kind.name for kind in schedule.kinds) or "none"))
    needs_journal = schedule.may_end_control
    with tempfile.TemporaryDirectory(prefix="ft-simulate-") if needs_journal else nullcontext() as folder:
        yield Cluster(rng, shape, schedule, Path(folder) / "journal.jsonl" if needs_journal else None, lines)


def report(summary: Summary) -> list[str]:
    """Return the lines of the report that are about this simulation."""
    count, messages = summary.counts, ", ".join(f"{kind} {number}" for kind, number in summary.messages.most_common())
    return [
        f"{sum(summary.struck.values())} faults, {count['epochs']} epochs, {count['restarts']} warm restarts, "
        f"{count['crashes']} deaths of the control plane, {count['redone']} committed steps done again",
        "",
        "histories by outcome",
        *(f"{number:8d}  {outcome}" for outcome, number in summary.outcomes.most_common()),
        "",
        *_faults(summary.struck),
        "",
        "reports taken in and orders given, by kind",
        *wrap(messages, 116, initial_indent="  ", subsequent_indent="  "),
    ]


def _faults(struck: Counter) -> list[str]:
    """Return a table of faults: a row per kind, a column per phase of the control plane."""
    phases = [*PHASES, *sorted({phase for _, phase in struck} - set(PHASES))]
    width = max((len(kind) for kind, _ in struck), default=10)
    lines = [f"{'faults by the phase they struck in':{width}s}  " + "".join(f"{phase[:10]:>11s}" for phase in phases)]
    for kind in sorted({kind for kind, _ in struck}):
        lines.append(f"{kind:{width}s}  " + "".join(f"{struck[kind, phase]:11d}" for phase in phases))
    return lines


SIMULATION = Simulation(
    "control",
    "The control plane's decisions under simulated faults: plays histories of simulated clusters, each from its seed, "
    "with the production code of the control plane and of the workers' protocol in them, and checks that training is "
    "right in all of them and that none hangs.",
    KINDS,
    most=9,
    world=world,
    mutants=PLANTS,
    report=report,
    columns=(50, 110),
    ranks=(2, 64),
)
