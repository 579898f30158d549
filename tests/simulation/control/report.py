"""Summary of many simulated runs ("histories"), as text."""

from collections import Counter
from dataclasses import dataclass, field
from textwrap import wrap

from ft.job.control.state import CLOSED, GATHERING, OPENED, REPAIRING, RESUMING, RUNNING
from tests.simulation.control.run import History

PHASES = (GATHERING, RUNNING, CLOSED, OPENED, REPAIRING, RESUMING)
"""Phases of the control plane, in the order of the report's columns."""


@dataclass
class Summary:
    """Totals over simulated runs.

    Attributes:
        histories: number of runs.
        outcomes: number of runs by outcome.
        struck: number of faults by (kind, phase of the control plane).
        virtual_s: sum of the runs' durations, in virtual seconds.
        restarts: number of warm restarts (all workers are killed and started from the last checkpoint).
        epochs: number of epochs opened (an epoch is a version of the map from logical ranks to workers).
        redone: number of committed steps that were executed again.
        crashes: number of deaths of the control plane.
        messages: number of reports processed and orders published, by type.
        failed: seed -> violation.
    """

    histories: int = 0
    outcomes: Counter = field(default_factory=Counter)
    struck: Counter = field(default_factory=Counter)
    virtual_s: float = 0.0
    restarts: int = 0
    epochs: int = 0
    redone: int = 0
    crashes: int = 0
    messages: Counter = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, history: History) -> None:
        self.histories += 1
        self.outcomes[history.outcome] += 1
        self.struck.update(history.struck)
        self.virtual_s += history.seconds
        self.restarts += history.restarts
        self.epochs += history.epochs
        self.redone += history.redone
        self.crashes += history.crashes
        self.messages.update(history.messages)
        if history.violation:
            self.failed[history.seed] = history.violation

    def text(self, took_s: float) -> str:
        """Return the totals as text.

        Args:
            took_s: elapsed real time in seconds.
        """
        lines = [
            f"{self.histories} histories in {took_s:.1f} s: {self.histories / max(took_s, 1e-9):.0f} seeds/s, "
            f"{self.virtual_s / 3600:.1f} h of virtual time",
            f"{sum(self.struck.values())} faults, {self.epochs} epochs, {self.restarts} warm restarts, "
            f"{self.crashes} deaths of the control plane, {self.redone} committed steps done again",
            "",
            "histories by outcome",
            *(f"{count:8d}  {outcome}" for outcome, count in self.outcomes.most_common()),
            "",
            *_faults(self.struck),
            "",
            "reports taken in and orders given, by kind",
            *wrap(
                ", ".join(f"{kind} {count}" for kind, count in self.messages.most_common()),
                116,
                initial_indent="  ",
                subsequent_indent="  ",
            ),
            "",
            f"violations: {len(self.failed)}",
            *(f"    seed {seed}: {text.splitlines()[0]}" for seed, text in sorted(self.failed.items())[:20]),
        ]
        return "\n".join(lines)


def _faults(struck: Counter) -> list[str]:
    """Return a table of faults: a row per kind, a column per phase of the control plane."""
    phases = [*PHASES, *sorted({phase for _, phase in struck} - set(PHASES))]
    width = max((len(kind) for kind, _ in struck), default=10)
    lines = [f"{'faults by the phase they struck in':{width}s}  " + "".join(f"{phase[:10]:>11s}" for phase in phases)]
    for kind in sorted({kind for kind, _ in struck}):
        lines.append(f"{kind:{width}s}  " + "".join(f"{struck[kind, phase]:11d}" for phase in phases))
    return lines
