"""Data types that describe a kind of fault, with the possible outcomes. The kinds are in :mod:`ft.faults.table`."""

from collections.abc import Callable
from dataclasses import dataclass

from ft.faults import verdict
from ft.faults.verdict import Verdict

HARMLESS, IN_PLACE, REPLACED, RESTARTED = "harmless", "recovered in place", "replaced", "warm restart"
STOPPED, UNNOTICED = "stopped with a message", "not noticed"
MEANING = {
    HARMLESS: "Training continues, and its losses equal those of a run without the fault.",
    IN_PLACE: "The epoch ends. Every worker keeps its seat, broken groups are rebuilt, and all workers return to the "
    "last committed step, which is in memory: at most one step is repeated.",
    REPLACED: "The worker is killed if it is still alive. A standby takes its logical rank and restores the state "
    "from a peer copy. All workers return to the last committed step: at most one step is repeated.",
    RESTARTED: "All workers are started again from the warm pool and continue from the newest valid checkpoint of "
    "--save (without one, from the first step).",
    STOPPED: "The run ends on all nodes with a message that says why.",
    UNNOTICED: "Nothing in a hot-swap run without DMR detects the fault; the losses differ from then on.",
}
"""Outcome of a fault if nothing else fails -> what it means, from the mildest to the worst."""

OF_ACTION = {verdict.RETRY: IN_PLACE, verdict.REPLACE: REPLACED, verdict.RESTART: RESTARTED, verdict.STOP: STOPPED}
"""Action of a verdict (``ft.faults.verdict``) -> outcome."""

WORKER, AGENT, NETWORK_OF_NODE, FILES, CONTROL, START = "worker", "agent", "network", "files", "control", "start"
"""Where a fault is injected. START: not by ``--inject``, but by starting one worker with other settings."""

ROOT, GPU, DMR = "root", "gpu", "dmr"
"""What the injection of a fault may require: root permissions, a GPU, or double execution of operators (DMR)."""


@dataclass(frozen=True)
class Sign:
    """The observation by which a kind of fault is detected.

    Attributes:
        category: category that the failure policy assigns.
        signal: name of the observation, one or two words.
        judge: returns the verdict of ``ft.faults.verdict`` on this observation. A test compares it with the two other
            attributes, so that a change of the policy shows as a difference.
        seldom: names of other observations of the same category that the same fault can lead to.
    """

    category: str
    signal: str
    judge: Callable[[], Verdict]
    seldom: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One kind of fault, or one variant of a kind that has another outcome than its other variants.

    Attributes:
        kind: name in ``--inject``.
        does: what the injection does.
        outcome: key of ``MEANING``: the result if nothing else fails.
        seen: what a person who watches the run sees.
        sign: how the control plane detects it, or None if it detects nothing.
        answer: what the system does in addition to the meaning of the outcome.
        how: keys of ``--inject`` that select this variant, "key=value[:key=value]".
        where: where it is injected (WORKER, AGENT, ...).
        needs: what the injection requires: ROOT, GPU, DMR or "" (nothing).
    """

    kind: str
    does: str
    outcome: str
    seen: str
    sign: Sign | None = None
    answer: str = ""
    how: str = ""
    where: str = WORKER
    needs: str = ""

    @property
    def name(self) -> str:
        """Return the unique name of the row: the kind with the keys of the variant."""
        return f"{self.kind}:{self.how}" if self.how else self.kind

    def spec(self, when: str) -> str:
        """Return the fault as a value of ``--inject``. ``when`` is its time and victim, for example "step=4:rank=1"."""
        return f"{self.kind}@{when}" + (f":{self.how}" if self.how else "")
