"""Report: totals over many simulated runs ("histories"), as text.

A quorum is the set of replicas that execute a training step together; the quorum server forms it.
"""

from collections import Counter
from dataclasses import dataclass, field

from ft.show.text import seconds
from tests.simulation.hsdp.checks import BACK_S, FIRST_STEP_S, STUCK_S
from tests.simulation.hsdp.run import History


@dataclass
class Summary:
    """Totals over histories.

    Attributes:
        histories: number of histories.
        struck: number of injected faults, by kind.
        virtual_s: simulated time in seconds.
        steps: number of committed steps.
        quorums: number of quorums formed.
        redone: number of committed steps that were executed again.
        returns: number of commits by replicas that were behind and fetched the state of the others in that step.
        deaths: number of deaths of the quorum server.
        loads: number of times that a checkpoint was loaded because no replica had a state any more.
        pauses: kind of fault, or "none" -> for each history, the longest time between two commits that it caused,
            beyond a step, in simulated seconds.
        failed: seed of a history -> the protocol property that it violated.
    """

    histories: int = 0
    struck: Counter = field(default_factory=Counter)
    virtual_s: float = 0.0
    steps: int = 0
    quorums: int = 0
    redone: int = 0
    returns: int = 0
    deaths: int = 0
    loads: int = 0
    pauses: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, history: History) -> None:
        self.histories += 1
        self.struck.update(history.struck)
        self.virtual_s += history.seconds
        self.steps += history.steps
        self.quorums += history.quorums
        self.redone += history.redone
        self.returns += history.returns
        self.deaths += history.deaths_of_server
        self.loads += history.loads
        for cause, pause in history.pauses.items():
            self.pauses.setdefault(cause, []).append(pause)
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
            f"{sum(self.struck.values())} faults, {self.quorums} quorums, {self.steps} steps, {self.redone} committed "
            f"ones done again, {self.loads} loads of a checkpoint because nobody had a state any more,",
            f"{self.returns} steps committed by a replica that was behind, {self.deaths} deaths of the quorum server",
            f"in each: training never stands still for {seconds(STUCK_S)} while the minimum lives "
            f"({seconds(STUCK_S + FIRST_STEP_S)} before a life's first step), all are healthy within "
            f"{seconds(BACK_S)} of the last fault",
            "",
            "faults                       struck  alone: longest time without a commit beyond a step (worst, median)",
            *(f"  {kind:26s} {self.struck[kind]:6d}  {self._pause(kind)}" for kind in sorted(self.struck)),
            f"  {'none':26s} {'':6s}  {self._pause('none')}",
            "",
            f"violations: {len(self.failed)}",
            *(f"    seed {seed}: {text.splitlines()[0]}" for seed, text in sorted(self.failed.items())[:20]),
        ]
        return "\n".join(lines)

    def _pause(self, kind: str) -> str:
        found = sorted(self.pauses.get(kind, []))
        return f"{seconds(found[-1])}, {seconds(found[len(found) // 2])}" if found else "-"
